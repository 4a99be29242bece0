//! `attention_backward.cu`: gradients of attention, in one launch.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{
    Sizes, documents_argument, extended_arguments, kernel_of, reject_heads, reject_heads_first,
    scale_log2,
};
use super::operand::backward;
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
/// Threads of a CTA of the kernel for sinks' gradients.
const SINK_THREADS: u32 = 512;
/// Rows of a tile of statistics.
const ROWS_PER_ITEM: usize = 256;
/// Bytes of lse and delta of a row, in FP32.
const STATISTICS_BYTES: usize = 8;
/// Bytes of a CTA's work item in shared memory.
const WORK_BYTES: usize = 48;
/// Counters: work items taken, rows done, CTAs done.
const COUNTERS: usize = 3;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_attention_backward", &["attention_backward"], prepare)
        .reject(reject)
        .predict(predict)
        .workspace_bytes(workspace_bytes)];

/// Share of the peak on an H200: 0.21 to 0.26 with sequences of 2048 tokens and more.
const HOPPER_SHARE: f64 = 0.24;

/// Share of a B200's BF16 peak, for comparison with the tcgen05 kernel: what is published for the
/// forward by `mma.sync`, see `cuda.rs`.
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

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionBackward(op) = request.op else {
        return Some("takes `attention_backward`".to_string());
    };
    let dq = request.input_count;
    reject_heads_first(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4, dq, dq + 1, dq + 2]))
        .or_else(|| reject_heads(&op.heads, &request.operands[backward::LSE].shape))
}

/// Workspace of each row's delta and lse in powers of two.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    request.operands[backward::LSE].shape.iter().product::<usize>() * STATISTICS_BYTES
}

/// Keys of a tile of dk and dv.
fn block_keys(width: usize) -> usize {
    if width >= 128 { 64 } else { 128 }
}

/// Keys of a buffer in work items of queries.
fn stage_keys(width: usize) -> usize {
    if width >= 128 { 32 } else { 64 }
}

/// Queries of a tile of dq.
fn block_queries(width: usize) -> usize {
    if width > 128 { 64 } else { 128 }
}

/// Queries of a buffer in work items of keys.
fn stage_queries(width: usize) -> usize {
    if width > 128 { 32 } else { 64 }
}

/// Dynamic shared memory: that of the larger kind of work item, and the description of the item.
fn shared_bytes(width: usize) -> u32 {
    let row_bytes = width * 2;
    let query_stage = stage_queries(width) * (2 * row_bytes + STATISTICS_BYTES);
    let key_work = 2 * block_keys(width) * row_bytes + 2 * query_stage;
    let query_work = (2 * block_queries(width) + 2 * 2 * stage_keys(width)) * row_bytes;
    (key_work.max(query_work) + WORK_BYTES) as u32
}

/// Number of work items: of rows, of keys, of queries.
fn items(sizes: &Sizes, width: usize) -> usize {
    let key_heads = sizes.key_heads();
    (sizes.batch_heads * sizes.seq).div_ceil(ROWS_PER_ITEM)
        + sizes.seq.div_ceil(block_keys(width)) * key_heads
        + sizes.seq.div_ceil(block_queries(width)) * sizes.batch_heads
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_backward`"));
    };
    let seq = call.input(backward::LSE).shape[2];
    let mut last = Vec::new();
    if op.heads.extension().is_some() {
        last.extend(extended_arguments(&op.heads, seq));
        last.push(documents_argument(call, &op.heads, 6));
    }
    let kernel = ("attention_backward", kernel_of(&op.heads));
    let mut steps = vec![launch(call, device, kernel, &op.heads, op.heads.causal, last)?];
    steps.extend(sink_gradients_after(call, device, &op.heads)?);
    Ok(steps)
}

/// The gradients of the sinks after [`launch`], which leaves the delta of each row in the
/// workspace; none without sinks.
pub(super) fn sink_gradients_after(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    heads: &AttentionHeads,
) -> Result<Option<Step>, KernelError> {
    if !heads.sinks || heads.heads == 0 {
        return Ok(None);
    }
    // Each row's delta is after its lse.
    let deltas = call.workspace().0.offset(size_of::<f32>());
    let stride = STATISTICS_BYTES / size_of::<f32>();
    let seq = call.input(backward::LSE).shape[2];
    sink_gradients(call, device, deltas, seq, stride).map(Some)
}

/// Launches a kernel of a file, see [`kernel_of`]: from dout, q, k, v, out and lse to dq, dk and
/// dv, with the kernel's own arguments at the end.
pub(super) fn launch(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    (file, kernel): (&'static str, Option<(usize, String)>),
    heads: &AttentionHeads,
    causal: bool,
    last: Vec<Argument>,
) -> Result<Step, KernelError> {
    let lse = call.input(backward::LSE);
    let sizes = Sizes::new(heads, &lse.shape);
    let Some((width, name)) = kernel else {
        return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
    };
    let shared = shared_bytes(width);
    let function = device.function(file, &format!("{file}_{name}"), shared)?;
    // Persistent CTAs loop over work items.
    let resident = device.resident_ctas(function, THREADS, shared)?;
    let ctas = items(&sizes, width).clamp(1, resident as usize);
    let l2_bytes = device.driver.properties().l2_bytes;
    let group = sizes.heads / sizes.kv_heads;
    // Work on keys streams a group's queries and dout; work on queries streams keys and values.
    let key_section = sizes.section(sizes.key_heads(), 2 * group, l2_bytes);
    let query_section = sizes.section(sizes.key_heads(), 2, l2_bytes) * group;

    let mut arguments: Vec<Argument> =
        (0..5).map(|index| call.input(index)).chain([lse]).map(|x| x.argument()).collect();
    arguments.extend((0..3).map(|index| DeviceTensor::argument(&call.output(index))));
    arguments.push(Argument::Pointer(call.workspace().0));
    arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
    let batch = sizes.batch_heads / sizes.heads.max(1);
    arguments.extend(
        [sizes.seq, sizes.heads, sizes.kv_heads, batch, key_section, query_section]
            .map(|size| Argument::U32(size as u32)),
    );
    arguments.push(Argument::U32(causal.into()));
    arguments.push(Argument::F32(heads.scale as f32));
    arguments.push(Argument::F32(scale_log2(heads)));
    arguments.push(Argument::U32(sizes.head_dim as u32));
    arguments.extend(last);
    Ok(Device::launch(function, ctas as u32, THREADS, shared, arguments))
}

/// Launches the gradients of the sinks, after a kernel that has left `deltas`: `delta_seq` FP32 per
/// sequence and head, with stride `delta_stride`.
pub(crate) fn sink_gradients(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    deltas: DevicePtr,
    delta_seq: usize,
    delta_stride: usize,
) -> Result<Step, KernelError> {
    let (lse, sinks, dsinks) =
        (call.input(backward::LSE), call.input(backward::SINKS), call.output(backward::DSINKS));
    let function = device.function("attention_backward", "attention_backward_sinks", 0)?;
    let [batch, heads, seq] = [0, 1, 2].map(|axis| lse.shape[axis]);
    let mut arguments =
        vec![sinks.argument(), lse.argument(), Argument::Pointer(deltas), dsinks.argument()];
    arguments.extend(
        [batch, heads, seq, delta_seq, delta_stride].map(|size| Argument::U32(size as u32)),
    );
    arguments.push(Argument::U32(call.accumulate().into()));
    Ok(Device::launch(function, heads as u32, SINK_THREADS, 0, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_fits_the_smallest_gpu() {
        // (head_dim, forward, backward), computed from the tiles of the sources.
        for (head_dim, forward, backward) in [
            (16, 12_304, 17_456),
            (32, 24_592, 33_840),
            (64, 49_168, 66_608),
            (128, 98_320, 99_376),
            (192, 98_320, 98_864),
        ] {
            assert_eq!(crate::ops::attention::cuda::shared_bytes(head_dim), forward);
            assert_eq!(shared_bytes(head_dim), backward);
            // sm_120 has 99 KiB per CTA; the backward also has 256 bytes of static shared memory.
            assert!(backward.max(forward) + 256 <= 99 * 1024);
        }
    }

    #[test]
    fn work_is_counted_by_kind() {
        // (seq, heads, kv_heads, batch, head_dim, rows + keys + queries)
        for (seq, heads, kv_heads, batch, head_dim, expected) in [
            (0, 4, 2, 1, 64, 0),
            (1, 4, 2, 1, 64, 1 + 2 + 4),
            (128, 4, 2, 2, 64, 4 + 4 + 8),
            (129, 4, 2, 2, 64, 5 + 8 + 16),
            (129, 4, 2, 2, 128, 5 + 12 + 16),
            (129, 4, 2, 2, 192, 5 + 12 + 24),
        ] {
            let batch_heads = batch * heads;
            let sizes = Sizes { seq, heads, kv_heads, batch_heads, head_dim };
            assert_eq!(items(&sizes, head_dim), expected, "{sizes:?}");
        }
    }

    #[test]
    fn sections_keep_to_the_cache() {
        let sizes = Sizes { seq: 1024, heads: 8, kv_heads: 8, batch_heads: 64, head_dim: 64 };
        // 128 KiB a tensor and head, two tensors; a third of the cache.
        for (l2_bytes, expected) in [(0, 1), (3 << 20, 4), (48 << 20, 64), (1 << 40, 64)] {
            assert_eq!(sizes.section(64, 2, l2_bytes), expected, "{l2_bytes}");
        }
    }
}
