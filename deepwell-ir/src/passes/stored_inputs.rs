//! Activation functions that read stored inputs in the format of storage.

use std::collections::BTreeSet;

use super::predict::Predict;
use crate::ops::{Axis, StoredSwiGlu, StoredSwiGluBackward};
use crate::{DType, Graph, Node, Op, TensorId};

/// Replaces the [`crate::ops::Dequantize`]s of gate and up and the [`crate::ops::SwiGlu`] and
/// [`crate::ops::SwiGluBackward`] that read them by [`StoredSwiGlu`] and [`StoredSwiGluBackward`],
/// if no other node reads the dequantized tensors and `predict` returns a shorter time. Without
/// kernels for these, no node changes.
pub(super) fn read_stored_inputs(graph: &Graph, predict: Predict<'_>) -> Graph {
    let mut readers = vec![BTreeSet::new(); graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|id| {
            readers[id.index()].insert(index);
        });
    }
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (at, pair) in graph.nodes.windows(2).enumerate() {
        let [gate, up] = pair else { continue };
        let of = [gate, up].map(|node| node.outputs.first().map(|id| &readers[id.index()]));
        let [Some(of_gate), Some(of_up)] = of else { continue };
        let stored = |&reader: &usize| stored(&graph.nodes[reader], gate, up);
        let Some(merged) = of_gate.iter().map(stored).collect::<Option<Vec<Node>>>() else {
            continue;
        };
        let apart = [at, at + 1].into_iter().chain(of_gate.iter().copied());
        let apart = apart.map(|index| &graph.nodes[index]);
        let is_shorter = time(graph, merged.iter(), predict)
            .zip(time(graph, apart, predict))
            .is_some_and(|(merged, apart)| merged < apart);
        if merged.is_empty() || of_gate != of_up || !is_shorter {
            continue;
        }
        (nodes[at], nodes[at + 1]) = (None, None);
        for (&index, node) in of_gate.iter().zip(merged) {
            nodes[index] = Some(node);
        }
    }
    Graph { nodes: nodes.into_iter().flatten().collect(), ..graph.clone() }
}

/// The node that reads the planes of `gate` and of `up` in place of their dequantized tensors.
fn stored(node: &Node, gate: &Node, up: &Node) -> Option<Node> {
    let (Op::Dequantize(of_gate), Op::Dequantize(of_up)) = (&gate.op, &up.op) else { return None };
    if of_gate != of_up || of_gate.axis != Axis::Row || of_gate.to != DType::Bf16 {
        return None;
    }
    let format = of_gate.format;
    let (op, first): (Op, usize) = match node.op {
        Op::SwiGlu(_) => (StoredSwiGlu { format }.into(), 0),
        Op::SwiGluBackward(_) => (StoredSwiGluBackward { format }.into(), 1),
        _ => return None,
    };
    let (others, read) = node.inputs.split_at(first);
    let is_it = read == [gate.outputs[0], up.outputs[0]] && !others.contains(&gate.outputs[0]);
    let inputs = [others, &gate.inputs, &up.inputs].concat();
    is_it.then(|| Node { op, inputs, ..node.clone() })
}

/// The time of some nodes; `None` if one has no kernel.
fn time<'a>(
    graph: &Graph,
    mut nodes: impl Iterator<Item = &'a Node>,
    predict: Predict<'_>,
) -> Option<f64> {
    nodes.try_fold(0.0, |sum, node| {
        let types = |ids: &[TensorId]| crate::op::input_types(graph, ids);
        let inputs = types(&node.inputs);
        node.op.rule().infer(&inputs).ok()?;
        Some(sum + predict(&node.op, &inputs, &types(&node.outputs))?)
    })
}
