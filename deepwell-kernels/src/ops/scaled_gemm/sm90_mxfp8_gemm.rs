//! `sm90_mxfp8_gemm.cu`: GEMMs of MXFP8 matrices at granularity 128, on wgmma.
//!
//! Operands are what quantizing gives: elements by rows, and scales in tiles of 128 rows by 128
//! elements. One scale for 128 elements along K is what sums in FP32 need: wgmma knows none.

use deepwell_ir::{KernelRequest, Op, Target, Tile};

use super::sm100_mxfp8_gemm;
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr, Launch};
use crate::cuda::launch::tcgen05::{GemmSizes, Operands, k_major_boxes, scale_boxes};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, TileSelection, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::{MMA_SYNC_MXFP8, mma_sync_gemm};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 384;
/// Elements along K of a stage, which share a scale.
const STAGE_K: usize = 128;
const SCALE_TILE_ROWS: usize = 128;
const SCALE_TILE_BYTES: usize = 512;
/// Shared memory of a CTA, and what of it is not for stages: room to align them, results on their
/// way out, barriers.
const SHARED_LIMIT: usize = 227 << 10;
const SHARED_BESIDE_STAGES: usize = 1024 + 8 * 16 * 128 + 256;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_sm90_mxfp8_gemm",
    ops: &["scaled_gemm"],
    epilogue: no_epilogue,
    architectures: &[Architecture::Sm90a],
    library: None,
    reject,
    predict,
    workspace_bytes: no_workspace,
    select_tile: Some(select_tile),
    prepare,
}];

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

/// No GPU has timed it. Until one has, it is said to take twice what the slowest kernel takes that
/// has been timed and takes all that it takes: nothing that has been timed gives way to a model.
const UNTIMED: f64 = 2.0;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    UNTIMED * mma_sync_gemm(request, target, MMA_SYNC_MXFP8)
}

/// Bytes that an SM reads of shared memory, or writes there, in a cycle.
const SHARED_BYTES_PER_CYCLE: usize = 128;
/// Bytes that the L2 cache gives in a cycle for each SM that asks: 7.5 TB/s at 1.4 GHz, what tiles of
/// 128 x 128 took on an H200.
const L2_BYTES_PER_CYCLE: usize = 40;
/// Bytes that an SM reads in a cycle of the shared memory of others: assumed.
const CLUSTER_BYTES_PER_CYCLE: usize = 24;
/// FLOP of the tensor cores in a cycle.
const FLOP_PER_CYCLE: usize = 8192;
/// Rows of a consumer's wgmma.
const WAVE_ROWS: usize = 64;
/// Cycles in which a tile's first stage is copied, and in which 64 rows of 128 results are written:
/// assumed.
const FILL_CYCLES: usize = 1000;
const RESULT_CYCLES: usize = 400;

/// A tile and the cluster of which each CTA has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileShape {
    rows: usize,
    columns: usize,
    /// CTAs one below the other, which share rows of `b`, and side by side, which share rows of `a`.
    cluster: [usize; 2],
    /// CTAs of a cluster that share out K, if it is not 1.
    parts: usize,
}

const fn shape(rows: usize, columns: usize, cluster: [usize; 2], parts: usize) -> TileShape {
    TileShape { rows, columns, cluster, parts }
}

/// Preferred ones first among equals.
const SHAPES: [TileShape; 4] = [
    shape(128, 256, [2, 1], 1),
    shape(128, 256, [1, 1], 1),
    shape(128, 128, [1, 1], 1),
    shape(128, 256, [1, 1], 8),
];

impl TileShape {
    fn ctas(self) -> usize {
        self.cluster.iter().product::<usize>() * self.parts
    }

    /// Rows of `a` and of `b` that a CTA copies for all that share them.
    fn copied_rows(self) -> [usize; 2] {
        let [down, across] = self.cluster;
        [self.rows / across, self.columns / down]
    }

    fn tile(self) -> Tile {
        let tile = Tile::new(self.rows, self.columns, STAGE_K);
        Tile { cluster: self.cluster, k_parts: self.parts, ..tile }
    }

    /// As kernels' names have it.
    fn name(self) -> String {
        let tile = format!("{}x{}", self.rows, self.columns);
        match (self.cluster, self.parts) {
            ([1, 1], 1) => tile,
            ([1, 1], parts) => format!("{tile}_k{parts}"),
            ([down, across], _) => format!("{tile}_{down}x{across}"),
        }
    }

    fn scale_bytes(self) -> usize {
        (self.rows + self.columns) / SCALE_TILE_ROWS * SCALE_TILE_BYTES
    }

    fn stage_bytes(self) -> usize {
        (self.rows + self.columns) * STAGE_K + self.scale_bytes()
    }

    /// Dynamic shared memory: as many stages as fit.
    fn shared_bytes(self) -> u32 {
        let stages = (SHARED_LIMIT - SHARED_BESIDE_STAGES) / self.stage_bytes();
        (SHARED_BESIDE_STAGES + stages * self.stage_bytes()) as u32
    }

    fn clusters(self, sizes: GemmSizes) -> usize {
        let [down, across] = self.cluster;
        sizes.m.div_ceil(down * self.rows) * sizes.n.div_ceil(across * self.columns)
    }

    /// Clusters that run at the same time.
    fn clusters_at_once(self, sms: usize) -> usize {
        (sms / self.ctas()).max(1)
    }

    /// Bytes that wgmma and the loads of fragments read of shared memory for a stage.
    fn read_bytes(self) -> usize {
        // Each consumer reads its rows of `a` once, and all of `b`.
        (self.rows + self.rows / WAVE_ROWS * self.columns) * STAGE_K
    }

    /// Cycles of a GEMM, by a model: of a stage those of the slowest of tensor cores, shared memory
    /// and the L2 cache; tile after tile, each of which is then written.
    fn cycles(self, sizes: GemmSizes, sms: usize) -> usize {
        let copied_bytes =
            self.copied_rows().iter().sum::<usize>() * STAGE_K + self.scale_bytes();
        let stage_cycles = (2 * self.rows * self.columns * STAGE_K / FLOP_PER_CYCLE)
            .max((self.read_bytes() + self.stage_bytes()) / SHARED_BYTES_PER_CYCLE)
            .max(copied_bytes / L2_BYTES_PER_CYCLE);
        let result_cycles = self.rows * self.columns / (WAVE_ROWS * 128) * RESULT_CYCLES / 2;
        let exchange_cycles = match self.parts {
            1 => 0,
            _ => self.rows * self.columns * size_of::<f32>() / CLUSTER_BYTES_PER_CYCLE,
        };
        let stages = sizes.k.div_ceil(STAGE_K).div_ceil(self.parts);
        let tile_cycles = stages * stage_cycles + result_cycles + exchange_cycles;
        let tiles = self.clusters(sizes).div_ceil(self.clusters_at_once(sms));
        FILL_CYCLES + tiles * tile_cycles
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
    let (a, b, out) = (call.input(0), call.input(2), call.output(0));
    let sizes = sm100_mxfp8_gemm::sizes(&a.shape, &b.shape);
    let tile = call.call.choice.tile;
    let Some(shape) = SHAPES.into_iter().find(|shape| Some(shape.tile()) == tile) else {
        let known = SHAPES.map(|shape| shape.tile().to_string()).join(", ");
        let got = tile.map_or("none".to_string(), |tile| tile.to_string());
        return Err(call.refuse(format!("takes a tile of {known}, not {got}; plan again")));
    };
    let element = if out.dtype == deepwell_ir::DType::Bf16 { "bf16" } else { "f32" };
    let scales = if op.b.block.is_square() { "squares" } else { "rows" };
    let name = format!("sm90_mxfp8_gemm_{element}_{scales}_{}", shape.name());
    let function = device.function("sm90_mxfp8_gemm", &name, shape.shared_bytes())?;
    let [a_rows, b_rows] = shape.copied_rows();
    let boxes = [
        k_major_boxes(&a, Operands::Mx, a_rows),
        scale_boxes(&call.input(1)),
        k_major_boxes(&b, Operands::Mx, b_rows),
        scale_boxes(&call.input(3)),
    ];
    let mut arguments = Vec::with_capacity(10);
    for boxes in boxes {
        arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
    }
    let bias = if op.bias { call.input(4).pointer } else { DevicePtr(0) };
    arguments.extend([
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(sizes.m as i32),
        Argument::I32(sizes.n as i32),
        Argument::I32(sizes.k as i32),
        Argument::U32(call.accumulate().into()),
    ]);
    // CTAs that share out K compute one tile.
    let at_once = match shape.parts {
        1 => shape.clusters_at_once(device.sm_count() as usize),
        _ => usize::MAX,
    };
    let ctas = shape.clusters(sizes).min(at_once) * shape.ctas();
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [ctas as u32, 1, 1],
        block: [THREADS, 1, 1],
        cluster: [shape.ctas() as u32, 1, 1],
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
            (SHAPES[0], "128x256_2x1", 220_416, [128, 128]),
            (SHAPES[1], "128x256", 220_416, [128, 256]),
            (SHAPES[2], "128x128", 220_416, [128, 128]),
            (SHAPES[3], "128x256_k8", 220_416, [128, 256]),
        ] {
            assert_eq!(shape.name(), name);
            assert_eq!(shape.shared_bytes(), shared_bytes, "{name}");
            assert_eq!(shape.copied_rows(), copied_rows, "{name}");
            let TileShape { rows, columns, cluster: [down, across], parts } = shape;
            let line = format!("GEMMS({name}, {rows}, {columns}, {down}, {across}, {parts})");
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn tiles_fill_the_device() {
        for (gemm, expected) in [
            ((16384, 2048, 2048), "128x256_2x1"),
            ((4096, 4096, 4096), "128x256_2x1"),
            // Waves that larger tiles would not fill.
            ((1024, 2048, 2048), "128x128"),
            // Few tiles of long sums.
            ((256, 2048, 16384), "128x256_k8"),
            // One tile.
            ((1, 1, 128), "128x128"),
        ] {
            let mut shapes = SHAPES;
            shapes.sort_by_key(|shape| shape.cycles(sizes(gemm), H200));
            assert_eq!(shapes[0].name(), expected, "{gemm:?}");
        }
    }
}
