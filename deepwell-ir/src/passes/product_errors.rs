//! Measures the error of quantized GEMMs: adds nodes that compare a tile of each product with the
//! product of the unquantized operands.

use std::collections::HashMap;

use crate::ops::{Axis, ProductError, SAMPLED_ROWS, SampleOperand};
use crate::{
    Derivation, GemmKind, Graph, IrError, Node, Op, Shape, Stage, Tensor, TensorId, TensorKind,
};

/// Largest contraction of a sample: longer ones are cut. The operands of wgrad are kept from the
/// forward to the backward pass, 128 columns of so many tokens.
const DEPTH_MAX: usize = 8192;
const TOKENS_MAX: usize = 2048;

/// Adds a [`ProductError`] for every GEMM of two quantized matrices, before the GEMM, and a
/// [`SampleOperand`] of each of its operands. Neighbouring nodes that another pass fuses stay
/// neighbours. Grouped GEMMs have none.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn measure_products(graph: &Graph) -> Result<Graph, IrError> {
    if graph.stage != Stage::Quantized {
        let pass = "product_errors";
        return Err(IrError::Stage { pass, wants: Stage::Quantized, got: graph.stage });
    }
    let mut rewrite = Rewrite::new(graph);
    let mut at = 0;
    while at < graph.nodes.len() {
        let run = graph.nodes[at..].iter().take_while(|node| is_gemm(node)).count();
        for node in &graph.nodes[at..at + run] {
            rewrite.measure(node);
        }
        rewrite.result.nodes.extend_from_slice(&graph.nodes[at..at + run]);
        at += run;
        if let Some(node) = graph.nodes.get(at) {
            rewrite.result.nodes.push(node.clone());
            rewrite.pending.extend(&node.outputs);
            at += 1;
        }
        if graph.nodes.get(at).is_none_or(|next| !quantizes(next)) {
            rewrite.sample_pending();
        }
    }
    crate::verify(&rewrite.result)?;
    Ok(rewrite.result)
}

fn is_gemm(node: &Node) -> bool {
    matches!(node.op, Op::ScaledGemm(_))
}

fn quantizes(node: &Node) -> bool {
    matches!(node.op, Op::Quantize(_) | Op::StochasticRound(_) | Op::Amax(_) | Op::Collective(_))
}

struct Rewrite<'a> {
    source: &'a Graph,
    result: Graph,
    /// Axes along which GEMMs contract each tensor that is no parameter.
    wanted: HashMap<TensorId, Vec<Axis>>,
    samples: HashMap<(TensorId, Axis), TensorId>,
    /// Outputs of nodes since the last samples.
    pending: Vec<TensorId>,
}

impl<'a> Rewrite<'a> {
    fn new(source: &'a Graph) -> Rewrite<'a> {
        let mut wanted: HashMap<TensorId, Vec<Axis>> = HashMap::new();
        for (op, node) in source.nodes.iter().filter_map(|node| Some((gemm_of(node)?, node))) {
            for index in [0, op.b_input()] {
                let Some((of, axis)) = operand(source, node.inputs[index]) else { continue };
                let axes = wanted.entry(of).or_default();
                if !axes.contains(&axis) {
                    axes.push(axis);
                }
            }
        }
        let result = Graph { nodes: Vec::new(), ..source.clone() };
        Rewrite { source, result, wanted, samples: HashMap::new(), pending: Vec::new() }
    }

    /// Adds the samples of the tensors that were computed since the last samples.
    fn sample_pending(&mut self) {
        for tensor in std::mem::take(&mut self.pending) {
            let template = self.result.nodes.last().cloned();
            let axes = self.wanted.get(&tensor).cloned().unwrap_or_default();
            for (axis, template) in axes.into_iter().zip(template.iter().cycle()) {
                self.sample(tensor, axis, template);
            }
        }
    }

    /// Adds the sample of a tensor along an axis, in the phase of `template`.
    fn sample(&mut self, tensor: TensorId, axis: Axis, template: &Node) -> TensorId {
        let of = self.source.tensor(tensor);
        let along = of.shape.0[if axis == Axis::Column { 0 } else { 1 }];
        let depth = along.as_fixed().map_or(TOKENS_MAX, |fixed| fixed.min(DEPTH_MAX));
        let shape = match axis {
            Axis::Column => Shape::new([depth, SAMPLED_ROWS]),
            _ => Shape::new([SAMPLED_ROWS, depth]),
        };
        let number = self.samples.len();
        let name = format!("{}.{}.sample{number}", of.name, axis.name());
        let sample = self.statistic(&name, shape, of.dtype);
        self.result.nodes.push(Node {
            name,
            op: SampleOperand { axis, depth }.into(),
            inputs: vec![tensor],
            outputs: vec![sample],
            recompute: false,
            repeats: false,
            ..template.clone()
        });
        self.samples.insert((tensor, axis), sample);
        sample
    }

    fn statistic(&mut self, name: &str, shape: Shape, dtype: crate::DType) -> TensorId {
        let kind = TensorKind::Statistic;
        self.result.add_tensor(Tensor { name: name.to_string(), shape, dtype, kind, link: None })
    }

    /// Adds the error of a GEMM.
    fn measure(&mut self, node: &Node) {
        let Some(op) = gemm_of(node) else { return };
        let operands = [0, op.b_input()].map(|index| operand(self.source, node.inputs[index]));
        let [Some(a), Some(b)] = operands else { return };
        let Some(weight) = self.weight(node, op.kind, b.0) else { return };
        let samples = [a, b].map(|(tensor, axis)| match self.samples.get(&(tensor, axis)) {
            Some(&sample) => sample,
            // Parameters do not change within a step.
            None => self.sample(tensor, axis, node),
        });
        let name = format!("{}.product_error", node.name);
        let error = self.statistic(&name, Shape::new([2]), crate::DType::F32);
        let planes = &node.inputs[..op.plane_inputs()];
        self.result.nodes.push(Node {
            name,
            op: ProductError { kind: op.kind, weight, a: op.a, b: op.b }.into(),
            inputs: samples.into_iter().chain(planes.iter().copied()).collect(),
            outputs: vec![error],
            recompute: false,
            repeats: false,
            ..node.clone()
        });
    }

    /// Name of the weight of a GEMM.
    fn weight(&self, node: &Node, kind: GemmKind, b: TensorId) -> Option<String> {
        let parameter = match (kind, &self.source.tensor(node.outputs[0]).kind) {
            (GemmKind::Wgrad, TensorKind::ParameterGradient { parameter }) => *parameter,
            (GemmKind::Wgrad, _) => return None,
            _ => b,
        };
        let parameter = self.source.tensor(parameter);
        matches!(parameter.kind, TensorKind::Parameter { .. }).then(|| parameter.name.clone())
    }
}

fn gemm_of(node: &Node) -> Option<&crate::ops::ScaledGemm> {
    match &node.op {
        Op::ScaledGemm(op) => Some(op),
        _ => None,
    }
}

/// The tensor whose quantized data are `data`, and the axis of the contraction.
fn operand(graph: &Graph, data: TensorId) -> Option<(TensorId, Axis)> {
    let link = graph.tensor(data).link?;
    match link.derivation {
        Derivation::Plane { axis, .. } => Some((link.of, axis)),
        _ => None,
    }
}
