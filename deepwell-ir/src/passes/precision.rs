//! Makes a precision policy explicit: casts, quantizations and dequantizations become nodes.
//!
//! Quantization stands right behind the producer of the high-precision tensor, so that what the
//! forward keeps for the backward is the quantized operand. Both directions of a tensor are made in
//! one node when both are read.
//!
//! A GEMM of which only one operand is quantized reads it dequantized, and so does one that the
//! policy wants emulated. Dequantization stands right before the first GEMM that reads the result,
//! and is done once more in the backward, so that there, too, what is kept is the quantized
//! operand. A weight is dequantized with the weights' other copies.
//!
//! Gradients that are rounded at random are quantized as others are; behind all quantizations of
//! their producer the elements are then rounded once more from the high-precision tensor.

use std::collections::{HashMap, HashSet};

use deepwell_precision::{
    Assignment, Direction, ElementRounding, OperandClass, PrecisionPolicy, QuantFormat,
};

use super::TensorPrecision;
use super::assign::{activation_dtype, assign, with_routers_in_f32};
use crate::builder::output_name;
use crate::op::input_types;
use crate::ops::{
    Axis, Collective, CollectiveKind, Dequantize, GroupedRows, Quantize, ScaledGemm,
    ScaledGroupedGemm, StochasticRound,
};
use crate::{
    DType, GemmKind, Graph, InputRole, IrError, Link, Node, Op, Part, Phase, Plane, Stage, Storage,
    Tensor, TensorId, TensorKind, ops,
};

/// Rewrites the graph under `policy`, and says what each parameter got, in execution order.
///
/// Activations become BF16, or stay F32 when the policy gives F32 to every tensor. Takes a graph
/// at any stage before [`Stage::Quantized`], so that a forward-only graph for evaluation goes
/// through the same pass.
///
/// # Errors
/// A policy that cannot be applied: a rule without a match, F32 for some tensors only.
pub fn apply_precision(
    graph: &Graph,
    policy: &PrecisionPolicy,
) -> Result<(Graph, Vec<TensorPrecision>), IrError> {
    apply_served_precision(graph, policy, &|_| Ok(()))
}

/// [`apply_precision`] for a target that may not serve every format: `serves` says why not. Tensors
/// of such a format become BF16, and their reason says so.
///
/// # Errors
/// As [`apply_precision`].
pub fn apply_served_precision(
    graph: &Graph,
    policy: &PrecisionPolicy,
    serves: &dyn Fn(&QuantFormat) -> Result<(), String>,
) -> Result<(Graph, Vec<TensorPrecision>), IrError> {
    if graph.stage >= Stage::Quantized {
        return Err(IrError::Stage {
            pass: "precision",
            wants: Stage::Recomputed,
            got: graph.stage,
        });
    }
    let (assignments, report) = assign(graph, policy, serves)?;
    let activation = activation_dtype(&report)?;
    let report = with_routers_in_f32(graph, report);
    let mut result = Graph { stage: Stage::Quantized, nodes: Vec::new(), ..graph.clone() };
    for tensor in &mut result.tensors {
        if tensor.kind == TensorKind::Activation {
            tensor.dtype = activation;
        }
    }
    let mut rewrite = Rewrite {
        source: graph,
        assignments,
        activation,
        result,
        high_precision: HashMap::new(),
        quantized: HashMap::new(),
        dequantized: HashMap::new(),
    };
    let needs = rewrite.needs();
    rewrite.weights(&needs)?;
    for node in &graph.nodes {
        rewrite.node(node)?;
        for &output in &node.outputs {
            rewrite.quantize(output, &needs, node)?;
        }
        for &output in &node.outputs {
            rewrite.round(output, &needs, node);
        }
    }
    let result = rewrite.result;
    crate::verify(&result)?;
    Ok((result, report))
}

/// Whether an op reads an operand as the FP32 master, whatever the policy has for activations:
/// routers choose in FP32, and a sink is a score, which softmax has in FP32.
pub(super) fn reads_master(op: &Op, index: usize) -> bool {
    match op {
        Op::RouterLogits(_) | Op::Route(_) => index >= 1,
        Op::RouterLogitsBackward(_) => index == 2,
        Op::Attention(op) => op.heads.sinks && index == 3,
        Op::AttentionBackward(op) => op.heads.sinks && index == 6,
        _ => false,
    }
}

/// The groups of a GEMM of grouped rows.
fn grouped_rows(op: &Op) -> Option<GroupedRows> {
    match op {
        Op::GroupedGemm(op) => Some(op.grouped),
        Op::GroupedGemmInputGrad(op) => Some(op.grouped),
        Op::GroupedGemmWeightGrad(op) => Some(op.grouped),
        _ => None,
    }
}

/// How a tensor is quantized, along which axes, and along which of them at random.
struct Need {
    /// How, to nearest.
    format: QuantFormat,
    axis: Axis,
    stochastic: Option<Axis>,
}

/// The needs of each tensor that is quantized, in order of use.
type Needs = HashMap<TensorId, Vec<Need>>;

/// A high-precision tensor and how it is quantized.
type Key = (TensorId, QuantFormat);

/// How a GEMM reads one of its operands.
#[derive(Clone, Copy)]
enum Reading {
    /// As it is.
    Plain,
    /// The operand along an axis.
    Quantized(Key, Axis),
}

/// A GEMM of a linear layer under the policy.
struct Gemm {
    kind: GemmKind,
    operands: [Reading; 2],
    is_scaled: bool,
}

struct Rewrite<'a> {
    source: &'a Graph,
    assignments: HashMap<TensorId, Assignment>,
    activation: DType,
    result: Graph,
    /// The compute copies of parameters that are read in high precision.
    high_precision: HashMap<TensorId, TensorId>,
    /// The planes of each quantized operand made, data first.
    quantized: HashMap<(Key, Axis), Vec<TensorId>>,
    /// Operands that were dequantized, for the nodes of a phase.
    dequantized: HashMap<(Key, Axis, Phase), TensorId>,
}

impl Rewrite<'_> {
    /// What the policy makes of a node, when it has the node's tensor in MXFP8.
    fn gemm(&self, node: &Node) -> Option<Gemm> {
        let (kind, parameter) = match &node.op {
            Op::Linear(_) | Op::GroupedGemm(_) => (GemmKind::Fprop, node.inputs[1]),
            Op::LinearInputGrad(_) | Op::GroupedGemmInputGrad(_) => {
                (GemmKind::Dgrad, node.inputs[1])
            }
            Op::LinearWeightGrad(_) | Op::GroupedGemmWeightGrad(_) => {
                match self.source.tensor(node.outputs[0]).kind {
                    TensorKind::ParameterGradient { parameter } => (GemmKind::Wgrad, parameter),
                    _ => return None,
                }
            }
            _ => return None,
        };
        let assignment = self.assignments.get(&parameter)?;
        let direction = kind.direction();
        let axes = match direction {
            Direction::Fprop => [Axis::Row, Axis::Row],
            Direction::Dgrad => [Axis::Row, Axis::Column],
            Direction::Wgrad => [Axis::Column, Axis::Column],
        };
        let operands = std::array::from_fn(|index| {
            let (id, class) = (node.inputs[index], OperandClass::of(direction)[index]);
            match assignment.operand(class) {
                Some(quantization) => Reading::Quantized((id, quantization), axes[index]),
                None => Reading::Plain,
            }
        });
        Some(Gemm { kind, operands, is_scaled: assignment.gemm(direction).is_scaled })
    }

    /// Every tensor that is quantized, with the axes that its readers want.
    fn needs(&self) -> Needs {
        let mut needs = Needs::new();
        for gemm in self.source.nodes.iter().filter_map(|node| self.gemm(node)) {
            for operand in gemm.operands {
                let Reading::Quantized((tensor, format), axis) = operand else { continue };
                let nearest = format.with_rounding(ElementRounding::Nearest);
                let of_tensor = needs.entry(tensor).or_default();
                let known = of_tensor.iter().position(|need| need.format == nearest);
                let index = known.unwrap_or_else(|| {
                    of_tensor.push(Need { format: nearest, axis, stochastic: None });
                    of_tensor.len() - 1
                });
                let need = &mut of_tensor[index];
                need.axis = need.axis.union(axis);
                if format.is_stochastic() {
                    let known = need.stochastic;
                    need.stochastic = Some(known.map_or(axis, |known| known.union(axis)));
                }
            }
        }
        needs
    }

    /// Casts and quantizations of parameters, in [`Phase::Weights`].
    fn weights(&mut self, needs: &Needs) -> Result<(), IrError> {
        let source = self.source;
        let mut readers: HashMap<TensorId, &Node> = HashMap::new();
        for node in &source.nodes {
            for &input in &node.inputs {
                readers.entry(input).or_insert(node);
            }
        }
        let in_high_precision = self.read_in_high_precision();
        let dequantized = self.dequantized_uses();
        for (id, parameter) in source.parameters() {
            let Some(&reader) = readers.get(&id) else { continue };
            if in_high_precision.contains(&id) && self.activation != DType::F32 {
                let name = format!("{}.{}", parameter.name, self.activation);
                let copy = self.result.add_tensor(Tensor {
                    name: name.clone(),
                    shape: parameter.shape.clone(),
                    dtype: self.activation,
                    kind: TensorKind::WeightCopy,
                    link: Some(Link { of: id, part: Part::Cast }),
                });
                self.result.nodes.push(Node {
                    name,
                    op: ops::Cast { to: self.activation }.into(),
                    inputs: vec![id],
                    outputs: vec![copy],
                    phase: Phase::Weights,
                    recompute: false,
                    ..reader.clone()
                });
                self.high_precision.insert(id, copy);
            }
            let place = Node { phase: Phase::Weights, ..reader.clone() };
            self.quantize(id, needs, &place)?;
            for &(key, axis) in dequantized.get(&id).into_iter().flatten() {
                self.dequantize(key, axis, &place);
            }
        }
        Ok(())
    }

    /// The quantized operands of each tensor that GEMMs read dequantized.
    fn dequantized_uses(&self) -> HashMap<TensorId, Vec<(Key, Axis)>> {
        let mut uses: HashMap<TensorId, Vec<(Key, Axis)>> = HashMap::new();
        let gemms = self.source.nodes.iter().filter_map(|node| self.gemm(node));
        for operand in gemms.filter(|gemm| !gemm.is_scaled).flat_map(|gemm| gemm.operands) {
            if let Reading::Quantized(key, axis) = operand {
                uses.entry(key.0).or_default().push((key, axis));
            }
        }
        uses
    }

    /// The tensors that some node reads as they are.
    fn read_in_high_precision(&self) -> HashSet<TensorId> {
        let mut read = HashSet::new();
        for node in &self.source.nodes {
            let gemm = self.gemm(node);
            let is_quantized = |index: usize| {
                let operand = gemm.as_ref().and_then(|gemm| gemm.operands.get(index));
                matches!(operand, Some(Reading::Quantized(..)))
            };
            let reads_copy = |index: usize| !is_quantized(index) && !reads_master(&node.op, index);
            let inputs = node.inputs.iter().enumerate();
            read.extend(inputs.filter(|(index, _)| reads_copy(*index)).map(|(_, &id)| id));
        }
        read
    }

    fn quantize(
        &mut self,
        tensor: TensorId,
        needs: &Needs,
        producer: &Node,
    ) -> Result<(), IrError> {
        let wanted = needs.get(&tensor).into_iter().flatten();
        for (count, &Need { format, axis, .. }) in wanted.enumerate() {
            let source_name = &self.result.tensor(tensor).name;
            // An operand that is quantized in another way needs another name.
            let number = if count == 0 { String::new() } else { count.to_string() };
            let name = format!("{source_name}.mx{number}");
            let op = Quantize { format, axis };
            let types = crate::OpRule::infer(&op, &input_types(&self.result, &[tensor]))
                .map_err(|source| IrError::Operands { node: name.clone(), source })?;
            let is_weight = producer.phase == Phase::Weights;
            let outputs: Vec<TensorId> = types
                .into_iter()
                .zip(op.planes())
                .map(|(output, (axis, plane))| {
                    let part = Part::Plane { quantization: count as u32, axis, plane, format };
                    self.result.add_tensor(Tensor {
                        name: output_name(&name, output.suffix),
                        shape: output.shape,
                        dtype: output.dtype,
                        kind: if is_weight && plane != Plane::Counters {
                            TensorKind::WeightCopy
                        } else {
                            TensorKind::Statistic
                        },
                        link: Some(Link { of: tensor, part }),
                    })
                })
                .collect();
            let planes = outputs.chunks_exact(Storage::plane_count(&format));
            for (&axis, planes) in op.axes().iter().zip(planes) {
                self.quantized.insert(((tensor, format), axis), planes.to_vec());
            }
            self.result.nodes.push(Node {
                name,
                op: op.into(),
                inputs: vec![tensor],
                outputs,
                recompute: false,
                repeats: false,
                ..producer.clone()
            });
        }
        Ok(())
    }

    /// Rounds elements of the operands of `tensor` at random, behind its quantizations.
    fn round(&mut self, tensor: TensorId, needs: &Needs, producer: &Node) {
        for need in needs.get(&tensor).into_iter().flatten() {
            for axis in [Axis::Row, Axis::Column] {
                if ![Some(axis), Some(Axis::Both)].contains(&need.stochastic) {
                    continue;
                }
                let mut planes = self.quantized[&((tensor, need.format), axis)].clone();
                let data = planes[0];
                let key = self.result.host_input(InputRole::RoundingKey);
                let format = need.format.with_rounding(ElementRounding::Stochastic);
                let name = format!("{}.stochastic", self.result.tensor(data).name);
                let rounded = Tensor { name: name.clone(), ..self.result.tensor(data).clone() };
                let rounded = self.result.add_tensor(rounded);
                self.result.nodes.push(Node {
                    name,
                    op: StochasticRound { format, axis }.into(),
                    inputs: [&[tensor], &planes[1..], &[key]].concat(),
                    outputs: vec![rounded],
                    recompute: false,
                    repeats: false,
                    ..producer.clone()
                });
                planes[0] = rounded;
                self.quantized.insert(((tensor, format), axis), planes);
            }
        }
    }

    /// The high-precision tensor that a node reads in place of `id`.
    fn high_precision(&self, id: TensorId) -> TensorId {
        self.high_precision.get(&id).copied().unwrap_or(id)
    }

    /// An operand in high precision again, for `reader` or where it stands.
    fn dequantize(&mut self, key: Key, axis: Axis, reader: &Node) -> TensorId {
        let made_with_weights = self.dequantized.get(&(key, axis, Phase::Weights));
        let made = made_with_weights.or_else(|| self.dequantized.get(&(key, axis, reader.phase)));
        if let Some(&made) = made {
            return made;
        }
        let planes = self.quantized[&(key, axis)].clone();
        let source = self.result.tensor(key.0);
        let is_weight = matches!(source.kind, TensorKind::Parameter { .. });
        let shape = source.shape.clone();
        let data_name = &self.result.tensor(planes[0]).name;
        // What the forward dequantized is not kept: the backward does it again.
        let in_forward = self.dequantized.contains_key(&(key, axis, Phase::Forward));
        let again = if in_forward { ".backward" } else { "" };
        let name = format!("{data_name}{again}.{}", self.activation);
        let made = self.result.add_tensor(Tensor {
            name: name.clone(),
            shape,
            dtype: self.activation,
            kind: if is_weight { TensorKind::WeightCopy } else { TensorKind::Activation },
            link: Some(Link { of: key.0, part: Part::Dequantized { axis } }),
        });
        self.result.nodes.push(Node {
            name,
            op: Dequantize { format: key.1, axis, to: self.activation }.into(),
            inputs: planes,
            outputs: vec![made],
            recompute: false,
            repeats: false,
            ..reader.clone()
        });
        self.dequantized.insert((key, axis, reader.phase), made);
        made
    }

    fn node(&mut self, node: &Node) -> Result<(), IrError> {
        let gemm = self.gemm(node);
        let mut node = node.clone();
        match gemm {
            None => {
                for (index, input) in node.inputs.iter_mut().enumerate() {
                    if !reads_master(&node.op, index) {
                        *input = self.high_precision(*input);
                    }
                }
                // What another rank sends is stored as its activations are.
                if let Op::Collective(Collective {
                    kind: CollectiveKind::Recv { dtype, .. }, ..
                }) = &mut node.op
                {
                    *dtype = self.result.tensor(node.outputs[0]).dtype;
                }
            }
            Some(Gemm {
                kind,
                operands: [Reading::Quantized(a, a_axis), Reading::Quantized(b, b_axis)],
                is_scaled: true,
            }) => {
                let operands = [(a, a_axis), (b, b_axis)];
                let mut inputs = operands.map(|operand| self.quantized[&operand].clone()).concat();
                // A bias, or where groups begin.
                inputs.extend(node.inputs[2..].iter().map(|&input| self.high_precision(input)));
                let (a, b, output) = (a.1, b.1, self.activation);
                node.op = match grouped_rows(&node.op) {
                    Some(grouped) => ScaledGroupedGemm { kind, grouped, output, a, b }.into(),
                    None => {
                        let bias = matches!(&node.op, Op::Linear(linear) if linear.bias);
                        ScaledGemm { kind, output, bias, a, b }.into()
                    }
                };
                node.inputs = inputs;
                // Its operands are kept for the backward as quantized data; nothing is left to
                // recompute.
            }
            Some(Gemm { operands, .. }) => {
                for (index, input) in node.inputs.clone().into_iter().enumerate() {
                    node.inputs[index] = match operands.get(index) {
                        Some(&Reading::Quantized(key, axis)) => self.dequantize(key, axis, &node),
                        _ => self.high_precision(input),
                    };
                }
            }
        }
        self.result.nodes.push(node);
        Ok(())
    }
}
