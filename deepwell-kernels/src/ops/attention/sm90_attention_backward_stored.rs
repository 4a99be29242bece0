//! `sm90_attention_backward_stored.cu`: gradients of attention on wgmma with five GEMMs. A launch
//! stores the gradients of scores, and the next launch sums dq from the stored gradients.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{OperandHeads, Sizes, reject_extension, reject_heads, scale_log2};
use super::operand::backward;
use super::sm90_attention_backward::{
    BOX_ELEMENTS, COUNTERS, SHARED_BESIDE_TILES, STATISTICS, THREADS, TILE_ROWS, WAVE_ROWS,
    launch_rows, least_section, statistics_rows,
};
use super::stored_scores::Stored;
use super::tensor_map_launch::head_boxes;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Threads of a CTA of `queries`.
pub(super) const SUM_THREADS: u32 = 256;
/// Queries of a block, which `keys` streams, and keys of a stage of `queries`.
pub(super) const BLOCK: usize = 64;
/// Alignment of the parts of a workspace in bytes.
pub(super) const PART_BYTES: usize = 256;
/// Most bytes of stored tiles, 1 % of an H200's memory. If all heads have more, each launch is for
/// some of the heads.
pub(super) const STORED_BYTES_MAX: usize = 5 << 28;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_attention_backward_stored", &["attention_backward"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionBackward(op) = request.op else {
        return Some("takes `attention_backward`".to_string());
    };
    let lse = &request.operands[backward::LSE].shape;
    reject_extension(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4, 6, 7, 8]))
        .or_else(|| reject_heads(&op.heads, lse))
        .or_else(|| reject_width(op.heads.head_dim))
        .or_else(|| reject_bytes(Stored::of(&op.heads, lse).head_bytes()))
}

/// Reason for refusing narrow and wide heads.
pub(super) fn reject_width(head_dim: usize) -> Option<String> {
    let most = SHAPES[SHAPES.len() - 1].head_dim;
    Shape::of(head_dim).is_none().then(|| {
        format!(
            "takes heads of {} to {most} elements, not of {head_dim}: bytes of score gradients do \
             not depend on the width",
            NARROW + 1
        )
    })
}

/// Reason for refusing long sequences.
pub(super) fn reject_bytes(bytes: usize) -> Option<String> {
    (bytes > STORED_BYTES_MAX).then(|| {
        let most = STORED_BYTES_MAX;
        format!("stores at most {most} bytes of score gradients, not {bytes} per key head")
    })
}

/// Share of the peak on an H200: 0.47 to 0.57 with sequences of 2048 tokens and more
/// (benchmarks/sm90_attention_backward_2026-11-29.md).
const SHARE: f64 = 0.5;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

/// Sizes of `keys` and `queries` for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Largest number of elements of a head.
    pub(super) head_dim: usize,
    /// Of `keys`: number of tiles and of stages in shared memory.
    pub(super) keys: [usize; 2],
    /// Of `queries`: number of stages in shared memory.
    pub(super) sum_stages: usize,
}

/// Heads of this width and less have fewer operations per stored byte: 988 us for 4 x 16 x 4096 x
/// 64 causal, 905 us without storing (benchmarks/sm90_attention_backward_2026-11-29.md).
const NARROW: usize = 64;

const SHAPES: [Shape; 2] = [
    Shape { head_dim: 96, keys: [2, 3], sum_stages: 3 },
    Shape { head_dim: 128, keys: [2, 3], sum_stages: 3 },
];

impl Shape {
    /// The first kernels that support heads of `head_dim` elements.
    pub(super) fn of(head_dim: usize) -> Option<Shape> {
        let is_wide = head_dim > NARROW;
        SHAPES.into_iter().find(|shape| is_wide && head_dim <= shape.head_dim)
    }

    fn row_bytes(self) -> usize {
        self.head_dim.next_multiple_of(BOX_ELEMENTS) * 2
    }

    /// Dynamic shared memory of `keys`: tiles of keys and values, stages of queries, dout and
    /// statistics.
    pub(super) fn key_bytes(self) -> u32 {
        let [slots, stages] = self.keys;
        let rows = 2 * slots * TILE_ROWS + 2 * stages * BLOCK;
        let statistics = stages * BLOCK * STATISTICS * size_of::<f32>();
        (rows * self.row_bytes() + statistics + SHARED_BESIDE_TILES) as u32
    }

    /// Dynamic shared memory of `queries`: stages of score gradients and of keys.
    pub(super) fn sum_bytes(self) -> u32 {
        let stage = TILE_ROWS * BLOCK * 2 + BLOCK * self.row_bytes();
        (self.sum_stages * stage + SHARED_BESIDE_TILES) as u32
    }
}

/// Bytes of a workspace before the stored tiles: lse in powers of two and delta of each row.
pub(super) fn statistics_bytes(lse: &[usize]) -> usize {
    (statistics_rows(lse) * STATISTICS * size_of::<f32>()).next_multiple_of(PART_BYTES)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let Op::AttentionBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let lse = &request.operands[backward::LSE].shape;
    let stored = Stored::of(&op.heads, lse);
    statistics_bytes(lse)
        + stored.heads_of_launch(target.workers, STORED_BYTES_MAX) * stored.head_bytes()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_backward`"));
    };
    let lse = call.input(backward::LSE);
    let sizes = Sizes::new(&op.heads, &lse.shape);
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let Some(shape) = Shape::of(sizes.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
    };
    let stored = Stored::of(&op.heads, &lse.shape);
    let (lse_log2, bytes) = call.workspace();
    let before = statistics_bytes(&lse.shape);
    // As many heads as the plan has memory for.
    let of_launch = bytes.saturating_sub(before) / stored.head_bytes();
    if of_launch == 0 {
        let expected = before + stored.head_bytes();
        return Err(call
            .refuse(format!("expected a workspace of {expected} bytes, got {bytes}; plan again")));
    }
    let delta = lse_log2.offset(statistics_rows(&lse.shape) * size_of::<f32>());
    let memory = Memory { lse_log2, delta, tiles: lse_log2.offset(before) };
    let mut steps = vec![launch_rows(call, device, &op.heads, [lse_log2, delta])?];
    for first in (0..stored.key_heads).step_by(of_launch) {
        let heads = [first, of_launch.min(stored.key_heads - first)];
        steps.push(launch_keys(call, device, shape, &memory, heads)?);
        steps.push(launch_queries(call, device, shape, &memory, heads)?);
    }
    Ok(steps)
}

/// Parts of a workspace.
pub(super) struct Memory {
    pub(super) lse_log2: DevicePtr,
    pub(super) delta: DevicePtr,
    pub(super) tiles: DevicePtr,
}

pub(super) fn numbers<const N: usize>(sizes: [usize; N]) -> [Argument; N] {
    sizes.map(|size| Argument::U32(size as u32))
}

/// dk, dv and score gradients of `heads`: the first key head and their number.
fn launch_keys(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    shape: Shape,
    memory: &Memory,
    heads: [usize; 2],
) -> Result<Step, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else { unreachable!("checked by `prepare`") };
    let [dout, q, k, v, lse] = [0, 1, 2, 3, 5].map(|index| call.input(index));
    let [dk, dv] = [1, 2].map(|index| call.output(index));
    let sizes = Sizes::new(&op.heads, &lse.shape);
    let name = format!("sm90_attention_backward_stored_keys_d{}", shape.head_dim);
    let function = device.function("sm90_attention_backward_stored", &name, shape.key_bytes())?;
    let mut arguments = Vec::with_capacity(20);
    let [of_q, of_k, of_v, of_out] = OperandHeads::of(&op.heads);
    for (tensor, of_tensor, rows) in [
        (&dout, of_out, BLOCK),
        (&q, of_q, BLOCK),
        (&k, of_k, TILE_ROWS),
        (&v, of_v, TILE_ROWS),
        (&dk, of_k, WAVE_ROWS),
        (&dv, of_v, WAVE_ROWS),
    ] {
        let map = device.tensor_map(&head_boxes(tensor, &sizes, of_tensor, rows))?;
        arguments.push(Argument::TensorMap(map));
    }
    arguments.extend([memory.lse_log2, memory.delta, memory.tiles].map(Argument::Pointer));
    arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
    arguments.extend(numbers([sizes.seq, sizes.heads, sizes.kv_heads, lse.shape[0]]));
    let (tiles, sms) = (sizes.seq.div_ceil(TILE_ROWS), device.sm_count() as usize);
    let [_, count] = heads;
    // The group's queries and dout are streamed.
    let streamed = 2 * (sizes.heads / sizes.kv_heads);
    let l2_bytes = device.driver.properties().l2_bytes;
    let section = sizes.section(count, streamed, l2_bytes).max(least_section(tiles, sms, count));
    arguments.extend(numbers(heads));
    // Sections of equal size: the longest tiles of a small last one would delay the end.
    arguments.extend(numbers([count.div_ceil(count.div_ceil(section))]));
    arguments.push(Argument::U32(op.heads.causal.into()));
    arguments.push(Argument::F32(op.heads.scale as f32));
    arguments.push(Argument::F32(scale_log2(&op.heads)));
    // Persistent CTAs loop over tiles.
    let ctas = (tiles * count).min(sms) as u32;
    Ok(Device::launch(function, ctas, THREADS, shape.key_bytes(), arguments))
}

/// dq of the query heads of `heads`.
fn launch_queries(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    shape: Shape,
    memory: &Memory,
    heads: [usize; 2],
) -> Result<Step, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else { unreachable!("checked by `prepare`") };
    let (k, lse, dq) = (call.input(2), call.input(backward::LSE), call.output(0));
    let sizes = Sizes::new(&op.heads, &lse.shape);
    let name = format!("sm90_attention_backward_stored_queries_d{}", shape.head_dim);
    let function = device.function("sm90_attention_backward_stored", &name, shape.sum_bytes())?;
    let mut arguments = Vec::with_capacity(10);
    let [of_q, of_k, ..] = OperandHeads::of(&op.heads);
    for (tensor, of_tensor) in [(&k, of_k), (&dq, of_q)] {
        let map = device.tensor_map(&head_boxes(tensor, &sizes, of_tensor, BLOCK))?;
        arguments.push(Argument::TensorMap(map));
    }
    arguments.push(Argument::Pointer(memory.tiles));
    arguments.extend(numbers([sizes.seq, sizes.heads, sizes.kv_heads]));
    arguments.extend(numbers(heads));
    arguments.push(Argument::U32(op.heads.causal.into()));
    arguments.push(Argument::F32(op.heads.scale as f32));
    let tiles = sizes.seq.div_ceil(TILE_ROWS) * heads[1] * (sizes.heads / sizes.kv_heads);
    Ok(Device::launch(function, tiles as u32, SUM_THREADS, shape.sum_bytes(), arguments))
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{AttentionBackward, AttentionHeads};
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_backward_stored.cu");
        for (head_dim, width, key_bytes, sum_bytes) in
            [(72, 96, 232_192, 99_584), (128, 128, 232_192, 99_584)]
        {
            let shape = Shape::of(head_dim).unwrap();
            let got = (shape.head_dim, shape.key_bytes(), shape.sum_bytes());
            assert_eq!(got, (width, key_bytes, sum_bytes), "{head_dim}");
            // Two CTAs of `queries` share an SM.
            assert!(shape.key_bytes() <= 227 << 10 && 2 * (shape.sum_bytes() + 1024) <= 228 << 10);
            let [slots, stages] = shape.keys;
            for line in [
                format!("KEYS(d{width}, {width}, {BLOCK}, {slots}, {stages})"),
                format!("QUERIES(d{width}, {width}, {})", shape.sum_stages),
            ] {
                assert!(source.contains(&line), "{line}");
            }
        }
        assert_eq!([8, 64, 136].map(Shape::of), [None; 3]);
    }

    #[test]
    fn it_is_taken_where_it_was_faster() {
        let (split, ordered, stored) = (
            "cuda_sm90_attention_backward",
            "cuda_sm90_attention_backward_ordered",
            "cuda_sm90_attention_backward_stored",
        );
        for ([heads, kv_heads, head_dim], seq, window, expected) in [
            ([16, 16, 64], 4096, None, ordered),
            ([32, 4, 64], 2048, None, split),
            ([32, 4, 96], 2048, None, stored),
            ([16, 16, 128], 16384, None, stored),
            ([16, 16, 128], 16384, Some(4096), split),
            ([16, 16, 128], 65536, None, split),
        ] {
            let of_heads = AttentionHeads {
                heads,
                kv_heads,
                head_dim,
                causal: true,
                scale: 0.1,
                window,
                ..AttentionHeads::default()
            };
            let op = AttentionBackward { heads: of_heads }.into();
            let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
            let query = of(DType::Bf16, &[seq, heads * head_dim]);
            let key = of(DType::Bf16, &[seq, kv_heads * head_dim]);
            let lse = of(DType::F32, &[1, heads, seq]);
            let operands = [&query, &query, &key, &key, &query, &lse, &query, &key, &key];
            let operands = operands.map(Clone::clone);
            let request = KernelRequest { op: &op, operands: &operands, input_count: 6 };
            let target = cuda_target(Architecture::Sm90a, 132, &[]);
            let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
            assert_eq!(chosen, expected, "{heads}/{kv_heads} heads of {head_dim}, {seq}");
        }
    }
}
