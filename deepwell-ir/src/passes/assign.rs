//! Assigns formats of a precision policy to the parameters of a graph.

use std::collections::{HashMap, HashSet};

use deepwell_precision::{
    Assignment, ElementRounding, Format, OperandClass, PrecisionPolicy, QuantFormat, Role,
    TensorScale, TensorUse, scale_tiles,
};

use super::TensorPrecision;
use super::precision::Serves;
use crate::{DType, GemmKind, Graph, IrError, Node, Op, Phase, Shape, Split, TensorId, TensorKind};

pub(super) fn assign(
    graph: &Graph,
    policy: &PrecisionPolicy,
    serves: &Serves<'_>,
) -> Result<(HashMap<TensorId, Assignment>, Vec<TensorPrecision>), IrError> {
    let order = parameters_in_order(graph);
    let uses = uses(graph, &order);
    let mut assigned = policy.assign(&uses)?;
    let readers = readers_without_gemm(graph);
    let mut asked: Vec<Option<Format>> = Vec::with_capacity(assigned.len());
    for (&(id, role), assignment) in order.iter().zip(&mut assigned) {
        let reader = readers.get(&id).copied().filter(|_| is_quantizable(role));
        let is_stack = graph.tensor(id).shape.rank() > 2;
        let kept = match reader {
            Some(reader) => keep_without_gemm(reader, assignment),
            // Nothing dequantizes rows with a tensor scale for each group.
            None if is_stack && has_emulated_tensor_scale(assignment) => {
                keep_without_gemm("dequantize", assignment)
            }
            None => None,
        };
        asked.push(kept.or_else(|| without_unserved(assignment, role, serves)));
    }
    let report = uses
        .iter()
        .zip(assigned.iter().zip(asked))
        .map(|(tensor, (assignment, asked))| TensorPrecision {
            asked,
            ..TensorPrecision::new(tensor.name, assignment)
        })
        .collect();
    for (&(id, role), assignment) in order.iter().zip(&assigned) {
        let checks = [
            check_role(role, assignment),
            check_size(&graph.tensor(id).shape, assignment),
            check_operands(assignment),
        ];
        if let Some(Err(what)) = checks.into_iter().find(Result::is_err) {
            return Err(IrError::Precision { tensor: graph.tensor(id).name.clone(), what });
        }
    }
    let assignments = order.into_iter().map(|(id, _)| id).zip(assigned).collect();
    Ok((assignments, report))
}

/// Checks that tensors of this role have quantized GEMMs.
fn check_role(role: Role, assignment: &Assignment) -> Result<(), String> {
    let format = assignment.format;
    match format.is_quantized() && !is_quantizable(role) {
        true => Err(format!(
            "expected f32 or bf16 for a tensor of role {role:?}, got {format}\n\
             hint: only linear and expert tensors have {format} GEMMs; narrow the rule"
        )),
        false => Ok(()),
    }
}

/// Checks that a tensor consists of whole blocks.
fn check_size(shape: &Shape, assignment: &Assignment) -> Result<(), String> {
    let Some(format) = assignment.format.quantized() else { return Ok(()) };
    let block = format.scale.stored_every();
    let sizes = shape.as_fixed().unwrap_or_default();
    // In a stack, each matrix is quantized separately, so the number of matrices is arbitrary.
    let matrix = &sizes[sizes.len().saturating_sub(2)..];
    match matrix.iter().all(|size| size.is_multiple_of(block)) {
        true => Ok(()),
        false => Err(format!(
            "expected sizes divisible by {block} for {}, got {shape}\n\
             hint: choose such sizes, or keep it in bf16 by a rule of the policy",
            format.name(),
        )),
    }
}

/// Checks the settings of each operand.
fn check_operands(assignment: &Assignment) -> Result<(), String> {
    for &class in OperandClass::ALL {
        let Some(format) = assignment.operand(class) else { continue };
        if class.operand() != "gradient" && format.rounding != ElementRounding::Nearest {
            return Err(format!(
                "expected rounding `nearest` for {class}, got `stochastic`\n\
                 hint: only gradients are rounded at random; set it for dgrad.gradient and \
                 wgrad.gradient"
            ));
        }
        if class.gemm() != GemmKind::Wgrad && format.hadamard.is_some() {
            return Err(format!(
                "expected no Hadamard transform for {class}, got `{format}`\n\
                 hint: only wgrad gains from it; set it for wgrad.gradient and wgrad.activation"
            ));
        }
        format.check_settings().map_err(|error| {
            format!(
                "{class}: {error}\nhint: change `hadamard`, `four_six`, `rounding` or the block of \
                 {class} in the policy"
            )
        })?;
    }
    Ok(())
}

/// Whether a GEMM dequantizes an operand with a tensor scale.
fn has_emulated_tensor_scale(assignment: &Assignment) -> bool {
    let has_tensor_scale = |class: OperandClass| {
        let format = assignment.operand(class);
        format.is_some_and(|format| format.tensor_scale != TensorScale::None)
    };
    let mut kinds = GemmKind::ALL.iter().filter(|&&kind| assignment.gemm(kind).is_emulated());
    kinds.any(|&kind| OperandClass::of(kind).into_iter().any(has_tensor_scale))
}

/// Whether tensors of this role may be operands of quantized GEMMs.
fn is_quantizable(role: Role) -> bool {
    matches!(role, Role::Linear | Role::Expert)
}

/// All tensors read other than as the weight of a linear GEMM, each with the name of the reading
/// op.
fn readers_without_gemm(graph: &Graph) -> HashMap<TensorId, &'static str> {
    let mut readers = HashMap::new();
    for node in &graph.nodes {
        let has_gemm = matches!(
            node.op,
            Op::Linear(_) | Op::LinearDgrad(_) | Op::GroupedGemm(_) | Op::GroupedGemmDgrad(_)
        );
        for (index, &input) in node.inputs.iter().enumerate() {
            if !(has_gemm && index == 1) {
                readers.entry(input).or_insert(node.op.rule().name());
            }
        }
    }
    readers
}

/// Keeps a weight in BF16 if `reader` has no GEMM of quantized operands, so that the report states
/// the actual computation. Returns the requested format if the assignment changed.
fn keep_without_gemm(reader: &str, assignment: &mut Assignment) -> Option<Format> {
    let asked = Some(assignment.format).filter(Format::is_quantized)?;
    assignment.reason = format!(
        "`{reader}` has no GEMM of {} operands; asked for by: {}",
        asked, assignment.reason
    );
    assignment.format = Format::Bf16;
    assignment.operands = Default::default();
    Some(asked)
}

/// Removes quantization that the target does not support. Returns the requested format if the
/// assignment changed.
fn without_unserved(
    assignment: &mut Assignment,
    role: Role,
    serves: &Serves<'_>,
) -> Option<Format> {
    let mut operands = assignment.operands.iter().flatten();
    let why = operands.find_map(|format| serves(format, role).err())?;
    let reason = format!("{why}; asked for by: {}", assignment.reason);
    let asked = assignment.format;
    *assignment =
        Assignment { format: Format::Bf16, operands: [None; 6], gemm: assignment.gemm, reason };
    Some(asked)
}

/// Parameters in order of first use in the forward pass. In a differentiated graph the loss op is a
/// backward node; its head comes last.
fn parameters_in_order(graph: &Graph) -> Vec<(TensorId, Role)> {
    let of_phase = |phase| graph.nodes.iter().filter(move |node| node.phase == phase);
    let mut known = HashSet::new();
    let mut order = Vec::new();
    for node in of_phase(Phase::Forward).chain(of_phase(Phase::Backward)) {
        for (index, &id) in node.inputs.iter().enumerate() {
            let tensor = graph.tensor(id);
            let TensorKind::Parameter { role, .. } = tensor.kind else { continue };
            // A bias is stored like activations, because it has no GEMM.
            let is_bias = role == Role::Linear && tensor.shape.rank() == 1
                || reads_expert_bias(&node.op, index);
            if !is_bias && known.insert(id) {
                order.push((id, role));
            }
        }
    }
    order
}

/// Tensors as a policy sees them, each with the layer of the first node that reads it.
fn uses<'a>(graph: &'a Graph, order: &[(TensorId, Role)]) -> Vec<TensorUse<'a>> {
    let layers = layers_of_tensors(graph);
    let layer = |id: &TensorId| layers.get(id).copied().flatten();
    order
        .iter()
        .map(|&(id, role)| TensorUse { name: &graph.tensor(id).name, role, layer: layer(&id) })
        .collect()
}

/// The layer of the first node that reads each tensor.
fn layers_of_tensors(graph: &Graph) -> HashMap<TensorId, Option<u32>> {
    let mut layer_of: HashMap<TensorId, Option<u32>> = HashMap::new();
    for node in &graph.nodes {
        for &input in &node.inputs {
            layer_of.entry(input).or_insert(node.layer);
        }
    }
    layer_of
}

/// Weights that a policy can quantize, in order of capture: matrices of linear layers and stacked
/// matrices of experts, each with the layer of the first node that reads the weight. Each weight
/// has a separate format for its GEMMs.
pub fn quantizable_weights(graph: &Graph) -> Vec<(TensorId, Option<u32>)> {
    let order = parameters_in_order(graph);
    let weights: HashSet<TensorId> =
        order.into_iter().filter(|(_, role)| is_quantizable(*role)).map(|(id, _)| id).collect();
    let layer_of = layers_of_tensors(graph);
    let weights = graph.parameters().map(|(id, _)| id).filter(|id| weights.contains(id));
    weights.map(|id| (id, layer_of.get(&id).copied().flatten())).collect()
}

/// The assignment of a policy to each of the [`quantizable_weights`], before kernels are selected.
///
/// # Errors
/// A policy that cannot be applied to the graph.
pub fn weight_assignments(
    graph: &Graph,
    policy: &PrecisionPolicy,
) -> Result<Vec<(TensorId, Assignment)>, IrError> {
    let order = parameters_in_order(graph);
    let assigned = policy.assign(&uses(graph, &order))?;
    let all = order.into_iter().zip(assigned);
    Ok(all.filter(|((_, role), _)| is_quantizable(*role)).map(|((id, _), it)| (id, it)).collect())
}

/// Whether operand `index` of an op is the biases of a layer's experts.
fn reads_expert_bias(op: &Op, index: usize) -> bool {
    match op {
        Op::Experts(_) => index >= 6,
        Op::GroupedBias(_) | Op::GroupedBiasBackward(_) => index == 1,
        _ => false,
    }
}

pub(super) fn activation_dtype(report: &[TensorPrecision]) -> Result<DType, IrError> {
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

/// Reports F32 for routers under any policy, because routers read master weights, see
/// [`reads_master`].
pub(super) fn with_routers_in_f32(
    graph: &Graph,
    report: Vec<TensorPrecision>,
) -> Vec<TensorPrecision> {
    let masters = |node: &Node| -> Vec<String> {
        let read =
            node.inputs.iter().enumerate().filter(|(index, _)| reads_master(&node.op, *index));
        read.map(|(_, &id)| graph.tensor(id).name.clone()).collect()
    };
    let routers: HashSet<String> = graph.nodes.iter().flat_map(masters).collect();
    let of_tensor = |tensor: TensorPrecision| {
        if !routers.contains(&tensor.tensor) || tensor.format == Format::F32 {
            return tensor;
        }
        let reason =
            format!("routers choose in f32 (asked for {}: {})", tensor.format, tensor.reason);
        TensorPrecision { format: Format::F32, reason, ..tensor }
    };
    report.into_iter().map(of_tensor).collect()
}

/// Row alignment of token groups, so that no scale is shared across groups: at least 32, or the
/// largest number of elements that share a scale along K in any operand of expert GEMMs under
/// `policy`; 128, the rows of a tile of scales, if each group has a tensor scale.
///
/// # Errors
/// A policy that cannot be applied to the graph.
pub fn expert_row_alignment(graph: &Graph, policy: &PrecisionPolicy) -> Result<usize, IrError> {
    let order = parameters_in_order(graph);
    let uses = uses(graph, &order);
    let assigned = policy.assign(&uses)?;
    let of_experts = order.iter().zip(&assigned).filter(|((_, role), _)| *role == Role::Expert);
    let formats = of_experts.flat_map(|(_, assignment)| assignment.operands.iter().flatten());
    let rows_of = |format: &QuantFormat| match format.tensor_scale {
        TensorScale::None => usize::from(format.block.k),
        _ => scale_tiles::TILE_ROWS,
    };
    Ok(formats.map(rows_of).fold(EXPERT_ROWS, usize::max))
}

/// Checks that tensor-parallel ranks quantize the same blocks as a single rank: every slice of a
/// parameter must end at a block boundary, and with it the other operand of the GEMM. Parameters in
/// `graph` have the shapes of slices.
///
/// # Errors
/// A policy that cannot be applied; a slice that ends within a block.
pub fn check_split_blocks(
    graph: &Graph,
    splits: &[Option<Split>],
    policy: &PrecisionPolicy,
) -> Result<(), IrError> {
    let split_of: HashMap<TensorId, Split> = (graph.parameters().zip(splits))
        .filter_map(|((id, _), split)| Some((id, (*split)?)))
        .collect();
    let order = parameters_in_order(graph);
    let uses = uses(graph, &order);
    for (&(id, _), assignment) in order.iter().zip(policy.assign(&uses)?) {
        let Some(split) = split_of.get(&id) else { continue };
        let tensor = graph.tensor(id);
        let refuse =
            |what: String| IrError::Split { name: tensor.name.clone(), ranks: split.parts, what };
        let size = tensor.shape.0[split.dim].as_fixed().unwrap_or_default();
        for format in assignment.operands.iter().flatten() {
            let block = usize::from(format.block.k).max(usize::from(format.block.rows));
            if !size.is_multiple_of(block) {
                return Err(refuse(format!(
                    "expected slices of whole blocks of {block} for {}, got {size} of dimension \
                     {}\nhint: take fewer ranks, or keep it in bf16 by a rule of the policy",
                    format.name(),
                    split.dim
                )));
            }
        }
    }
    Ok(())
}

/// MXFP8 block length along the contraction of a weight gradient.
const EXPERT_ROWS: usize = 32;

/// Whether an op reads an operand as the FP32 master under any policy: routers compute in FP32, and
/// a sink is a score, which softmax reads in FP32.
pub(super) fn reads_master(op: &Op, index: usize) -> bool {
    match op {
        Op::RouterLogits(_) | Op::Route(_) => index >= 1,
        Op::RouterLogitsBackward(_) => index == 2,
        Op::SampleOperand(_) => true,
        Op::Attention(op) => op.heads.sinks && index == 3,
        Op::AttentionBackward(op) => op.heads.sinks && index == 6,
        _ => false,
    }
}
