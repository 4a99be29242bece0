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
    Assignment, Direction, ElementRounding, Format, OperandClass, PrecisionPolicy, QuantFormat,
    Role, TensorUse,
};

use super::TensorPrecision;
use crate::builder::output_name;
use crate::op::input_types;
use crate::ops::{
    Axis, Collective, CollectiveKind, Dequantize, Quantize, ScaledGemm, StochasticRound,
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

fn assign(
    graph: &Graph,
    policy: &PrecisionPolicy,
    serves: &dyn Fn(&QuantFormat) -> Result<(), String>,
) -> Result<(HashMap<TensorId, Assignment>, Vec<TensorPrecision>), IrError> {
    let order = parameters_in_order(graph);
    let uses: Vec<TensorUse<'_>> =
        order.iter().map(|&(id, role)| TensorUse { name: &graph.tensor(id).name, role }).collect();
    let mut assigned = policy.assign(&uses)?;
    let readers = readers_without_gemm(graph);
    for (&(id, role), assignment) in order.iter().zip(&mut assigned) {
        if let Some(reader) = readers.get(&id).filter(|_| is_quantizable(role)) {
            keep_without_gemm(reader, assignment);
        }
    }
    let asked: Vec<Option<Format>> =
        assigned.iter_mut().map(|assignment| without_unserved(assignment, serves)).collect();
    let report = uses
        .iter()
        .zip(assigned.iter().zip(asked))
        .map(|(tensor, (assignment, asked))| TensorPrecision {
            asked,
            ..TensorPrecision::new(tensor.name, assignment)
        })
        .collect();
    for (&(id, role), assignment) in order.iter().zip(&assigned) {
        if assignment.format.is_quantized() && !is_quantizable(role) {
            return Err(IrError::Precision {
                tensor: graph.tensor(id).name.clone(),
                what: format!(
                    "expected f32 or bf16 for a tensor of role {role:?}, got {format}\n\
                     hint: only linear and expert tensors have {format} GEMMs; narrow the rule",
                    format = assignment.format
                ),
            });
        }
    }
    for (&(id, _), assignment) in order.iter().zip(&assigned) {
        let tensor = graph.tensor(id);
        let Some(format) = assignment.format.quantized() else { continue };
        let block = format.scale.stored_every();
        let sizes = tensor.shape.as_fixed().unwrap_or_default();
        if !sizes.iter().all(|size| size.is_multiple_of(block)) {
            return Err(IrError::Precision {
                tensor: tensor.name.clone(),
                what: format!(
                    "expected sizes divisible by {block} for {}, got {}\n\
                     hint: choose such sizes, or keep it in bf16 by a rule of the policy",
                    format.name(),
                    tensor.shape
                ),
            });
        }
    }
    for (&(id, _), assignment) in order.iter().zip(&assigned) {
        for &class in OperandClass::ALL.iter().filter(|class| class.operand() != "gradient") {
            let operand = assignment.operand(class);
            if operand.is_some_and(|it| it.rounding != ElementRounding::Nearest) {
                return Err(IrError::Precision {
                    tensor: graph.tensor(id).name.clone(),
                    what: format!(
                        "expected rounding `nearest` for {class}, got `stochastic`\n\
                         hint: only gradients are rounded at random; set it for dgrad.gradient and \
                         wgrad.gradient"
                    ),
                });
            }
        }
    }
    let assignments = order.into_iter().map(|(id, _)| id).zip(assigned).collect();
    Ok((assignments, report))
}

/// Whether a tensor of a role may be an operand of a GEMM of quantized operands.
fn is_quantizable(role: Role) -> bool {
    matches!(role, Role::Linear | Role::Expert)
}

/// For each tensor that an op reads otherwise than as the weight of a linear GEMM, that op.
fn readers_without_gemm(graph: &Graph) -> HashMap<TensorId, &'static str> {
    let mut readers = HashMap::new();
    for node in &graph.nodes {
        let has_gemm = matches!(node.op, Op::Linear(_) | Op::LinearInputGrad(_));
        for (index, &input) in node.inputs.iter().enumerate() {
            if !(has_gemm && index == 1) {
                readers.entry(input).or_insert(node.op.rule().name());
            }
        }
    }
    readers
}

/// Leaves a weight in BF16 that the policy would quantize, but that `reader` reads, which has no
/// GEMM of quantized operands: the report must not claim what nobody computes.
fn keep_without_gemm(reader: &str, assignment: &mut Assignment) {
    if assignment.format.is_quantized() {
        assignment.reason = format!(
            "`{reader}` has no GEMM of quantized operands (asked for {} by: {})",
            assignment.format, assignment.reason
        );
        assignment.format = Format::Bf16;
        assignment.operands = Default::default();
    }
}

/// Takes quantization from what a target does not serve. Gives the format that was asked for where
/// it does.
fn without_unserved(
    assignment: &mut Assignment,
    serves: &dyn Fn(&QuantFormat) -> Result<(), String>,
) -> Option<Format> {
    let mut operands = assignment.operands.iter().flatten();
    let why = operands.find_map(|format| serves(format).err())?;
    let reason = format!("{why}; asked for by: {}", assignment.reason);
    let asked = assignment.format;
    *assignment =
        Assignment { format: Format::Bf16, operands: [None; 6], gemm: assignment.gemm, reason };
    Some(asked)
}

/// Parameters by their first use in the forward. The loss op stands in the backward of a
/// differentiated graph; its head comes last.
fn parameters_in_order(graph: &Graph) -> Vec<(TensorId, Role)> {
    let of_phase = |phase| graph.nodes.iter().filter(move |node| node.phase == phase);
    let mut known = HashSet::new();
    let mut order = Vec::new();
    for node in of_phase(Phase::Forward).chain(of_phase(Phase::Backward)) {
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            let TensorKind::Parameter { role, .. } = tensor.kind else { continue };
            // A bias follows the activations: it has no GEMM of its own.
            let is_bias = role == Role::Linear && tensor.shape.rank() == 1;
            if !is_bias && known.insert(id) {
                order.push((id, role));
            }
        }
    }
    order
}

fn activation_dtype(report: &[TensorPrecision]) -> Result<DType, IrError> {
    let f32_count = report.iter().filter(|tensor| tensor.format == Format::F32).count();
    if f32_count == 0 {
        return Ok(DType::Bf16);
    }
    match report.iter().find(|tensor| tensor.format != Format::F32) {
        None => Ok(DType::F32),
        Some(other) => Err(IrError::Precision {
            tensor: other.tensor.clone(),
            what: format!(
                "expected f32 as for {f32_count} other tensors, got {}\n\
                 hint: f32 is for whole models; use bf16 for single tensors",
                other.format
            ),
        }),
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
            Op::Linear(_) => (GemmKind::Fprop, node.inputs[1]),
            Op::LinearInputGrad(_) => (GemmKind::Dgrad, node.inputs[1]),
            Op::LinearWeightGrad(_) => match self.source.tensor(node.outputs[0]).kind {
                TensorKind::ParameterGradient { parameter } => (GemmKind::Wgrad, parameter),
                _ => return None,
            },
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
            let inputs = node.inputs.iter().enumerate();
            read.extend(inputs.filter(|(index, _)| !is_quantized(*index)).map(|(_, &id)| id));
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
                for input in &mut node.inputs {
                    *input = self.high_precision(*input);
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
                let bias = matches!(&node.op, Op::Linear(linear) if linear.bias);
                if bias {
                    inputs.push(self.high_precision(node.inputs[2]));
                }
                let (a, b) = (a.1, b.1);
                node.op = ScaledGemm { kind, output: self.activation, bias, a, b }.into();
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
