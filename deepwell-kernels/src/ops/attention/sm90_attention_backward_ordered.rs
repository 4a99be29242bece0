//! `sm90_attention_backward_ordered.cu`: gradients of attention on wgmma with five GEMMs; dq is
//! summed over CTAs in a fixed order.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{OperandHeads, Sizes, reject_extension, reject_heads, scale_log2};
use super::operand::backward;
use super::sm90_attention_backward::{
    BOX_ELEMENTS, COUNTERS, SHARED_BESIDE_TILES, STATISTICS_THREADS, THREADS, TILE_ROWS, WAVE_ROWS,
    least_section,
};
use super::tensor_map_launch::head_boxes;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, TensorMapSpec};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Threads of a CTA of the last launch.
const ROUND_THREADS: u32 = 256;
/// Widest heads. With heads of 128, storing score gradients is faster
/// (benchmarks/sm90_attention_backward_2026-11-29.md).
const WIDTH: usize = 64;
/// FP32 sums of a block of queries: rows times elements of a head.
const SUMS_OF_BLOCK: usize = 8192;
/// Number of tiles and of stages in shared memory, and stages of ds.
const SLOTS: usize = 2;
const STAGES: usize = 2;
const SCORE_STAGES: usize = 2;
/// Alignment of the parts of a workspace in bytes.
const PART_BYTES: usize = 256;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_sm90_attention_backward_ordered",
    &["attention_backward"],
    prepare,
)
.architectures(&[Architecture::Sm90a])
.reject(reject)
.predict(predict)
.workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionBackward(op) = request.op else {
        return Some("takes `attention_backward`".to_string());
    };
    reject_extension(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4, 6, 7, 8]))
        .or_else(|| reject_heads(&op.heads, &request.operands[backward::LSE].shape))
        .or_else(|| reject_width(op.heads.head_dim))
}

/// Reason for refusing wide heads.
fn reject_width(head_dim: usize) -> Option<String> {
    shape(head_dim)
        .is_none()
        .then(|| format!("takes heads of at most {WIDTH} elements, not of {head_dim}"))
}

/// Width of the kernel for a head, and its queries per block.
fn shape(head_dim: usize) -> Option<(usize, usize)> {
    (head_dim <= WIDTH).then_some((WIDTH, SUMS_OF_BLOCK / WIDTH))
}

/// Dynamic shared memory: tiles of keys and values, stages of queries, dout and statistics, ds.
fn shared_bytes((width, block): (usize, usize)) -> u32 {
    let rows = 2 * SLOTS * TILE_ROWS + 2 * STAGES * block;
    let statistics = 2 * STAGES * block * size_of::<f32>();
    let scores = SCORE_STAGES * TILE_ROWS * block * 2;
    (rows * width.next_multiple_of(BOX_ELEMENTS) * 2 + statistics + scores + SHARED_BESIDE_TILES)
        as u32
}

/// Share of the peak on an H200 with grouped query heads, below that of
/// `sm90_attention_backward`: waiting for turns and adding FP32 sums in L2 cost as much time as the
/// two saved GEMMs.
const SHARE: f64 = 0.30;
/// Share for long sequences with one key head per query head, where this kernel is the faster
/// (benchmarks/sm90_attention_backward_2026-11-29.md).
const SHARE_OF_LONG: f64 = 0.40;
/// Shortest sequence with this measured share.
const LONG: usize = 2048;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let Op::AttentionBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let heads = &op.heads;
    let seq = request.operands[backward::LSE].shape[2];
    let is_long = seq >= LONG && heads.heads == heads.kv_heads;
    let share = if is_long { SHARE_OF_LONG } else { SHARE };
    Rates::of(target).roofline_s(request, share)
}

/// Offsets of the parts of a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Workspace {
    /// delta of each row, padded by sequence; lse in powers of two is at offset 0.
    delta: usize,
    /// Counts of the tiles that have added to a block.
    counts: usize,
    /// Sums of dq, FP32.
    sums: usize,
    bytes: usize,
}

impl Workspace {
    /// Lays out the workspace for an lse of this shape.
    fn of(lse: &[usize], block: usize) -> Workspace {
        let [batch, heads, seq] = [0, 1, 2].map(|axis| lse[axis]);
        let rows = batch * heads * seq.next_multiple_of(TILE_ROWS);
        let blocks = batch * heads * seq.div_ceil(block);
        let part = |count: usize| (count * size_of::<f32>()).next_multiple_of(PART_BYTES);
        let delta = part(rows);
        let counts = delta + part(rows);
        let sums = counts + part(blocks);
        Workspace { delta, counts, sums, bytes: sums + part(blocks * SUMS_OF_BLOCK) }
    }
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let Op::AttentionBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let (_, block) = shape(op.heads.head_dim).expect("`reject` refuses others");
    Workspace::of(&request.operands[backward::LSE].shape, block).bytes
}

/// The first head whose tiles go longest first, to fill SMs that would be idle at the end: the
/// first head of the last section.
fn longest_first_from(causal: bool, key_heads: usize, section: usize) -> usize {
    if !causal {
        return 0;
    }
    let last_section = (key_heads - 1) / section * section;
    // With a single section: the second half of the heads.
    if last_section == 0 { key_heads.div_ceil(2) } else { last_section }
}

fn numbers(sizes: &[usize]) -> Vec<Argument> {
    sizes.iter().map(|&size| Argument::U32(size as u32)).collect()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_backward`"));
    };
    let [dout, q, k, v, out, lse] = [0, 1, 2, 3, 4, 5].map(|index| call.input(index));
    let [dq, dk, dv] = [0, 1, 2].map(|index| call.output(index));
    let sizes = Sizes::new(&op.heads, &lse.shape);
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let Some(shape @ (width, block)) = shape(sizes.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
    };
    let (heads, kv_heads, batch) = (sizes.heads, sizes.kv_heads, lse.shape[0]);
    let parts = Workspace::of(&lse.shape, block);
    let lse_log2 = call.workspace().0;
    let statistics = [lse_log2, lse_log2.offset(parts.delta)].map(Argument::Pointer);
    let [counts, sums] =
        [parts.counts, parts.sums].map(|offset| Argument::Pointer(lse_log2.offset(offset)));
    let mut function = |of: &str, shared: u32| {
        let name = format!("sm90_attention_backward_ordered_{of}_d{width}");
        device.function("sm90_attention_backward_ordered", &name, shared)
    };
    let of_rows = function("rows", 0)?;
    let of_keys = function("keys", shared_bytes(shape))?;
    let of_round = function("round", 0)?;

    let tiles = sizes.seq.div_ceil(TILE_ROWS);
    let (key_heads, group) = (sizes.key_heads(), heads / kv_heads);
    let l2_bytes = device.driver.properties().l2_bytes;
    let sms = device.sm_count() as usize;

    let mut arguments = [&dout, &out, &lse].map(DeviceTensor::argument).to_vec();
    arguments.extend(statistics);
    arguments.push(counts);
    let [of_q, of_k, of_v, of_out] = OperandHeads::of(&op.heads);
    arguments.extend(numbers(&[sizes.seq, of_out.of_token(), sizes.head_dim]));
    let ctas = (tiles * sizes.batch_heads) as u32;
    let rows = Device::launch(of_rows, ctas, STATISTICS_THREADS, 0, arguments);

    // The group's queries and dout are streamed, and the sums of dq are twice as wide.
    let section =
        sizes.section(key_heads, 4 * group, l2_bytes).max(least_section(tiles, sms, key_heads));
    let maps: [TensorMapSpec; 6] = [
        head_boxes(&dout, &sizes, of_out, block),
        head_boxes(&q, &sizes, of_q, block),
        head_boxes(&k, &sizes, of_k, TILE_ROWS),
        head_boxes(&v, &sizes, of_v, TILE_ROWS),
        head_boxes(&dk, &sizes, of_k, WAVE_ROWS),
        head_boxes(&dv, &sizes, of_v, WAVE_ROWS),
    ];
    let mut arguments = Vec::with_capacity(20);
    for map in maps {
        arguments.push(Argument::TensorMap(device.tensor_map(&map)?));
    }
    arguments.extend(statistics);
    arguments.extend([counts, sums]);
    arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
    let first = longest_first_from(op.heads.causal, key_heads, section);
    let all = tiles * key_heads;
    arguments.extend(numbers(&[sizes.seq, heads, kv_heads, batch, section, all, group, first]));
    arguments.push(Argument::U32(op.heads.causal.into()));
    arguments.push(Argument::F32(op.heads.scale as f32));
    arguments.push(Argument::F32(scale_log2(&op.heads)));
    // Persistent CTAs loop over tiles.
    let ctas = all.min(sms) as u32;
    let keys = Device::launch(of_keys, ctas, THREADS, shared_bytes(shape), arguments);

    let mut arguments = vec![sums, dq.argument()];
    arguments.extend(numbers(&[sizes.seq, of_q.of_token(), sizes.head_dim]));
    arguments.push(Argument::F32(op.heads.scale as f32));
    let ctas = (sizes.seq.div_ceil(block) * sizes.batch_heads) as u32;
    let round = Device::launch(of_round, ctas, ROUND_THREADS, 0, arguments);
    Ok(vec![rows, keys, round])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{AttentionBackward, AttentionHeads};
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_backward_ordered.cu");
        for (head_dim, expected, bytes) in [(8, (64, 128), 199_936), (64, (64, 128), 199_936)] {
            let shape = shape(head_dim).unwrap();
            assert_eq!((shape, shared_bytes(shape)), (expected, bytes), "{head_dim}");
            assert!(shared_bytes(shape) <= 227 << 10);
            let (width, block) = shape;
            let line = format!("KEYS(d{width}, {width}, {block}, {SLOTS}, {STAGES})");
            assert!(source.contains(&line), "{line}");
        }
        assert_eq!(shape(72), None);
    }

    #[test]
    fn a_workspace_has_room_for_padded_rows_and_whole_blocks() {
        // (lse, block, rows of statistics, blocks)
        for (lse, block, rows, blocks) in [
            ([2, 3, 0], 64, 0, 0),
            ([1, 1, 1], 64, 128, 1),
            ([2, 3, 129], 64, 6 * 256, 6 * 3),
            ([2, 3, 129], 128, 6 * 256, 6 * 2),
        ] {
            let got = Workspace::of(&lse, block);
            let counts_bytes = usize::next_multiple_of(blocks * 4, PART_BYTES);
            let expected = Workspace {
                delta: rows * 4,
                counts: rows * 8,
                sums: rows * 8 + counts_bytes,
                bytes: rows * 8 + counts_bytes + blocks * SUMS_OF_BLOCK * 4,
            };
            assert_eq!(got, expected, "{lse:?} {block}");
        }
    }

    #[test]
    fn it_is_taken_where_it_was_faster() {
        let (split, ordered) =
            ("cuda_sm90_attention_backward", "cuda_sm90_attention_backward_ordered");
        for ([heads, kv_heads, head_dim], seq, expected) in [
            ([16, 16, 64], 4096, ordered),
            ([16, 16, 64], 2048, ordered),
            ([16, 16, 64], 1024, split),
            ([32, 4, 64], 4096, split),
        ] {
            let causal = true;
            let of_heads = AttentionHeads {
                heads,
                kv_heads,
                head_dim,
                causal,
                scale: 0.1,
                ..AttentionHeads::default()
            };
            let op = AttentionBackward { heads: of_heads }.into();
            let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
            let query = of(DType::Bf16, &[4 * seq, heads * head_dim]);
            let key = of(DType::Bf16, &[4 * seq, kv_heads * head_dim]);
            let lse = of(DType::F32, &[4, heads, seq]);
            let operands = [&query, &query, &key, &key, &query, &lse, &query, &key, &key];
            let operands = operands.map(Clone::clone);
            let request = KernelRequest { op: &op, operands: &operands, input_count: 6 };
            let target = cuda_target(Architecture::Sm90a, 132, &[]);
            let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
            assert_eq!(chosen, expected, "{heads}/{kv_heads} heads of {head_dim}, {seq}");
        }
    }

    #[test]
    fn the_last_heads_go_the_longest_first() {
        for (causal, key_heads, section, expected) in [
            (false, 32, 9, 0),
            (true, 32, 9, 27),
            (true, 32, 16, 16),
            (true, 32, 32, 16),
            (true, 1, 1, 1),
            (true, 2, 9, 1),
        ] {
            let got = longest_first_from(causal, key_heads, section);
            assert_eq!(got, expected, "{causal} {key_heads} {section}");
        }
    }
}
