//! `sm90_mxfp8_gemm.cu`: GEMMs of MXFP8 matrices at granularity 128, on wgmma.
//!
//! Operands are in the layout of quantization: elements by rows, and scales in tiles of 128 rows by
//! 128 elements. FP32 sums need one scale per 128 elements along K, because wgmma has no block
//! scales.

use deepwell_ir::{KernelRequest, Op, Target, Tile};

use super::operand;
use super::sm100_mxfp8_gemm;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{Argument, DevicePtr, Launch};
use crate::runtime::cuda::launch::tcgen05::GemmSizes;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, scale_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};
use crate::runtime::predict::mma_sync_gemm;

/// Threads of a CTA, as in the source.
pub(crate) const THREADS: u32 = 384;
/// K of a stage; its elements share a scale.
pub(crate) const STAGE_K: usize = 128;
/// Columns of every tile.
pub(crate) const TILE_COLUMNS: usize = 128;
const SCALE_TILE_ROWS: usize = 128;
const SCALE_TILE_BYTES: usize = 512;
/// Limit of a CTA's shared memory, and the part not used by stages: alignment, barriers, and a
/// staging buffer for the results of each consumer warp.
pub(crate) const SHARED_LIMIT: usize = 227 << 10;
pub(crate) const SHARED_BESIDE_STAGES: usize = shared_beside_stages(16 * 128);

const fn shared_beside_stages(staged_warp_bytes: usize) -> usize {
    1024 + 8 * staged_warp_bytes + 256
}

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_mxfp8_gemm", &["scaled_gemm"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    if let Op::ScaledGemm(op) = request.op {
        for (name, format) in [("a", op.a), ("b", op.b)] {
            let elements = usize::from(format.block.k);
            if elements != STAGE_K {
                return Some(format!(
                    "takes one scale for {STAGE_K} elements, `{name}` has one for {elements}"
                ));
            }
        }
    }
    sm100_mxfp8_gemm::reject(request)
}

/// Shares of the FP8 peak that whole waves of tiles reach, measured on an H200: 1058 to 1112
/// TFLOP/s in fprop and dgrad, 749 to 794 in wgrad, where scales change with every column
/// (`benchmarks/sm90_gemms_2026-11-24.md`).
const SHARE: f64 = 0.52;
const WGRAD_SHARE: f64 = 0.39;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let share = match request.op {
        Op::ScaledGemm(op) if op.b.block.is_square() => SHARE,
        _ => WGRAD_SHARE,
    };
    mma_sync_gemm(request, target, share)
}

/// Bytes per cycle that an SM reads from shared memory, or writes to it.
const SHARED_BYTES_PER_CYCLE: usize = 128;
/// Bytes per cycle and requesting SM from the L2 cache: assumed. With 32, clusters would be the
/// fastest, contrary to measurements on an H200.
const L2_BYTES_PER_CYCLE: usize = 64;
/// Cycles of the tensor cores for 64 rows, 128 columns and a stage, at 8192 FLOP per cycle.
const WAVE_CYCLES: usize = 2 * 64 * TILE_COLUMNS * STAGE_K / 8192;
/// Time of a tile of 256 rows in clusters of two, as a ratio to single CTAs, measured on an H200
/// (`benchmarks/sm90_mxfp8_gemm_2026-11-23.md`). With 128 rows it is 1.5.
const MULTICAST_CYCLES: (usize, usize) = (5, 4);
/// Cycles for storing 64 rows of 128 results: assumed.
const RESULT_CYCLES: usize = 500;

/// A tile, and the cluster of CTAs with one tile each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    /// Waves of 64 rows per consumer, for two consumers.
    pub(crate) waves: usize,
    /// CTAs side by side along N, which share rows of `a`.
    pub(crate) across: usize,
}

/// In order of preference, for equal predictions.
const SHAPES: [TileShape; 4] = [
    TileShape { waves: 2, across: 2 },
    TileShape { waves: 2, across: 1 },
    TileShape { waves: 1, across: 2 },
    TileShape { waves: 1, across: 1 },
];

impl TileShape {
    pub(crate) fn rows(self) -> usize {
        self.waves * 128
    }

    /// Rows of `a` that a CTA copies for all CTAs that share the rows.
    fn copied_rows(self) -> usize {
        self.rows() / self.across
    }

    fn tile(self) -> Tile {
        let tile = Tile::new(self.rows(), TILE_COLUMNS, STAGE_K);
        Tile { cluster: [1, self.across], ..tile }
    }

    /// Name in kernels' names.
    fn name(self) -> String {
        let tile = format!("{}x{TILE_COLUMNS}", self.rows());
        if self.across == 1 { tile } else { format!("{tile}_1x{}", self.across) }
    }

    fn scale_bytes(self) -> usize {
        (self.rows() / SCALE_TILE_ROWS + 1) * SCALE_TILE_BYTES
    }

    fn stage_bytes(self) -> usize {
        (self.rows() + TILE_COLUMNS) * STAGE_K + self.scale_bytes()
    }

    /// Bytes per stage of the factors that kernels with one scale per column compute: two bytes per
    /// column, with padding, four bytes per row, and a word, rounded up to the alignment of boxes.
    fn factor_bytes(self) -> usize {
        let of_columns = (TILE_COLUMNS + 32) * size_of::<u16>();
        (of_columns + (self.rows() + 1) * size_of::<f32>()).next_multiple_of(128)
    }

    /// Dynamic shared memory, with as many stages as fit.
    pub(crate) fn shared_bytes(self) -> u32 {
        self.shared_bytes_beside(SHARED_BESIDE_STAGES)
    }

    /// Dynamic shared memory with a staging buffer of this size per consumer warp.
    pub(crate) fn shared_bytes_staging(self, staged_warp_bytes: usize) -> u32 {
        self.shared_bytes_beside(shared_beside_stages(staged_warp_bytes))
    }

    fn shared_bytes_beside(self, beside: usize) -> u32 {
        let of_stage = self.stage_bytes() + self.factor_bytes();
        let stages = (SHARED_LIMIT - beside) / of_stage;
        (beside + stages * of_stage) as u32
    }

    fn clusters(self, sizes: GemmSizes) -> usize {
        sizes.m.div_ceil(self.rows()) * sizes.n.div_ceil(self.across * TILE_COLUMNS)
    }

    /// Clusters that run concurrently.
    fn clusters_at_once(self, sms: usize) -> usize {
        (sms / self.across).max(1)
    }

    /// Modeled cycles of a GEMM: a stage takes the slowest of tensor cores, shared memory and the
    /// L2 cache; tiles are sequential, including their stores.
    fn cycles(self, sizes: GemmSizes, sms: usize) -> usize {
        // 64 rows for each of two consumers; wgmma reads both operands of each wave.
        let waves = 2 * self.waves;
        let read_bytes = waves * (64 + TILE_COLUMNS) * STAGE_K;
        let copied_bytes = (self.copied_rows() + TILE_COLUMNS) * STAGE_K + self.scale_bytes();
        let stage_cycles = (waves * WAVE_CYCLES)
            .max((read_bytes + self.stage_bytes()) / SHARED_BYTES_PER_CYCLE)
            .max(copied_bytes / L2_BYTES_PER_CYCLE);
        let tile_cycles = sizes.k.div_ceil(STAGE_K) * stage_cycles + self.waves * RESULT_CYCLES;
        let cycles = self.clusters(sizes).div_ceil(self.clusters_at_once(sms)) * tile_cycles;
        if self.across == 1 { cycles } else { cycles * MULTICAST_CYCLES.0 / MULTICAST_CYCLES.1 }
    }
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let sizes = sm100_mxfp8_gemm::sizes_of(request);
    let mut ranked = SHAPES.map(|shape| (shape.cycles(sizes, target.workers), shape));
    ranked.sort_by_key(|&(cycles, _)| cycles);
    let [(fewest, chosen), others @ ..] = ranked;
    let name = chosen.tile();
    let reason = |cycles: usize| match cycles > fewest {
        true => format!("takes {cycles} cycles by a model, {name} takes {fewest}"),
        false => format!("is as good as {name} by a model"),
    };
    let rejected = others.map(|(cycles, shape)| (shape.tile(), reason(cycles)));
    TileSelection { tile: name, rejected: rejected.to_vec() }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ScaledGemm(op) = &call.call.op else {
        return Err(call.refuse(format!("expected scaled_gemm, got {}", call.call.op.name())));
    };
    let (a, b, out) = (call.input(operand::A), call.input(operand::B), call.output(0));
    let sizes = sm100_mxfp8_gemm::sizes(&a.shape, &b.shape);
    let tile = call.call.choice.tile;
    let Some(shape) = SHAPES.into_iter().find(|shape| Some(shape.tile()) == tile) else {
        let tiles = SHAPES.map(|shape| shape.tile().to_string()).join(", ");
        let got = tile.map_or("none".to_string(), |tile| tile.to_string());
        return Err(call.refuse(format!("takes a tile of {tiles}, not {got}; plan again")));
    };
    let element = if out.dtype == deepwell_ir::DType::Bf16 { "bf16" } else { "f32" };
    let scales = if op.b.block.is_square() { "squares" } else { "rows" };
    let name = format!("sm90_mxfp8_gemm_{element}_{scales}_{}", shape.name());
    let function = device.function("sm90_mxfp8_gemm", &name, shape.shared_bytes())?;
    let boxes = [
        k_major_boxes(&a, Operands::Mx, shape.copied_rows()),
        scale_boxes(&call.input(operand::A_SCALES)),
        k_major_boxes(&b, Operands::Mx, TILE_COLUMNS),
        scale_boxes(&call.input(operand::B_SCALES)),
    ];
    let mut arguments = Vec::with_capacity(10);
    for boxes in boxes {
        arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
    }
    let bias = if op.bias { call.input(operand::BIAS).pointer } else { DevicePtr(0) };
    arguments.extend([
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(sizes.m as i32),
        Argument::I32(sizes.n as i32),
        Argument::I32(sizes.k as i32),
        Argument::U32(call.accumulate().into()),
    ]);
    let at_once = shape.clusters_at_once(device.sm_count() as usize);
    let ctas = shape.clusters(sizes).min(at_once) * shape.across;
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [ctas as u32, 1, 1],
        block: [THREADS, 1, 1],
        cluster: [shape.across as u32, 1, 1],
        shared_bytes: shape.shared_bytes(),
        programmatic: false,
        arguments,
    })])
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: usize = 132;

    fn sizes((m, n, k): (usize, usize, usize)) -> GemmSizes {
        GemmSizes { m, n, k }
    }

    #[test]
    fn stages_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_mxfp8_gemm.cu");
        for (shape, name, shared_bytes, copied_rows) in [
            (SHAPES[0], "256x128_1x2", 226_048, 128),
            (SHAPES[1], "256x128", 226_048, 256),
            (SHAPES[2], "128x128_1x2", 225_792, 64),
            (SHAPES[3], "128x128", 225_792, 128),
        ] {
            assert_eq!(shape.name(), name);
            assert_eq!(shape.shared_bytes(), shared_bytes, "{name}");
            assert_eq!(shape.copied_rows(), copied_rows, "{name}");
            let line = format!("GEMMS({name}, {}, {})", shape.waves, shape.across);
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn tiles_fill_the_device() {
        for (gemm, expected) in [
            ((16384, 2048, 2048), "256x128"),
            ((4096, 4096, 4096), "256x128"),
            // Waves that larger tiles would not fill.
            ((1024, 2048, 2048), "128x128"),
            // One tile.
            ((1, 1, 128), "128x128"),
        ] {
            let mut shapes = SHAPES;
            shapes.sort_by_key(|shape| shape.cycles(sizes(gemm), H200));
            assert_eq!(shapes[0].name(), expected, "{gemm:?}");
        }
    }
}
