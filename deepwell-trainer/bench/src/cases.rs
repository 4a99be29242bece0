//! The calls that the kernel sections time: calls of the size tables, and every distinct call of
//! the model's step.

use deepwell_ir::ops::{self, AttentionHeads, Axis, CopyKind, Epilogue, Fused, Quantize};
use deepwell_ir::{Access, DType, GemmKind, Instance, Op, PrecisionPolicy, Program, Storage};
use deepwell_kernels::SingleCall;
use deepwell_precision::QuantFormat;
use deepwell_probe::Hardware;

use super::expert_gemms::{self, Grouped, Routing};
use super::peer_task::PeerTask;
use super::{Section, Settings};
use super::{shapes, token_ops};
use deepwell_trainer::{Device, TrainError};

/// Epsilon of norms that belong to no model.
const EPS: f64 = 1e-5;

/// A call to be timed.
pub(super) struct Case {
    pub(super) call: SingleCall,
    pub(super) what: String,
    pub(super) shape: String,
    pub(super) dtype: String,
    /// Whether its rate is reported in FLOPs.
    pub(super) is_matrix: bool,
    pub(super) peers: Vec<PeerTask>,
    /// Routing of the experts' tokens.
    pub(super) routing: Routing,
}

impl Case {
    pub(super) fn new(call: SingleCall) -> Case {
        Case::routed(call, Routing::UNKNOWN)
    }

    /// A call on the tokens of experts, or any other call.
    fn routed(call: SingleCall, routing: Routing) -> Case {
        let expert_gemm = Grouped::of(&call);
        let shape = expert_gemm.map_or_else(|| shape_text(&call), |of| of.shape_text(routing));
        let peers = match expert_gemm {
            Some(of) => Some(of.peer_task(routing)),
            None => peer_task(&call),
        };
        Case {
            what: what_text(&call.op),
            dtype: dtype_text(&call),
            peers: peers.into_iter().collect(),
            shape,
            is_matrix: is_matrix(&call.op),
            routing,
            call,
        }
    }
}

/// The calls of a section.
///
/// # Errors
/// The model or precision is unknown, or the model does not fit.
pub(super) fn cases_of(
    section: Section,
    settings: &Settings,
    hardware: &Hardware,
) -> Result<Vec<Case>, TrainError> {
    let is_gpu = settings.device != Device::Cpu;
    let policy = PrecisionPolicy::preset(&settings.precision)?;
    let mut calls = match section {
        Section::Gemm => gemms(is_gpu, &policy),
        Section::Quantize => quantizations(is_gpu, &policy),
        Section::Attention => attentions(is_gpu),
        Section::Norms => [pointwise(is_gpu, &policy), token_ops::calls(is_gpu)].concat(),
        _ => Vec::new(),
    };
    for program in programs(settings, hardware)? {
        let of_section = program.calls.iter().filter(|call| section_of(&call.op) == Some(section));
        for call in of_section {
            let mut single = SingleCall::of(&program, call);
            if !knows_sequences(&single.op) {
                (single.batch, single.seq) = (1, 1);
            }
            for single in std::iter::once(single.clone()).chain(without_copies(&single)) {
                if !calls.contains(&single) {
                    calls.push(single);
                }
            }
        }
    }
    // Keep only the fused ops that the device has.
    let catalog = settings.device.catalog();
    let target = settings.device.target(hardware)?;
    calls.retain(|call| {
        call.op.leading() == &call.op || call.select(catalog.as_ref(), &target).is_ok()
    });
    let mut cases: Vec<Case> = calls.into_iter().map(Case::new).collect();
    if section == Section::Experts {
        let of_table = expert_gemms::calls(is_gpu, &policy).into_iter();
        cases.splice(0..0, of_table.map(|(call, routing)| Case::routed(call, routing)));
    }
    Ok(cases)
}

/// Returns an update that writes copies of weights without these copies, as peers run it.
fn without_copies(call: &SingleCall) -> Option<SingleCall> {
    let Op::AdamW(op) = &call.op else { return None };
    if op.copies.is_empty() {
        return None;
    }
    let mut plain = call.clone();
    plain.operands.truncate(op.input_count());
    plain.access.truncate(op.input_count());
    plain.op = ops::AdamW { copies: Vec::new(), ..op.clone() }.into();
    Some(plain)
}

/// Whether an op treats its rows as tokens of sequences; other ops are the same call for all
/// batches of the same number of tokens.
pub(super) fn knows_sequences(op: &Op) -> bool {
    matches!(
        op,
        Op::Attention(_)
            | Op::AttentionBackward(_)
            | Op::Rope(_)
            | Op::RopeBackward(_)
            | Op::AddPositions(_)
            | Op::AddPositionsBackward(_)
    )
}

/// Plans the step in BF16 and in the requested precision.
fn programs(settings: &Settings, hardware: &Hardware) -> Result<Vec<Program>, TrainError> {
    settings.precisions().into_iter().map(|name| settings.plan(name, hardware)).collect()
}

/// Section that times an op; none for ops that only whole steps show.
fn section_of(op: &Op) -> Option<Section> {
    Some(match op.leading() {
        Op::Linear(_) | Op::LinearDgrad(_) | Op::LinearWgrad(_) | Op::ScaledGemm(_) => {
            Section::Gemm
        }
        Op::GroupedGemm(_)
        | Op::GroupedGemmDgrad(_)
        | Op::GroupedGemmWgrad(_)
        | Op::ScaledGroupedGemm(_) => Section::Experts,
        Op::Quantize(_) => Section::Quantize,
        Op::Attention(_) | Op::AttentionBackward(_) => Section::Attention,
        Op::RmsNorm(_)
        | Op::AddRmsNorm(_)
        | Op::RmsNormBackward(_)
        | Op::HeadRmsNorm(_)
        | Op::HeadRmsNormBackward(_)
        | Op::LayerNorm(_)
        | Op::AddLayerNorm(_)
        | Op::LayerNormBackward(_)
        | Op::SwiGlu(_)
        | Op::SwiGluBackward(_)
        | Op::StoredSwiGlu(_)
        | Op::StoredSwiGluBackward(_)
        | Op::Gelu(_)
        | Op::GeluBackward(_)
        | Op::Relu(_)
        | Op::ReluBackward(_)
        | Op::Rope(_)
        | Op::RopeBackward(_)
        | Op::Add(_)
        | Op::AddPositions(_)
        | Op::AddPositionsBackward(_) => Section::Norms,
        Op::GradNorm(_) | Op::AdamW(_) => Section::Optimizer,
        _ => return None,
    })
}

/// Whether an op multiplies matrices that a policy may quantize.
pub(super) fn is_gemm(op: &Op) -> bool {
    matches!(section_of(op), Some(Section::Gemm | Section::Experts))
}

pub(super) fn is_matrix(op: &Op) -> bool {
    matches!(section_of(op), Some(Section::Gemm | Section::Experts | Section::Attention))
}

type Operand = (DType, Vec<usize>);

fn bf16(shape: &[usize]) -> Operand {
    (DType::Bf16, shape.to_vec())
}

fn f32(shape: &[usize]) -> Operand {
    (DType::F32, shape.to_vec())
}

/// The planes of a matrix quantized along one axis.
pub(super) fn planes(format: QuantFormat, axis: Axis, rows: usize, columns: usize) -> Vec<Operand> {
    let storage = Storage::Planes { format, axis, shape: [rows.into(), columns.into()] };
    let planes = storage.planes().unwrap_or_default().into_iter();
    planes.map(|plane| (plane.dtype, plane.shape.as_fixed().unwrap_or_default())).collect()
}

fn gemms(is_gpu: bool, policy: &PrecisionPolicy) -> Vec<SingleCall> {
    let fine = PrecisionPolicy::mxfp8();
    let mut calls = Vec::new();
    for &(m, n, k) in shapes::gemms(is_gpu) {
        let operands = [bf16(&[m, k]), bf16(&[n, k])];
        calls.push(SingleCall::new(ops::Linear { bias: false }, &operands, &[bf16(&[m, n])]));
        for policy in [policy, &fine] {
            let (a, b) = (policy.activation_format(), policy.weight_format());
            let kind = GemmKind::Fprop;
            let op = ops::ScaledGemm { kind, output: DType::Bf16, bias: false, a, b };
            let inputs = [planes(a, Axis::Row, m, k), planes(b, Axis::Row, n, k)].concat();
            let call = SingleCall::new(op, &inputs, &[bf16(&[m, n])]);
            if !calls.contains(&call) {
                calls.push(call);
            }
        }
    }
    calls
}

/// Outputs of a quantization of a matrix.
fn quantized(quantize: &Quantize, rows: usize, columns: usize) -> Vec<Operand> {
    let axes = quantize.axes().iter();
    let mut outputs: Vec<Operand> =
        axes.flat_map(|&axis| planes(quantize.format, axis, rows, columns)).collect();
    outputs.push((DType::U64, vec![Quantize::STATISTICS]));
    outputs
}

fn quantizations(is_gpu: bool, policy: &PrecisionPolicy) -> Vec<SingleCall> {
    let mut calls = Vec::new();
    for &(rows, columns) in shapes::quantizations(is_gpu) {
        for spec in specs(&[policy.activation_format(), policy.weight_format(), QuantFormat::MXFP8])
        {
            for axis in [Axis::Row, Axis::Column, Axis::Both] {
                let quantize = Quantize { format: spec, axis };
                let outputs = quantized(&quantize, rows, columns);
                calls.push(SingleCall::new(quantize, &[bf16(&[rows, columns])], &outputs));
            }
        }
    }
    calls
}

/// Each once.
fn specs(all: &[QuantFormat]) -> Vec<QuantFormat> {
    let mut once: Vec<QuantFormat> = Vec::new();
    for spec in all {
        if !once.contains(spec) {
            once.push(*spec);
        }
    }
    once
}

fn attentions(is_gpu: bool) -> Vec<SingleCall> {
    let mut calls = Vec::new();
    for size in shapes::attentions(is_gpu) {
        let &shapes::AttentionSize { batch, heads, seq, head_dim, value_dim, causal } = size;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let of_op = || AttentionHeads {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: (value_dim != head_dim).then_some(value_dim),
            scale,
            causal,
            ..AttentionHeads::default()
        };
        let x = || bf16(&[batch * seq, heads * head_dim]);
        let value = || bf16(&[batch * seq, heads * value_dim]);
        let lse = || f32(&[batch, heads, seq]);
        let forward = ops::Attention { heads: of_op() };
        let backward = ops::AttentionBackward { heads: of_op() };
        for mut call in [
            SingleCall::new(forward, &[x(), x(), value()], &[value(), lse()]),
            SingleCall::new(
                backward,
                &[value(), x(), x(), value(), value(), lse()],
                &[x(), x(), value()],
            ),
        ] {
            (call.batch, call.seq) = (batch, seq);
            calls.push(call);
        }
    }
    calls
}

/// An op with its inputs and outputs, and the indices of the outputs to quantize.
type Producer = (Op, Vec<Operand>, Vec<Operand>, Vec<usize>);

/// Norms and activations.
fn producers(rows: usize, columns: usize) -> Vec<Producer> {
    let m = || bf16(&[rows, columns]);
    let v = || bf16(&[columns]);
    let of_row = || f32(&[rows]);
    let gradient = || f32(&[columns]);
    vec![
        (ops::RmsNorm { eps: EPS }.into(), vec![m(), v()], vec![m(), of_row()], vec![0]),
        (
            ops::AddRmsNorm { eps: EPS }.into(),
            vec![m(), m(), v()],
            vec![m(), m(), of_row()],
            vec![1],
        ),
        (
            ops::RmsNormBackward { residual: false }.into(),
            vec![m(), m(), v(), of_row()],
            vec![m(), gradient()],
            vec![0],
        ),
        (
            ops::LayerNorm { eps: EPS }.into(),
            vec![m(), v(), v()],
            vec![m(), of_row(), of_row()],
            vec![0],
        ),
        (
            ops::AddLayerNorm { eps: EPS }.into(),
            vec![m(), m(), v(), v()],
            vec![m(), m(), of_row(), of_row()],
            vec![1],
        ),
        (
            ops::LayerNormBackward { residual: false }.into(),
            vec![m(), m(), v(), of_row(), of_row()],
            vec![m(), gradient(), gradient()],
            vec![0],
        ),
        (ops::SwiGlu {}.into(), vec![m(), m()], vec![m()], vec![0]),
        (ops::SwiGluBackward {}.into(), vec![m(), m(), m()], vec![m(), m()], vec![0, 1]),
    ]
}

fn pointwise(is_gpu: bool, policy: &PrecisionPolicy) -> Vec<SingleCall> {
    let mut calls = Vec::new();
    for &(rows, columns) in shapes::pointwise(is_gpu) {
        for (op, inputs, outputs, of) in producers(rows, columns) {
            calls.push(SingleCall::new(op.clone(), &inputs, &outputs));
            let quantize = Quantize { format: policy.activation_format(), axis: Axis::Both };
            let step = |&of: &usize| Epilogue::Quantize { of, quantize: quantize.clone() };
            let epilogue = of.iter().map(step).collect();
            let kept = outputs.iter().enumerate().filter(|(index, _)| !of.contains(index));
            let mut given: Vec<Operand> = kept.map(|(_, output)| output.clone()).collect();
            for _ in &of {
                given.extend(quantized(&quantize, rows, columns));
            }
            let fused = Fused { core: Box::new(op), epilogue, skipped: of };
            calls.push(SingleCall::new(fused, &inputs, &given));
        }
    }
    calls
}

pub(super) fn what_text(op: &Op) -> String {
    match op {
        Op::ScaledGemm(op) => format!("scaled_gemm {}", op.kind.name()),
        Op::ScaledGroupedGemm(op) => format!("scaled_grouped_gemm {}", op.kind.name()),
        Op::Quantize(op) => format!("quantize {}", op.axis.name()),
        Op::Fused(fused) => {
            let mut axes: Vec<&str> =
                fused.quantizations().map(|step| step.quantize.axis.name()).collect();
            axes.dedup();
            format!("{} {}", op.name(), axes.join("+")).trim_end().to_string()
        }
        op => op.name().to_string(),
    }
}

fn blocks(spec: QuantFormat) -> String {
    spec.block.to_string()
}

fn dtype_text(call: &SingleCall) -> String {
    if let Op::ScaledGemm(op) = call.op.leading() {
        return format!("{} {}*{}", op.a.name(), blocks(op.a), blocks(op.b));
    }
    if let Op::ScaledGroupedGemm(op) = call.op.leading() {
        return format!("{} {}*{}", op.a.name(), blocks(op.a), blocks(op.b));
    }
    match &call.op {
        Op::Quantize(op) => {
            format!("{} to {} {}", call.operands[0].dtype, op.format.name(), blocks(op.format))
        }
        Op::Fused(op) => match op.quantizations().next() {
            Some(step) => {
                let format = step.quantize.format;
                format!("{} to {} {}", call.operands[0].dtype, format.name(), blocks(format))
            }
            None => call.operands[0].dtype.to_string(),
        },
        _ => call.operands.first().map_or(String::new(), |operand| operand.dtype.to_string()),
    }
}

/// `(kind, M, N, K)` of a GEMM.
fn gemm_of(call: &SingleCall) -> Option<(GemmKind, usize, usize, usize)> {
    let shape = |index: usize| &call.operands[index].shape;
    Some(match call.op.leading() {
        Op::Linear(_) => (GemmKind::Fprop, shape(0)[0], shape(1)[0], shape(0)[1]),
        Op::LinearDgrad(_) => (GemmKind::Dgrad, shape(0)[0], shape(1)[1], shape(0)[1]),
        Op::LinearWgrad(_) => (GemmKind::Wgrad, shape(0)[1], shape(1)[1], shape(0)[0]),
        Op::ScaledGemm(op) => (op.kind, shape(0)[0], shape(op.b_input())[0], shape(0)[1]),
        _ => return None,
    })
}

/// Number of elements of each parameter that the optimizer updates.
fn lengths(call: &SingleCall) -> Vec<usize> {
    let sizes = call.operands.iter().map(|operand| operand.shape.iter().product::<usize>());
    match &call.op {
        Op::AdamW(op) => sizes
            .take(op.input_count())
            .skip(ops::AdamW::LEADING_OPERANDS)
            .step_by(ops::AdamW::OPERANDS_PER_PARAMETER)
            .collect(),
        _ => sizes.take(call.input_count).collect(),
    }
}

fn shape_text(call: &SingleCall) -> String {
    if let Some((_, m, n, k)) = gemm_of(call) {
        let adds = if call.accumulate.adds(Instance::ONLY) { " +=" } else { "" };
        return format!("{m},{n},{k}{adds}");
    }
    match &call.op {
        Op::Attention(ops::Attention { heads })
        | Op::AttentionBackward(ops::AttentionBackward { heads }) => {
            let causal = if heads.causal { "causal" } else { "full" };
            let kv = match heads.kv_heads == heads.heads {
                true => String::new(),
                false => format!("/{}", heads.kv_heads),
            };
            let batch = sequences(call);
            let more = heads.extension().map_or(String::new(), |what| format!(", {what}"));
            format!("{batch},{}{kv},{},{} {causal}{more}", heads.heads, call.seq, heads.head_dim)
        }
        Op::AdamW(_) | Op::GradNorm(_) => {
            let lengths = lengths(call);
            let copies = match &call.op {
                Op::AdamW(op) if !op.copies.is_empty() => {
                    let quantized = op.copies.iter().map(|copy| &copy.kind);
                    let is_quantized = |kind: &&CopyKind| matches!(kind, CopyKind::Quantize(_));
                    let quantized = quantized.filter(is_quantized).count();
                    format!(", {} copies, {quantized} quantized", op.copies.len())
                }
                _ => String::new(),
            };
            let elements = lengths.iter().sum::<usize>();
            let tensors = lengths.len();
            format!("{elements} in {tensors} tensors{copies}")
        }
        _ => {
            let sizes = call.operands.first().map(|operand| operand.shape.as_slice());
            let sizes: Vec<String> =
                sizes.unwrap_or_default().iter().map(usize::to_string).collect();
            let adds = call.access[call.input_count..].contains(&Access::Update);
            format!("{}{}", sizes.join("x"), if adds { " +=" } else { "" })
        }
    }
}

/// Sequences of an attention: the first size of its log-sums.
fn sequences(call: &SingleCall) -> usize {
    let lse = if matches!(call.op, Op::Attention(_)) { call.input_count + 1 } else { 5 };
    call.operands.get(lse).map_or(call.batch, |lse| lse.shape[0])
}

/// A peer's attention; none with windows, sinks or documents.
fn attention_task(call: &SingleCall, heads: &AttentionHeads) -> Option<PeerTask> {
    if heads.window.is_some() || heads.sinks || heads.documents {
        return None;
    }
    Some(PeerTask::Attention {
        batch: sequences(call),
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        seq: call.seq,
        head_dim: heads.head_dim,
        value_dim: heads.value_dim(),
        causal: heads.causal,
        backward: matches!(call.op, Op::AttentionBackward(_)),
    })
}

fn peer_task(call: &SingleCall) -> Option<PeerTask> {
    if let Some((kind, m, n, k)) = gemm_of(call) {
        // Peers do not have the fused ops.
        if call.op.leading() != &call.op {
            return None;
        }
        let fp8 = matches!(call.op, Op::ScaledGemm(_));
        return Some(PeerTask::Gemm { gemm: kind.name().to_string(), m, n, k, fp8 });
    }
    let matrix = |index: usize| match call.operands[index].shape.as_slice() {
        &[rows, columns] => Some((rows, columns)),
        _ => None,
    };
    let pointwise = |op: &Op, quantized, block| {
        let (rows, columns) = matrix(0)?;
        let op = op.name().to_string();
        Some(PeerTask::Pointwise { op, rows, columns, quantized, block })
    };
    match &call.op {
        Op::Quantize(op) => {
            let (rows, columns) = matrix(0)?;
            Some(PeerTask::Quantize {
                rows,
                columns,
                dtype: call.operands[0].dtype.to_string(),
                axis: op.axis.name().to_string(),
                block: usize::from(op.format.block.k),
                square: op.format.block.is_square(),
            })
        }
        Op::Attention(ops::Attention { heads })
        | Op::AttentionBackward(ops::AttentionBackward { heads }) => attention_task(call, heads),
        Op::Fused(op) => {
            let steps = || op.quantizations();
            let quantized = steps().map(|step| (step.of, step.quantize.axis.name().to_string()));
            let block = usize::from(steps().next()?.quantize.format.block.k);
            pointwise(&op.core, quantized.collect(), block)
        }
        Op::AdamW(op) if !op.copies.is_empty() => None,
        Op::AdamW(_) => Some(PeerTask::AdamW { lengths: lengths(call) }),
        Op::GradNorm(_) => Some(PeerTask::GradNorm { lengths: lengths(call) }),
        Op::Rope(rope) | Op::RopeBackward(ops::RopeBackward { forward: rope }) => {
            let (tokens, _) = matrix(0)?;
            let seq = call.seq.min(tokens).max(1);
            Some(PeerTask::Rope {
                batch: tokens / seq,
                seq,
                heads: rope.heads,
                head_dim: rope.head_dim,
                backward: matches!(call.op, Op::RopeBackward(_)),
            })
        }
        // Heads are rows to a peer.
        Op::HeadRmsNorm(_) | Op::HeadRmsNormBackward(_) => {
            let (gain, op) = match call.op {
                Op::HeadRmsNorm(_) => (1, "rms_norm"),
                _ => (2, "rms_norm_backward"),
            };
            let columns = call.operands[gain].shape[0];
            let (tokens, width) = matrix(0)?;
            let op = op.to_string();
            let rows = tokens * width / columns.max(1);
            Some(PeerTask::Pointwise { op, rows, columns, quantized: Vec::new(), block: 32 })
        }
        Op::AddPositions(_) | Op::AddPositionsBackward(_) => None,
        op => pointwise(op, Vec::new(), 32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gemms_are_named_by_their_own_sizes() {
        let (t, n, k) = (64, 96, 32);
        let check = |op: Op, inputs: [Operand; 2], output: Operand, expected: &str| {
            let case = Case::new(SingleCall::new(op, &inputs, &[output]));
            assert_eq!(case.shape, expected);
            // The op's own count is 2·M·N·K.
            let (_, m, n, k) = gemm_of(&case.call).unwrap();
            assert_eq!(case.call.cost().flops, 2 * (m * n * k) as u64);
        };
        let (x, w, dy) = (bf16(&[t, k]), bf16(&[n, k]), bf16(&[t, n]));
        check(ops::Linear { bias: false }.into(), [x.clone(), w.clone()], dy.clone(), "64,96,32");
        check(ops::LinearDgrad {}.into(), [dy.clone(), w], x.clone(), "64,32,96");
        check(ops::LinearWgrad {}.into(), [dy, x], f32(&[n, k]), "96,32,64");
    }

    #[test]
    fn fused_ops_have_the_operands_that_their_rule_gives() {
        for call in pointwise(false, &PrecisionPolicy::mxfp8()) {
            let inputs = &call.operands[..call.input_count];
            let expected = call.op.outputs_of(inputs).unwrap();
            assert_eq!(call.operands[call.input_count..], expected, "{}", call.op.name());
        }
        for call in quantizations(false, &PrecisionPolicy::mxfp8()) {
            let expected = call.op.outputs_of(&call.operands[..1]).unwrap();
            assert_eq!(call.operands[1..], expected);
        }
    }
}
