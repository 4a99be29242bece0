//! `sm90_attention_backward.cu`: gradients of attention on wgmma, in three launches.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op, Target, Tile};

use super::cuda::{
    OperandHeads, Sizes, documents_argument, reject_heads, reject_values, scale_log2,
    window_argument,
};
use super::cuda_backward::sink_gradients;
use super::operand::backward;
use super::tensor_map_launch::head_boxes;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr, TensorMapSpec};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};
use crate::runtime::predict::Rates;

/// Threads of a CTA, as in the source.
pub(super) const THREADS: u32 = 384;
/// Threads of a CTA of the first launch.
pub(super) const STATISTICS_THREADS: u32 = 256;
/// Rows of a tile, of keys or of queries; statistics are padded to whole tiles.
pub(super) const TILE_ROWS: usize = 128;
/// Rows of a consumer, and of a box of results.
pub(super) const WAVE_ROWS: usize = 64;
/// FP32 statistics per row: lse and delta.
pub(super) const STATISTICS: usize = 2;
/// Elements of a box of a head: the width of the swizzle.
pub(super) const BOX_ELEMENTS: usize = 64;
/// Shared memory for barriers and alignment.
pub(super) const SHARED_BESIDE_TILES: usize = 1024 + 256;
/// Counters: tiles taken, CTAs done.
pub(super) const COUNTERS: usize = 2;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_attention_backward", &["attention_backward"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)
        .workspace_bytes(workspace_bytes)
        .select_tile(select_tile)];

/// Tile sizes of the two gradient kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Largest number of elements of a head.
    pub(super) head_dim: usize,
    /// Work on keys: queries of a stage, number of tiles and of stages in shared memory.
    pub(super) keys: [usize; 3],
    /// Work on queries: keys of a stage, number of tiles and of stages in shared memory.
    pub(super) queries: [usize; 3],
}

/// Narrower heads first, then in order of preference.
const SHAPES: [Shape; 5] = [
    Shape { head_dim: 64, keys: [64, 2, 4], queries: [128, 2, 3] },
    Shape { head_dim: 64, keys: [64, 2, 4], queries: [64, 2, 4] },
    Shape { head_dim: 96, keys: [64, 2, 3], queries: [96, 2, 2] },
    Shape { head_dim: 128, keys: [64, 2, 3], queries: [96, 2, 2] },
    Shape { head_dim: 128, keys: [64, 2, 3], queries: [128, 1, 2] },
];

impl Shape {
    /// The preferred shape for heads of `head_dim` elements, and the alternatives of the same
    /// width.
    pub(super) fn of(head_dim: usize) -> Option<(Shape, Vec<Shape>)> {
        let preferred = SHAPES.into_iter().find(|shape| head_dim <= shape.head_dim)?;
        let is_other = |shape: &Shape| shape.head_dim == preferred.head_dim && *shape != preferred;
        Some((preferred, SHAPES.into_iter().filter(is_other).collect()))
    }

    /// The tile as recorded in plans: streamed queries by streamed keys.
    fn tile(self) -> Tile {
        Tile::new(self.keys[0], self.queries[0], self.head_dim)
    }

    fn row_bytes(self) -> usize {
        self.head_dim.next_multiple_of(BOX_ELEMENTS) * 2
    }

    /// Dynamic shared memory of the work on keys: tiles of keys and values, stages of queries,
    /// dout and statistics.
    pub(super) fn key_bytes(self) -> u32 {
        let [block, slots, stages] = self.keys;
        let rows = 2 * slots * TILE_ROWS + 2 * stages * block;
        let statistics = stages * block * STATISTICS * size_of::<f32>();
        (rows * self.row_bytes() + statistics + SHARED_BESIDE_TILES) as u32
    }

    /// Dynamic shared memory of the work on queries: tiles of queries and dout, stages of keys and
    /// values.
    pub(super) fn query_bytes(self) -> u32 {
        let [block, slots, stages] = self.queries;
        let rows = 2 * slots * TILE_ROWS + 2 * stages * block;
        (rows * self.row_bytes() + SHARED_BESIDE_TILES) as u32
    }
}

fn select_tile(request: &KernelRequest<'_>, _: &Target) -> TileSelection {
    let Op::AttentionBackward(op) = request.op else { unreachable!("`reject` refuses others") };
    let (preferred, others) = Shape::of(op.heads.head_dim).expect("`reject` refuses others");
    let tile = preferred.tile();
    let reason = |shape: Shape| (shape.tile(), format!("no GPU has timed it, nor {tile}"));
    TileSelection { tile, rejected: others.into_iter().map(reason).collect() }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AttentionBackward(op) = request.op else {
        return Some("takes `attention_backward`".to_string());
    };
    let dq = request.input_count;
    reject_values(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, 3, 4, dq, dq + 1, dq + 2]))
        .or_else(|| reject_heads(&op.heads, &request.operands[backward::LSE].shape))
        .or_else(|| reject_width(op.heads.head_dim))
}

/// Reason for refusing wide heads.
fn reject_width(head_dim: usize) -> Option<String> {
    let most = SHAPES[SHAPES.len() - 1].head_dim;
    (head_dim > most).then(|| format!("takes heads of at most {most} elements, not of {head_dim}"))
}

/// Share of the peak on an H200 with sequences of 2048 tokens and more: 0.32 to 0.36 with heads of
/// 64, 0.34 to 0.46 with heads of 128 (benchmarks/sm90_attention_2026-11-23.md).
const SHARE: f64 = 0.36;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

/// Rows of statistics, padded per sequence and head.
pub(super) fn statistics_rows(lse: &[usize]) -> usize {
    let [batch, heads, seq] = [0, 1, 2].map(|axis| lse[axis]);
    batch * heads * seq.next_multiple_of(TILE_ROWS)
}

/// Workspace of each row's delta and lse in powers of two.
fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    statistics_rows(&request.operands[backward::LSE].shape) * STATISTICS * size_of::<f32>()
}

/// Least number of heads of a section, for `tiles` tiles per head: with fewer heads, the longest
/// tiles of the last section would delay the end of the kernel.
pub(super) fn least_section(tiles: usize, sms: usize, heads: usize) -> usize {
    const TILES_PER_SM: usize = 4;
    (TILES_PER_SM * sms).div_ceil(tiles).min(heads)
}

/// The launch that computes lse in powers of two and delta of each row.
pub(super) fn launch_rows(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    heads: &AttentionHeads,
    [lse_log2, delta]: [DevicePtr; 2],
) -> Result<Step, KernelError> {
    let [dout, out, lse] = [0, 4, 5].map(|index| call.input(index));
    let (lanes, rows_of_cta) = if heads.head_dim <= 64 { ("d64", 64) } else { ("d128", 32) };
    let name = format!("sm90_attention_backward_rows_{lanes}");
    let function = device.function("sm90_attention_backward", &name, 0)?;
    let mut arguments = [&dout, &out, &lse].map(DeviceTensor::argument).to_vec();
    arguments.extend([lse_log2, delta].map(Argument::Pointer));
    let [.., of_out] = OperandHeads::of(heads);
    let sizes_of_rows = [lse.shape[2], of_out.of_token(), heads.head_dim];
    arguments.extend(sizes_of_rows.map(|size| Argument::U32(size as u32)));
    let ctas = (statistics_rows(&lse.shape) / rows_of_cta) as u32;
    Ok(Device::launch(function, ctas, STATISTICS_THREADS, 0, arguments))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AttentionBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `attention_backward`"));
    };
    let [dout, q, k, v, lse] = [0, 1, 2, 3, 5].map(|index| call.input(index));
    let [dq, dk, dv] = [0, 1, 2].map(|index| call.output(index));
    let sizes = Sizes::new(&op.heads, &lse.shape);
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let Some((preferred, others)) = Shape::of(sizes.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", sizes.head_dim)));
    };
    let tile = call.call.choice.tile;
    let mut shapes = others.into_iter().chain([preferred]);
    let Some(shape) = shapes.find(|shape| Some(shape.tile()) == tile) else {
        let got = tile.map_or("none".to_string(), |tile| tile.to_string());
        let accepted = preferred.tile();
        return Err(call.refuse(format!("takes a tile such as {accepted}, not {got}; plan again")));
    };
    let (heads, kv_heads, batch) = (sizes.heads, sizes.kv_heads, lse.shape[0]);
    let lse_log2 = call.workspace().0;
    let delta = lse_log2.offset(statistics_rows(&lse.shape) * size_of::<f32>());
    let statistics = [lse_log2, delta].map(Argument::Pointer);

    let tiles = sizes.seq.div_ceil(TILE_ROWS);
    let (key_heads, group) = (sizes.key_heads(), heads / kv_heads);
    let l2_bytes = device.driver.properties().l2_bytes;
    let sms = device.sm_count() as usize;
    let rows = launch_rows(call, device, &op.heads, [lse_log2, delta])?;

    let is_extended = op.heads.extension().is_some();
    let ends = if is_extended { "_extended" } else { "" };
    let seen = [window_argument(&op.heads, sizes.seq), documents_argument(call, &op.heads, 6)];
    let mut launch = |of: String, shared: u32, maps: Vec<TensorMapSpec>, tiles: usize, section| {
        let name = format!("sm90_attention_backward_{of}{ends}");
        let function = device.function("sm90_attention_backward", &name, shared)?;
        let mut arguments = Vec::with_capacity(19);
        for map in maps {
            arguments.push(Argument::TensorMap(device.tensor_map(&map)?));
        }
        arguments.extend(statistics);
        arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
        arguments.extend(
            [sizes.seq, heads, kv_heads, batch, section].map(|size| Argument::U32(size as u32)),
        );
        arguments.push(Argument::U32(op.heads.causal.into()));
        arguments.push(Argument::F32(op.heads.scale as f32));
        arguments.push(Argument::F32(scale_log2(&op.heads)));
        arguments.extend(seen);
        // Persistent CTAs loop over tiles.
        let ctas = tiles.min(device.sm_count() as usize) as u32;
        Ok::<_, KernelError>(Device::launch(function, ctas, THREADS, shared, arguments))
    };
    let [of_q, of_k, of_v, of_out] = OperandHeads::of(&op.heads);
    let boxes = |tensor, of_tensor, rows| head_boxes(tensor, &sizes, of_tensor, rows);
    let [stage_queries, ..] = shape.keys;
    let keys = launch(
        format!("keys_d{}_{stage_queries}", shape.head_dim),
        shape.key_bytes(),
        vec![
            boxes(&dout, of_out, stage_queries),
            boxes(&q, of_q, stage_queries),
            boxes(&k, of_k, TILE_ROWS),
            boxes(&v, of_v, TILE_ROWS),
            boxes(&dk, of_k, WAVE_ROWS),
            boxes(&dv, of_v, WAVE_ROWS),
        ],
        tiles * key_heads,
        // The group's queries and dout are streamed.
        sizes.section(key_heads, 2 * group, l2_bytes).max(least_section(tiles, sms, key_heads)),
    )?;
    let [stage_keys, ..] = shape.queries;
    let queries = launch(
        format!("queries_d{}_{stage_keys}", shape.head_dim),
        shape.query_bytes(),
        vec![
            boxes(&dout, of_out, TILE_ROWS),
            boxes(&q, of_q, TILE_ROWS),
            boxes(&k, of_k, stage_keys),
            boxes(&v, of_v, stage_keys),
            boxes(&dq, of_q, WAVE_ROWS),
        ],
        tiles * sizes.batch_heads,
        // Sections of whole groups, whose heads share keys and values.
        sizes.section(key_heads, 2, l2_bytes).max(least_section(tiles * group, sms, key_heads))
            * group,
    )?;
    let mut steps = vec![rows, keys, queries];
    if op.heads.sinks {
        steps.push(sink_gradients(call, device, delta, sizes.seq.next_multiple_of(TILE_ROWS), 1)?);
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_backward.cu");
        for (head_dim, expected) in [
            (8, [(134_400, 165_120), (134_400, 132_352)].as_slice()),
            (64, &[(134_400, 165_120), (134_400, 132_352)]),
            (72, &[(232_192, 230_656)]),
            (128, &[(232_192, 230_656), (232_192, 197_888)]),
        ] {
            let (preferred, others) = Shape::of(head_dim).unwrap();
            let shapes: Vec<_> = [preferred].into_iter().chain(others).collect();
            let bytes: Vec<_> =
                shapes.iter().map(|shape| (shape.key_bytes(), shape.query_bytes())).collect();
            assert_eq!(bytes, expected, "{head_dim}");
            for shape in shapes {
                assert!(shape.key_bytes().max(shape.query_bytes()) <= 227 << 10);
                let width = shape.head_dim;
                for (of, [block, slots, stages]) in
                    [("KEYS", shape.keys), ("QUERIES", shape.queries)]
                {
                    let line =
                        format!("{of}(d{width}_{block}, {width}, {block}, {slots}, {stages})");
                    assert!(source.contains(&line), "{line}");
                }
            }
        }
        assert_eq!(Shape::of(136), None);
    }

    #[test]
    fn sections_have_tiles_for_every_sm() {
        // (tiles per head, heads, expected)
        for (tiles, heads, expected) in [(16, 32, 32), (16, 64, 33), (64, 32, 9), (1000, 8, 1)] {
            assert_eq!(least_section(tiles, 132, heads), expected, "{tiles} {heads}");
        }
    }

    #[test]
    fn statistics_are_padded_by_sequence() {
        for (lse, expected) in
            [([2, 3, 0], 0), ([1, 1, 1], 128), ([2, 3, 128], 768), ([2, 3, 129], 1536)]
        {
            assert_eq!(statistics_rows(&lse), expected, "{lse:?}");
        }
    }
}
