//! Merges the quantizations of a tensor to its rowwise and columnwise operand into one op, which
//! reads the tensor once for the largest magnitudes and once for the elements.

use std::collections::HashMap;

use super::predict::Predict;
use crate::ops::{Axis, Quantize, QuantizeOperands, StochasticRound};
use crate::{Graph, Node, Op, Plane, TensorId};

/// Replaces a [`Quantize`] along rows and one along columns of the same tensor, next to each other,
/// and the [`StochasticRound`]s of their operands by a [`QuantizeOperands`], if `predict` returns a
/// shorter time. Without a kernel for it, no node changes.
pub(super) fn merge_quantizations(graph: &Graph, predict: Predict<'_>) -> Graph {
    let search = Search::new(graph, predict);
    let mut is_merged = vec![false; graph.nodes.len()];
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for at in 1..graph.nodes.len() {
        if is_merged[at - 1] {
            continue;
        }
        let Some((merged, replaced)) = search.merge([at - 1, at]) else { continue };
        for index in replaced {
            (nodes[index], is_merged[index]) = (None, true);
        }
        nodes[at - 1] = Some(merged);
    }
    Graph { nodes: nodes.into_iter().flatten().collect(), ..graph.clone() }
}

/// An operand: its quantization, and the stochastic rounding of its elements.
struct Operand<'a> {
    op: &'a Quantize,
    node: usize,
    rounding: Option<(usize, &'a StochasticRound)>,
}

struct Search<'a> {
    graph: &'a Graph,
    predict: Predict<'a>,
    /// Stochastic roundings of whole tensors, by the scales that they read.
    roundings: HashMap<TensorId, (usize, &'a StochasticRound)>,
    /// Number of operands that refer to each tensor.
    readers: Vec<usize>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, predict: Predict<'a>) -> Search<'a> {
        let roundings = graph.nodes.iter().enumerate().filter_map(|(index, node)| {
            let Op::StochasticRound(op) = &node.op else { return None };
            let is_whole = node.inputs.len() == op.key_input() + 1 && op.columns.is_none();
            is_whole.then(|| (node.inputs[1], (index, op)))
        });
        let mut readers = vec![0; graph.tensors.len()];
        for id in graph.nodes.iter().flat_map(|node| &node.inputs) {
            readers[id.index()] += 1;
        }
        Search { graph, predict, roundings: roundings.collect(), readers }
    }

    /// The node for two quantizations with their roundings, and the replaced nodes. `None` if the
    /// quantizations do not belong together, or the node is not faster.
    fn merge(&self, pair: [usize; 2]) -> Option<(Node, Vec<usize>)> {
        let nodes = pair.map(|index| &self.graph.nodes[index]);
        let is_same = nodes[0].inputs == nodes[1].inputs && nodes[0].phase == nodes[1].phase;
        // A second input says that the tensor is a slice, or has groups.
        if !is_same || nodes[0].inputs.len() != 1 {
            return None;
        }
        let [first, second] = pair.map(|index| self.operand(index));
        let (first, second) = (first?, second?);
        let (row, column) = match (first.op.axis, second.op.axis) {
            (Axis::Row, Axis::Column) => (first, second),
            (Axis::Column, Axis::Row) => (second, first),
            _ => return None,
        };
        let mut inputs = nodes[0].inputs.clone();
        let mut outputs = Vec::new();
        let mut streams = [None; 2];
        let mut replaced = Vec::new();
        for (operand, stream) in [&row, &column].into_iter().zip(&mut streams) {
            let first_output = outputs.len();
            outputs.extend(&self.graph.nodes[operand.node].outputs);
            replaced.push(operand.node);
            let Some((index, rounding)) = operand.rounding else { continue };
            let node = &self.graph.nodes[index];
            *stream = Some(StochasticRound::stream(&node.name));
            outputs[first_output] = node.outputs[0];
            inputs.truncate(1);
            inputs.push(node.inputs[rounding.key_input()]);
            replaced.push(index);
        }
        let of = |operand: &Operand<'_>| {
            let format = operand.rounding.map_or(operand.op.format, |(_, op)| op.format);
            Quantize { format, ..operand.op.clone() }
        };
        let op = QuantizeOperands { row: of(&row), column: of(&column), streams };
        let merged = Node { op: op.into(), inputs, outputs, ..nodes[0].clone() };
        let apart: Option<f64> =
            replaced.iter().map(|&index| self.time(&self.graph.nodes[index])).sum();
        (self.time(&merged)? < apart?).then_some((merged, replaced))
    }

    /// The operand that a node quantizes, if it has a tensor scale and, with a stochastic rounding,
    /// no reader of the elements rounded to nearest.
    fn operand(&self, node: usize) -> Option<Operand<'a>> {
        let Op::Quantize(op) = &self.graph.nodes[node].op else { return None };
        let planes = op.planes();
        let place = |plane| planes.iter().position(|&(_, it)| it == plane);
        place(Plane::TensorScale)?;
        let output = |plane| place(plane).map(|at| self.graph.nodes[node].outputs[at]);
        let rounding = self.roundings.get(&output(Plane::Scales)?).copied();
        let is_read = self.readers[output(Plane::Data)?.index()] > 0;
        (rounding.is_none() || !is_read).then_some(Operand { op, node, rounding })
    }

    fn time(&self, node: &Node) -> Option<f64> {
        let types = |ids: &[TensorId]| crate::op::input_types(self.graph, ids);
        (self.predict)(&node.op, &types(&node.inputs), &types(&node.outputs))
    }
}
