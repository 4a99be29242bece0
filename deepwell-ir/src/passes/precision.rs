//! Makes a precision policy explicit: casts, quantizations and dequantizations become nodes.
//!
//! A quantization directly follows the producer of the high-precision tensor, so that the quantized
//! operand is kept for the backward. If both rowwise and columnwise operands are read, one node
//! makes both.
//!
//! A GEMM with only one quantized operand reads that operand dequantized, and so does an emulated
//! GEMM. The dequantization comes directly before the first GEMM that reads the result and is
//! repeated in the backward, so that the quantized operand is kept here as well. A weight is
//! dequantized together with the other weight copies.
//!
//! Gradients with stochastic rounding are first quantized like other tensors; after all
//! quantizations of the producer, the elements are rounded again from the high-precision tensor.
//!
//! A tensor-parallel rank has slices of weights and of some activations and gradients. Their tensor
//! scale is that of the whole tensor: the ranks take the maximum of the largest magnitudes of their
//! slices. The bytes are then slices of the bytes of a single rank.

use std::collections::{HashMap, HashSet};

use deepwell_precision::{
    Assignment, ElementRounding, OperandClass, PrecisionPolicy, QuantFormat, Role,
};

use super::TensorPrecision;
use super::assign::{activation_dtype, assign, reads_master, with_routers_in_f32};
use crate::builder::output_name;
use crate::op::input_types;
use crate::ops::{
    Amax, Axis, Collective, CollectiveKind, Dequantize, GroupedRows, PartOfColumns, Quantize,
    Reduction, ScaledGemm, ScaledGroupedGemm, StochasticRound,
};
use crate::{
    DType, Derivation, GemmKind, Graph, GroupRank, InputRole, IrError, Link, Node, Op, Phase,
    Plane, Split, SplitOver, Stage, Storage, Tensor, TensorId, TensorKind, ops,
};

/// Rewrites the graph under `policy` and reports the format of each parameter, in execution order.
///
/// Activations become BF16, or stay F32 if the policy assigns F32 to every tensor. Accepts a graph
/// at any stage before [`Stage::Quantized`], so that a forward-only graph for evaluation can use
/// the same pass.
///
/// # Errors
/// A policy that cannot be applied: a rule without a match, or F32 for only some tensors.
pub fn apply_precision(
    graph: &Graph,
    policy: &PrecisionPolicy,
) -> Result<(Graph, Vec<TensorPrecision>), IrError> {
    apply_served_precision(graph, policy, &|_, _| Ok(()))
}

/// Why a target does not support a format for tensors of a role, if it does not.
pub type Serves<'a> = dyn Fn(&QuantFormat, Role) -> Result<(), String> + 'a;

/// [`apply_precision`] for a target that may not support every format: `serves` returns the reason.
/// Tensors of an unsupported format become BF16, with that reason in the report.
///
/// # Errors
/// As [`apply_precision`].
pub fn apply_served_precision(
    graph: &Graph,
    policy: &PrecisionPolicy,
    serves: &Serves<'_>,
) -> Result<(Graph, Vec<TensorPrecision>), IrError> {
    apply_precision_of_rank(graph, policy, serves, None)
}

/// The slices of parameters that a tensor-parallel rank has.
#[derive(Clone, Copy, Debug)]
pub struct RankSlices<'a> {
    /// The rank.
    pub rank: GroupRank,
    /// Slices by the parameters' names; whole parameters are missing.
    pub splits: &'a HashMap<String, Split>,
}

/// [`apply_served_precision`] for a tensor-parallel rank.
///
/// # Errors
/// As [`apply_precision`].
pub fn apply_precision_of_rank(
    graph: &Graph,
    policy: &PrecisionPolicy,
    serves: &Serves<'_>,
    slices: Option<RankSlices<'_>>,
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
        slices,
        amaxes: HashMap::new(),
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

/// The groups of a grouped GEMM.
fn grouped_rows(op: &Op) -> Option<GroupedRows> {
    match op {
        Op::GroupedGemm(op) => Some(op.grouped),
        Op::GroupedGemmDgrad(op) => Some(op.grouped),
        Op::GroupedGemmWgrad(op) => Some(op.grouped),
        _ => None,
    }
}

/// Quantization of a tensor: format, axes, and axes with stochastic rounding.
struct Need {
    /// Format with rounding to nearest.
    format: QuantFormat,
    axis: Axis,
    stochastic: Option<Axis>,
    /// Whether the tensor is a slice, with a tensor scale.
    is_slice: bool,
    /// Whether random words are those of the whole tensor, of which this rank has a slice.
    has_words_of_whole: bool,
    /// Offsets of groups of rows, each with a tensor scale.
    offsets: Option<TensorId>,
}

/// Whether kernels round a slice of a tensor with the random words of the whole. The CUDA kernel of
/// MXFP8 counts elements of the slice.
fn has_words_of_whole(format: &QuantFormat) -> bool {
    !format.is_of_family(&QuantFormat::MXFP8)
}

/// Quantizations of each tensor, in order of use.
type Needs = HashMap<TensorId, Vec<Need>>;

/// A high-precision tensor and its quantization format.
type Key = (TensorId, QuantFormat);

/// How a GEMM reads an operand.
#[derive(Clone, Copy)]
enum Reading {
    /// In high precision.
    Plain,
    /// Quantized along an axis.
    Quantized(Key, Axis),
}

/// A GEMM of a linear layer under the policy.
struct Gemm {
    kind: GemmKind,
    operands: [Reading; 2],
    /// Whether this rank has a slice of the operand.
    are_slices: [bool; 2],
    /// Offsets of the groups of the operand's rows, each with a tensor scale.
    offsets: [Option<TensorId>; 2],
    is_scaled: bool,
}

struct Rewrite<'a> {
    source: &'a Graph,
    assignments: HashMap<TensorId, Assignment>,
    activation: DType,
    result: Graph,
    /// BF16 copies of parameters with high-precision readers.
    high_precision: HashMap<TensorId, TensorId>,
    /// Planes of each quantized operand, data first.
    quantized: HashMap<(Key, Axis), Vec<TensorId>>,
    /// Dequantized operands, per phase.
    dequantized: HashMap<(Key, Axis, Phase), TensorId>,
    slices: Option<RankSlices<'a>>,
    /// Largest magnitudes of whole tensors of which this rank has slices.
    amaxes: HashMap<Key, TensorId>,
}

impl Rewrite<'_> {
    /// The quantized GEMM of a node, if the policy quantizes the node's weight.
    fn gemm(&self, node: &Node) -> Option<Gemm> {
        let (kind, parameter) = match &node.op {
            Op::Linear(_) | Op::GroupedGemm(_) => (GemmKind::Fprop, node.inputs[1]),
            Op::LinearDgrad(_) | Op::GroupedGemmDgrad(_) => (GemmKind::Dgrad, node.inputs[1]),
            Op::LinearWgrad(_) | Op::GroupedGemmWgrad(_) => {
                match self.source.tensor(node.outputs[0]).kind {
                    TensorKind::ParameterGradient { parameter } => (GemmKind::Wgrad, parameter),
                    _ => return None,
                }
            }
            _ => return None,
        };
        let assignment = self.assignments.get(&parameter)?;
        let axes = match kind {
            GemmKind::Fprop => [Axis::Row, Axis::Row],
            GemmKind::Dgrad => [Axis::Row, Axis::Column],
            GemmKind::Wgrad => [Axis::Column, Axis::Column],
        };
        let operands = std::array::from_fn(|index| {
            let id = node.inputs[index];
            let class = OperandClass::of(kind)[index];
            match assignment.operand(class) {
                Some(quantization) => Reading::Quantized((id, quantization), axes[index]),
                None => Reading::Plain,
            }
        });
        let are_slices = self.are_slices(kind, parameter);
        let offsets = grouped_rows(&node.op).and_then(|_| node.inputs.get(2)).copied();
        let is_grouped = |class: &OperandClass| class.operand() != "weight";
        let offsets = OperandClass::of(kind).map(|class| offsets.filter(|_| is_grouped(&class)));
        let is_scaled = assignment.gemm(kind).is_scaled;
        Some(Gemm { kind, operands, are_slices, offsets, is_scaled })
    }

    /// Whether this rank has slices of the operands of a layer's GEMM. If the weight is split along
    /// N, so are outputs and their gradients; if along K, so are inputs.
    fn are_slices(&self, kind: GemmKind, parameter: TensorId) -> [bool; 2] {
        let split = self.slices.and_then(|slices| {
            let split = slices.splits.get(&self.source.tensor(parameter).name)?;
            (split.over == SplitOver::Tensor).then_some(split.dim)
        });
        let Some(dim) = split else { return [false, false] };
        let is_slice = |class: OperandClass| match class.operand() {
            "activation" => dim == 1,
            "gradient" => dim == 0,
            _ => true,
        };
        OperandClass::of(kind).map(is_slice)
    }

    /// Collects the quantized tensors, with the axes that GEMMs read.
    fn needs(&self) -> Needs {
        let mut needs = Needs::new();
        for gemm in self.source.nodes.iter().filter_map(|node| self.gemm(node)) {
            let parts = gemm.are_slices.into_iter().zip(gemm.offsets);
            for (operand, (is_slice, offsets)) in gemm.operands.into_iter().zip(parts) {
                let Reading::Quantized((tensor, format), axis) = operand else { continue };
                let nearest = format.with_rounding(ElementRounding::Nearest);
                let of_tensor = needs.entry(tensor).or_default();
                let known = of_tensor.iter().position(|need| need.format == nearest);
                let index = known.unwrap_or_else(|| {
                    let has_tensor_scale = Storage::plane_count(&format) == 3;
                    of_tensor.push(Need {
                        format: nearest,
                        axis,
                        stochastic: None,
                        is_slice: is_slice && has_tensor_scale,
                        has_words_of_whole: is_slice && has_words_of_whole(&format),
                        offsets: offsets.filter(|_| has_tensor_scale),
                    });
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

    /// Adds casts and quantizations of parameters, in [`Phase::Weights`].
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
                    link: Some(Link { of: id, derivation: Derivation::Cast }),
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
            let template = Node { phase: Phase::Weights, ..reader.clone() };
            self.quantize(id, needs, &template)?;
            for &(key, axis) in dequantized.get(&id).into_iter().flatten() {
                self.dequantize(key, axis, &template);
            }
        }
        Ok(())
    }

    /// Tensors with dequantized readers, each with the quantized operands to dequantize.
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

    /// Tensors that some node reads in high precision.
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
        for (count, &Need { format, axis, is_slice, offsets, .. }) in wanted.enumerate() {
            let source_name = &self.result.tensor(tensor).name;
            // Further quantizations of a tensor have numbered names.
            let number = if count == 0 { String::new() } else { count.to_string() };
            let name = format!("{source_name}.mx{number}");
            let op = Quantize { format, axis };
            let mut inputs: Vec<TensorId> = [tensor].into_iter().chain(offsets).collect();
            if is_slice {
                inputs.push(self.amax_of_ranks((tensor, format), axis, &name, producer)?);
            }
            let types = crate::OpRule::infer(&op, &input_types(&self.result, &inputs))
                .map_err(|source| IrError::Operands { node: name.clone(), source })?;
            let is_weight = producer.phase == Phase::Weights;
            let outputs: Vec<TensorId> = types
                .into_iter()
                .zip(op.planes())
                .map(|(output, (axis, plane))| {
                    let derivation =
                        Derivation::Plane { quantization: count as u32, axis, plane, format };
                    self.result.add_tensor(Tensor {
                        name: output_name(&name, output.suffix),
                        shape: output.shape,
                        dtype: output.dtype,
                        kind: if is_weight && plane != Plane::Counters {
                            TensorKind::WeightCopy
                        } else {
                            TensorKind::Statistic
                        },
                        link: Some(Link { of: tensor, derivation }),
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
                inputs,
                outputs,
                recompute: false,
                repeats: false,
                ..producer.clone()
            });
        }
        Ok(())
    }

    /// Adds the largest magnitude of a tensor of which this rank has a slice.
    fn amax_of_ranks(
        &mut self,
        key: Key,
        axis: Axis,
        quantization: &str,
        producer: &Node,
    ) -> Result<TensorId, IrError> {
        let Some(RankSlices { rank, .. }) = self.slices else {
            let what = "a slice of a tensor, but no ranks to share it".to_string();
            let (graph, stage) = (self.source.name.clone(), self.source.stage);
            return Err(IrError::Invalid { graph, stage, what });
        };
        let reduction = CollectiveKind::AllReduce { reduction: Reduction::Max };
        let reduce = Collective::new(reduction, rank.group, rank.ranks as u32);
        let amax = Amax { format: key.1, axis };
        let mut input = key.0;
        for (suffix, op) in [("amax", Op::from(amax)), ("amax.all_reduce", reduce.into())] {
            let name = format!("{quantization}.{suffix}");
            let output = self.result.add_tensor(Tensor {
                name: name.clone(),
                shape: crate::Shape::new([1]),
                dtype: DType::F32,
                kind: TensorKind::Statistic,
                link: None,
            });
            self.result.nodes.push(Node {
                name,
                op,
                inputs: vec![input],
                outputs: vec![output],
                recompute: false,
                repeats: false,
                ..producer.clone()
            });
            input = output;
        }
        self.amaxes.insert(key, input);
        Ok(input)
    }

    /// Adds stochastic rounding of the operands of `tensor`, after the quantizations.
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
                let amax = self.amaxes.get(&(tensor, need.format)).copied();
                let columns = self.slices.filter(|_| need.has_words_of_whole);
                let columns = columns.map(|slices| PartOfColumns {
                    place: slices.rank.place,
                    parts: slices.rank.ranks,
                });
                let ends = [Some(key), amax, need.offsets].into_iter().flatten();
                self.result.nodes.push(Node {
                    name,
                    op: StochasticRound { format, axis, columns }.into(),
                    inputs: [tensor].into_iter().chain(planes[1..].to_vec()).chain(ends).collect(),
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

    /// The high-precision tensor that a node reads instead of `id`.
    fn high_precision(&self, id: TensorId) -> TensorId {
        self.high_precision.get(&id).copied().unwrap_or(id)
    }

    /// Dequantizes an operand for `reader`, or returns the existing result.
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
        // The forward result is not kept: the backward dequantizes again.
        let in_forward = self.dequantized.contains_key(&(key, axis, Phase::Forward));
        let again = if in_forward { ".backward" } else { "" };
        let name = format!("{data_name}{again}.{}", self.activation);
        let made = self.result.add_tensor(Tensor {
            name: name.clone(),
            shape,
            dtype: self.activation,
            kind: if is_weight { TensorKind::WeightCopy } else { TensorKind::Activation },
            link: Some(Link { of: key.0, derivation: Derivation::Dequantized { axis } }),
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
                // Received tensors are stored in the sender's activation type.
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
                ..
            }) => {
                let operands = [(a, a_axis), (b, b_axis)];
                let mut inputs = operands.map(|operand| self.quantized[&operand].clone()).concat();
                // A bias, or the group offsets.
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
                // The operands are kept for the backward as quantized data, so no recomputation is
                // needed.
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
