//! Measures the error of quantized GEMMs: adds nodes that compare a tile of each product with the
//! product of the unquantized operands.

use std::collections::{HashMap, HashSet};

use deepwell_precision::QuantFormat;

use crate::ops::{Axis, ProductError, SAMPLED_ROWS, SampleOperand};
use crate::{
    Derivation, GemmKind, Graph, IrError, Node, Op, Shape, Stage, Tensor, TensorId, TensorKind,
};

/// Largest contraction of a sample: longer ones are cut. The operands of wgrad are kept from the
/// forward to the backward pass, 128 columns of so many tokens.
const DEPTH_MAX: usize = 8192;
const TOKENS_MAX: usize = 2048;

/// Adds a [`ProductError`] for every GEMM of quantized operands, grouped or not, before the GEMM,
/// and a [`SampleOperand`] of each of its operands. Neighbouring nodes that another pass fuses stay
/// neighbours.
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
    matches!(node.op, Op::ScaledGemm(_) | Op::ScaledGroupedGemm(_))
}

fn quantizes(node: &Node) -> bool {
    matches!(node.op, Op::Quantize(_) | Op::StochasticRound(_) | Op::Amax(_) | Op::Collective(_))
}

/// A GEMM of quantized operands.
struct Gemm {
    kind: GemmKind,
    formats: [QuantFormat; 2],
    /// Input indices of the data of both operands.
    data: [usize; 2],
    plane_inputs: usize,
    /// Offsets of the groups of a grouped GEMM.
    offsets: Option<TensorId>,
}

impl Gemm {
    fn of(node: &Node) -> Option<Gemm> {
        Some(match &node.op {
            Op::ScaledGemm(op) => Gemm {
                kind: op.kind,
                formats: [op.a, op.b],
                data: [0, op.b_input()],
                plane_inputs: op.plane_inputs(),
                offsets: None,
            },
            Op::ScaledGroupedGemm(op) => Gemm {
                kind: op.kind,
                formats: [op.a, op.b],
                data: [0, op.b_input()],
                plane_inputs: op.plane_inputs(),
                offsets: Some(node.inputs[op.plane_inputs()]),
            },
            _ => return None,
        })
    }
}

/// How a tensor is sampled: along the axis of a contraction, of one of the groups of the offsets.
type Sampling = (Axis, Option<TensorId>);

struct Rewrite<'a> {
    source: &'a Graph,
    result: Graph,
    /// How GEMMs read each tensor that is no parameter.
    wanted: HashMap<TensorId, Vec<Sampling>>,
    samples: HashMap<(TensorId, Sampling), TensorId>,
    /// Tensors that nodes computed so far.
    computed: HashSet<TensorId>,
    /// Outputs of nodes since the last samples.
    pending: Vec<TensorId>,
}

impl<'a> Rewrite<'a> {
    fn new(source: &'a Graph) -> Rewrite<'a> {
        let mut wanted: HashMap<TensorId, Vec<Sampling>> = HashMap::new();
        for (gemm, node) in source.nodes.iter().filter_map(|node| Some((Gemm::of(node)?, node))) {
            for index in gemm.data {
                let Some((of, axis)) = operand(source, node.inputs[index]) else { continue };
                let samplings = wanted.entry(of).or_default();
                if !samplings.contains(&(axis, gemm.offsets)) {
                    samplings.push((axis, gemm.offsets));
                }
            }
        }
        let result = Graph { nodes: Vec::new(), ..source.clone() };
        let (samples, computed) = (HashMap::new(), HashSet::new());
        Rewrite { source, result, wanted, samples, computed, pending: Vec::new() }
    }

    /// Adds the samples of the tensors that were computed since the last samples.
    fn sample_pending(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        self.computed.extend(&pending);
        for tensor in pending {
            let template = self.result.nodes.last().cloned();
            let samplings = self.wanted.get(&tensor).cloned().unwrap_or_default();
            // Offsets of a later pass are not known yet; the GEMM then takes the sample.
            let is_known = |(_, offsets): &Sampling| {
                offsets.is_none_or(|offsets| self.computed.contains(&offsets))
            };
            let samplings: Vec<Sampling> = samplings.into_iter().filter(is_known).collect();
            for (sampling, template) in samplings.into_iter().zip(template.iter().cycle()) {
                self.sample(tensor, sampling, template);
            }
        }
    }

    /// Adds a sample of a tensor, in the phase of `template`.
    fn sample(&mut self, tensor: TensorId, (axis, offsets): Sampling, template: &Node) -> TensorId {
        let of = self.source.tensor(tensor);
        let [rows, columns] = of.shape.0[of.shape.0.len().saturating_sub(2)..] else {
            unreachable!("operands of GEMMs are matrices, as the pass before has seen")
        };
        let along = if axis == Axis::Column { rows } else { columns };
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
            inputs: [tensor].into_iter().chain(offsets).collect(),
            outputs: vec![sample],
            recompute: false,
            repeats: false,
            ..template.clone()
        });
        self.samples.insert((tensor, (axis, offsets)), sample);
        sample
    }

    fn statistic(&mut self, name: &str, shape: Shape, dtype: crate::DType) -> TensorId {
        let kind = TensorKind::Statistic;
        self.result.add_tensor(Tensor { name: name.to_string(), shape, dtype, kind, link: None })
    }

    /// Adds the error of a GEMM.
    fn measure(&mut self, node: &Node) {
        let Some(gemm) = Gemm::of(node) else { return };
        let Gemm { kind, formats: [a_format, b_format], plane_inputs, offsets, .. } = gemm;
        let operands = gemm.data.map(|index| operand(self.source, node.inputs[index]));
        let [Some(a), Some(b)] = operands else { return };
        let Some(weight) = self.weight(node, kind, b.0) else { return };
        let samples = [a, b].map(|(tensor, axis)| {
            let sampling = (axis, offsets);
            match self.samples.get(&(tensor, sampling)) {
                Some(&sample) => sample,
                // Parameters do not change within a step.
                None => self.sample(tensor, sampling, node),
            }
        });
        let name = format!("{}.product_error", node.name);
        let error = self.statistic(&name, Shape::new([2]), crate::DType::F32);
        let planes = &node.inputs[..plane_inputs];
        self.result.nodes.push(Node {
            name,
            op: ProductError { kind, weight, a: a_format, b: b_format }.into(),
            inputs: samples.into_iter().chain(planes.iter().copied()).chain(offsets).collect(),
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

/// The tensor whose quantized data are `data`, and the axis of the contraction.
fn operand(graph: &Graph, data: TensorId) -> Option<(TensorId, Axis)> {
    let link = graph.tensor(data).link?;
    match link.derivation {
        Derivation::Plane { axis, .. } => Some((link.of, axis)),
        _ => None,
    }
}
