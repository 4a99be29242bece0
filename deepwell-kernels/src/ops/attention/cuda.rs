//! `attention.cu`: softmax attention with grouped query heads, on tensor cores.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op, Target};

use super::operand::forward;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{Rates, roofline};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 128;
/// Queries of a CTA.
const CTA_QUERIES: usize = 128;
/// Widths of a head that kernels are compiled for.
const WIDTHS: [usize; 4] = [16, 32, 64, 128];
/// Widths that also have a kernel for narrower heads.
const WIDTHS_PADDED: [usize; 2] = [64, 128];
/// The widest tiles, only for keys with narrower values, and the largest width of these values.
pub(super) const WIDEST: usize = 192;
const WIDEST_VALUES: usize = 128;
/// BF16 elements of 16 bytes, the unit of copies.
pub(crate) const UNIT: usize = 8;

/// Largest number of rows of scores of a call.
const ROWS_MAX: usize = i32::MAX as usize;
/// Largest number of elements per token.
const WIDTH_MAX: usize = 1 << 22;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_attention", &["attention"], prepare)
        .reject(reject)
        .predict(predict)];

/// Sizes of an attention, from its heads and the shape of lse.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Tokens of a sequence.
    pub(crate) seq: usize,
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// Query heads of all sequences.
    pub(crate) batch_heads: usize,
    /// Width of a head.
    pub(crate) head_dim: usize,
}

impl Sizes {
    pub(crate) fn new(heads: &AttentionHeads, lse: &[usize]) -> Sizes {
        Sizes {
            seq: lse[2],
            heads: heads.heads,
            kv_heads: heads.kv_heads,
            batch_heads: lse[0] * heads.heads,
            head_dim: heads.head_dim,
        }
    }

    /// Key and value heads of all sequences.
    pub(crate) fn key_heads(&self) -> usize {
        self.batch_heads / self.heads.max(1) * self.kv_heads
    }

    /// Number of the `heads` heads to process concurrently, so that the `streamed` tensors of each
    /// (of `seq` rows) stay within a third of the second-level cache.
    pub(crate) fn section(&self, heads: usize, streamed: usize, l2_bytes: u64) -> usize {
        let bytes = (streamed * self.seq * self.head_dim * 2).max(1);
        (l2_bytes as usize / 3 / bytes).clamp(1, heads.max(1))
    }
}

/// The heads of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandHeads {
    /// Number of heads.
    pub(crate) count: usize,
    /// Whether the heads precede the tokens in memory, see
    /// [`HeadsFirst`](deepwell_ir::ops::HeadsFirst).
    pub(crate) are_first: bool,
}

impl OperandHeads {
    /// Rows from a row of a head to that of its next token. Kernels that take each row once, by
    /// sequence and head, take operands with the heads first as sequences of one head.
    pub(crate) fn of_token(self) -> usize {
        if self.are_first { 1 } else { self.count }
    }

    /// The heads of queries, keys, values and output, and of their gradients.
    pub(crate) fn of(heads: &AttentionHeads) -> [OperandHeads; 4] {
        let first = heads.heads_first;
        let query = |are_first| OperandHeads { count: heads.heads, are_first };
        let key = |are_first| OperandHeads { count: heads.kv_heads, are_first };
        [query(first.q), key(first.k), key(first.v), query(first.o)]
    }
}

/// Tile width for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width {
    /// Elements of a row of a tile.
    pub(crate) elements: usize,
    /// Whether the head is narrower, with the rest zero-padded.
    pub(crate) padded: bool,
}

impl Width {
    /// The narrowest tile that holds heads of `head_dim` elements, if one exists.
    pub(crate) fn of(head_dim: usize) -> Option<Width> {
        if WIDTHS.contains(&head_dim) {
            return Some(Width { elements: head_dim, padded: false });
        }
        let is_whole = head_dim > 0 && head_dim.is_multiple_of(UNIT);
        let elements = WIDTHS_PADDED.into_iter().find(|&width| is_whole && head_dim < width)?;
        Some(Width { elements, padded: true })
    }

    /// Suffix of the kernels' names.
    pub(crate) fn name(self) -> String {
        format!("d{}{}", self.elements, if self.padded { "_padded" } else { "" })
    }
}

/// Tile width of the kernels that support windows, sinks, documents and values of another width.
pub(crate) fn extended_elements(heads: &AttentionHeads) -> Option<usize> {
    let (keys, values) = (heads.head_dim, heads.value_dim());
    if [keys, values].iter().any(|&width| width == 0 || !width.is_multiple_of(UNIT)) {
        return None;
    }
    let has_narrow_values = keys <= WIDEST && values <= WIDEST_VALUES;
    let found = WIDTHS_PADDED.into_iter().find(|&width| keys.max(values) <= width);
    found.or(has_narrow_values.then_some(WIDEST))
}

/// Tile width for an attention's heads, and the suffix of the kernels' names.
pub(crate) fn kernel_of(heads: &AttentionHeads) -> Option<(usize, String)> {
    if heads.extension().is_some() {
        return extended_elements(heads).map(|width| (width, format!("d{width}_extended")));
    }
    Width::of(heads.head_dim).map(|width| (width.elements, width.name()))
}

/// Address of the documents of an attention whose additional operands begin at `extra`; null if
/// documents are not separated.
pub(crate) fn documents_argument(
    call: &CallView<'_>,
    heads: &AttentionHeads,
    extra: usize,
) -> Argument {
    let none = Argument::Pointer(DevicePtr(0));
    heads.documents_at(extra).map_or(none, |at| call.input(at).argument())
}

/// Address of the sinks of a forward; null without sinks.
pub(crate) fn sinks_argument(call: &CallView<'_>, heads: &AttentionHeads) -> Argument {
    let none = Argument::Pointer(DevicePtr(0));
    if heads.sinks { call.input(forward::SINKS).argument() } else { none }
}

/// Keys of a window; without a window, those of the sequence.
pub(crate) fn window_argument(heads: &AttentionHeads, seq: usize) -> Argument {
    Argument::U32(heads.window.map_or(seq, |window| window.min(seq)) as u32)
}

/// Additional arguments of extended kernels: elements of a value, and keys of a window.
pub(crate) fn extended_arguments(heads: &AttentionHeads, seq: usize) -> [Argument; 2] {
    [Argument::U32(heads.value_dim() as u32), window_argument(heads, seq)]
}

/// Whether an attention needs a kernel for windows, sinks and documents.
pub(crate) fn is_extended(heads: &AttentionHeads) -> bool {
    heads.window.is_some() || heads.sinks || heads.documents
}

/// Reason for refusing extensions in kernels of plain attention. Sinks and documents are additional
/// operands, so this check precedes all checks of operands.
pub(crate) fn reject_extension(heads: &AttentionHeads) -> Option<String> {
    let got = heads.extension()?;
    Some(format!(
        "takes attention without windows, sinks and documents, values as wide as keys, not {got}"
    ))
}

/// Reason for refusing heads before tokens, in kernels that compute addresses by themselves.
pub(crate) fn reject_heads_first(heads: &AttentionHeads) -> Option<String> {
    (!heads.heads_first.is_none())
        .then(|| "takes operands with the tokens before the heads".to_string())
}

/// Reason for refusing values of another width than the keys.
pub(crate) fn reject_values(heads: &AttentionHeads) -> Option<String> {
    let (keys, values) = (heads.head_dim, heads.value_dim());
    (keys != values).then(|| format!("takes values as wide as keys, not {values} beside {keys}"))
}

/// Reason for refusing heads or rows.
pub(crate) fn reject_heads(heads: &AttentionHeads, lse: &[usize]) -> Option<String> {
    if kernel_of(heads).is_none() {
        let most = WIDTHS[WIDTHS.len() - 1];
        let keys = heads.head_dim;
        let values = heads.value_dim();
        let got = if keys == values { format!("{keys}") } else { format!("{keys} and {values}") };
        return Some(format!(
            "takes heads of {UNIT} to {most} elements, to {WIDEST} where values have at most \
             {WIDEST_VALUES}, each a multiple of {UNIT}, not of {got}"
        ));
    }
    reject_sizes(heads, lse)
}

/// Reason for refusing sizes other than the width of a head.
pub(crate) fn reject_sizes(heads: &AttentionHeads, lse: &[usize]) -> Option<String> {
    if !(heads.scale > 0.0 && heads.scale.is_finite()) {
        return Some(format!("takes a positive scale, not {}", heads.scale));
    }
    // Rows and tiles are counted in 32 bits, as are distances within a tile of 128 tokens.
    if lse.iter().product::<usize>() > ROWS_MAX {
        return Some(format!("takes at most {ROWS_MAX} rows of scores, not those of {lse:?}"));
    }
    let width = heads.heads * heads.head_dim.max(heads.value_dim());
    if width > WIDTH_MAX {
        return Some(format!("takes at most {WIDTH_MAX} elements a token, not {width}"));
    }
    None
}

/// Scale for exponentials in powers of two: `scale * log2(e)`.
pub(crate) fn scale_log2(heads: &AttentionHeads) -> f32 {
    (heads.scale * std::f64::consts::LOG2_E) as f32
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Attention(op) = request.op else { return Some("takes `attention`".to_string()) };
    let out = request.input_count;
    reject_heads_first(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, out]))
        .or_else(|| reject_heads(&op.heads, &request.operands[out + 1].shape))
}

/// Share of Hopper's BF16 peak, for comparison with the wgmma kernel: 26 to 39 % on an H200 for
/// sequences of 1024 and more (`benchmarks/sm90_attention_2026-11-23.md`).
const HOPPER_SHARE: f64 = 0.33;

/// Share of a B200's BF16 peak, for comparison with the tcgen05 kernel: 320 to 390 TFLOP/s of 2250
/// are published for attention by `mma.sync` (FlashAttention 2, flashinfer-ai/flashinfer#5133).
const BLACKWELL_SHARE: f64 = 0.16;

pub(super) fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let is_any_of = |all: &[Architecture]| {
        all.iter().any(|architecture| target.arch == architecture.target_name())
    };
    if is_any_of(&[Architecture::Sm90a]) {
        return Rates::of(target).roofline_s(request, HOPPER_SHARE);
    }
    if is_any_of(&[Architecture::Sm100a, Architecture::Sm103a]) {
        return Rates::of(target).roofline_s(request, BLACKWELL_SHARE);
    }
    roofline(request, target)
}

/// Dynamic shared memory: a tile of queries, two buffers of keys and of values, and two offsets.
pub(crate) fn shared_bytes(width: usize) -> u32 {
    // Keys per buffer.
    let stage_keys = if width > 128 { 32 } else { 64 };
    ((CTA_QUERIES + 2 * 2 * stage_keys) * width * 2 + 16) as u32
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Attention(op) = &call.call.op else {
        return Err(call.refuse("expected `attention`"));
    };
    let mut last = Vec::new();
    if op.heads.extension().is_some() {
        last.extend(extended_arguments(&op.heads, call.output(forward::LSE).shape[2]));
        last.push(sinks_argument(call, &op.heads));
        last.push(documents_argument(call, &op.heads, 3));
    }
    let kernel = kernel_of(&op.heads);
    Ok(vec![launch(call, device, ("attention", kernel), &op.heads, op.heads.causal, last)?])
}

/// Launches a kernel of a file, see [`kernel_of`]: from q, k, v to out and lse, with the kernel's
/// own arguments at the end.
pub(super) fn launch(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    (file, kernel): (&'static str, Option<(usize, String)>),
    heads: &AttentionHeads,
    causal: bool,
    last: Vec<Argument>,
) -> Result<Step, KernelError> {
    let [q, k, v] = [0, 1, 2].map(|index| call.input(index));
    let (out, lse): (DeviceTensor, DeviceTensor) = (call.output(0), call.output(forward::LSE));
    let sizes = Sizes::new(heads, &lse.shape);
    let Some((width, name)) = kernel else {
        return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
    };
    let shared = shared_bytes(width);
    let function = device.function(file, &format!("{file}_{name}"), shared)?;
    // Sections of whole groups, whose heads share keys and values.
    let l2_bytes = device.driver.properties().l2_bytes;
    let section = sizes.section(sizes.key_heads(), 2, l2_bytes) * (sizes.heads / sizes.kv_heads);
    let ctas = sizes.seq.div_ceil(CTA_QUERIES) * sizes.batch_heads;
    let mut arguments: Vec<Argument> = [&q, &k, &v, &out, &lse].map(DeviceTensor::argument).into();
    arguments.extend(
        [sizes.seq, sizes.heads, sizes.kv_heads, sizes.batch_heads, section]
            .map(|size| Argument::U32(size as u32)),
    );
    arguments.push(Argument::U32(causal.into()));
    arguments.push(Argument::F32(scale_log2(heads)));
    arguments.push(Argument::U32(sizes.head_dim as u32));
    arguments.extend(last);
    Ok(Device::launch(function, ctas.max(1) as u32, THREADS, shared, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_heads_go_through_tiles_for_keys_and_values() {
        for (head_dim, value_dim, expected) in [
            (16, 8, Some(64)),
            (64, 64, Some(64)),
            (64, 72, Some(128)),
            (128, 64, Some(128)),
            (192, 128, Some(192)),
            (136, 8, Some(192)),
            (192, 136, None),
            (200, 128, None),
            (8, 192, None),
            (60, 64, None),
            (64, 60, None),
        ] {
            let heads = AttentionHeads {
                head_dim,
                value_dim: Some(value_dim),
                window: Some(3),
                ..AttentionHeads::default()
            };
            let expected = expected.map(|width| (width, format!("d{width}_extended")));
            assert_eq!(kernel_of(&heads), expected, "{head_dim} {value_dim}");
        }
    }

    #[test]
    fn heads_go_through_the_least_tiles_that_hold_them() {
        for (head_dim, expected) in [
            (0, None),
            (8, Some("d64_padded")),
            (16, Some("d16")),
            (24, Some("d64_padded")),
            (32, Some("d32")),
            (60, None),
            (64, Some("d64")),
            (72, Some("d128_padded")),
            (96, Some("d128_padded")),
            (128, Some("d128")),
            (136, None),
        ] {
            let found = Width::of(head_dim).map(Width::name);
            assert_eq!(found.as_deref(), expected, "{head_dim}");
        }
    }
}
