//! `sm90_bf16_gemm.cu`: the three GEMMs of a linear layer, on wgmma.

use deepwell_ir::{KernelRequest, Op, Target, Tile};

use super::sm100_bf16_gemm::{Form, reject};
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr, Launch, TensorMap};
use crate::cuda::launch::gemm::LinearSizes;
use crate::cuda::launch::tcgen05::{GemmSizes, Operands, k_major_boxes, mn_major_boxes};
use crate::cuda::prepare::{CallView, Device, DeviceTensor, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, TileSelection, no_workspace};
use crate::epilogue::no_epilogue;
use crate::ops::scaled_gemm::sm90_mxfp8_gemm::{SHARED_BESIDE_STAGES, SHARED_LIMIT, THREADS};
use crate::predict::{MMA_SYNC_BF16, mma_sync_gemm};

/// Elements along K of a stage, as in the source.
const STAGE_K: usize = 64;
/// Rows of a box of a K-major operand, as in the source.
const BOX_ROWS: usize = 128;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_sm90_bf16_gemm",
    ops: &["linear", "linear_input_grad", "linear_weight_grad"],
    epilogue: no_epilogue,
    architectures: &[Architecture::Sm90a],
    library: None,
    reject,
    predict,
    workspace_bytes: no_workspace,
    select_tile: Some(select_tile),
    prepare,
}];

/// No GPU has timed it. Until one has, it is said to take twice what the slowest kernel takes that
/// takes all that it takes: nothing that has been timed gives way to a model.
const UNTIMED: f64 = 2.0;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    UNTIMED * mma_sync_gemm(request, target, MMA_SYNC_BF16)
}

/// Bytes that an SM reads of shared memory, or writes there, in a cycle.
const SHARED_BYTES_PER_CYCLE: usize = 128;
/// Bytes that the L2 cache gives in a cycle for each SM that asks: assumed, as for MXFP8.
const L2_BYTES_PER_CYCLE: usize = 64;
/// FLOP of the tensor cores of an SM in a cycle.
const FLOP_PER_CYCLE: usize = 4096;
/// Cycles in which 64 rows of 128 results are written: assumed, as for MXFP8.
const RESULT_CYCLES: usize = 500;

/// A tile and the cluster of which each CTA has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileShape {
    /// 64 rows for each of two consumers.
    waves: usize,
    columns: usize,
    /// CTAs one below the other, which share columns of `b`.
    down: usize,
}

/// Preferred ones first among equals.
const SHAPES: [TileShape; 4] = [
    TileShape { waves: 1, columns: 256, down: 1 },
    TileShape { waves: 1, columns: 256, down: 2 },
    TileShape { waves: 2, columns: 128, down: 1 },
    TileShape { waves: 1, columns: 128, down: 1 },
];

impl TileShape {
    fn rows(self) -> usize {
        self.waves * 128
    }

    fn tile(self) -> Tile {
        let tile = Tile::new(self.rows(), self.columns, STAGE_K);
        Tile { cluster: [self.down, 1], ..tile }
    }

    /// As kernels' names have it.
    fn name(self) -> String {
        let tile = format!("{}x{}", self.rows(), self.columns);
        if self.down == 1 { tile } else { format!("{tile}_{}x1", self.down) }
    }

    fn stage_bytes(self) -> usize {
        (self.rows() + self.columns) * STAGE_K * 2
    }

    /// Dynamic shared memory: as many stages as fit.
    fn shared_bytes(self) -> u32 {
        let stages = (SHARED_LIMIT - SHARED_BESIDE_STAGES) / self.stage_bytes();
        (SHARED_BESIDE_STAGES + stages * self.stage_bytes()) as u32
    }

    fn clusters(self, sizes: GemmSizes) -> usize {
        sizes.m.div_ceil(self.down * self.rows()) * sizes.n.div_ceil(self.columns)
    }

    /// Clusters that run at the same time.
    fn clusters_at_once(self, sms: usize) -> usize {
        (sms / self.down).max(1)
    }

    /// Cycles of a GEMM, by a model: of a stage those of the slowest of tensor cores, shared memory
    /// and the L2 cache; tile after tile, each of which is then written.
    fn cycles(self, sizes: GemmSizes, sms: usize) -> usize {
        // Each wgmma has 64 rows and reads both operands.
        let read_bytes = 2 * self.waves * (64 + self.columns) * STAGE_K * 2;
        let copied_bytes = (self.rows() + self.columns / self.down) * STAGE_K * 2;
        let stage_cycles = (2 * self.rows() * self.columns * STAGE_K / FLOP_PER_CYCLE)
            .max((read_bytes + self.stage_bytes()) / SHARED_BYTES_PER_CYCLE)
            .max(copied_bytes / L2_BYTES_PER_CYCLE);
        let results = self.waves * self.columns / 128 * RESULT_CYCLES;
        let tile_cycles = sizes.k.div_ceil(STAGE_K) * stage_cycles + results;
        self.clusters(sizes).div_ceil(self.clusters_at_once(sms)) * tile_cycles
    }
}

fn form_of(request: &KernelRequest<'_>) -> Form {
    let [first, second] = [0, 1].map(|index| &request.operands[index].shape);
    Form::new(request.op, LinearSizes::new(request.op, first, second))
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let sizes = form_of(request).sizes;
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
    let op = &call.call.op;
    let (a, b, out) = (call.input(0), call.input(1), call.output(0));
    let form = Form::new(op, LinearSizes::new(op, &a.shape, &b.shape));
    let sizes = form.sizes;
    let tile = call.call.choice.tile;
    let Some(shape) = SHAPES.into_iter().find(|shape| Some(shape.tile()) == tile) else {
        let known = SHAPES.map(|shape| shape.tile().to_string()).join(", ");
        let got = tile.map_or("none".to_string(), |tile| tile.to_string());
        return Err(call.refuse(format!("takes a tile of {known}, not {got}; plan again")));
    };
    let name = format!("sm90_bf16_gemm_{}_{}", form.name, shape.name());
    let function = device.function("sm90_bf16_gemm", &name, shape.shared_bytes())?;
    let mut map = |tensor: &DeviceTensor, is_k_major: bool| -> Result<TensorMap, KernelError> {
        let boxes = match is_k_major {
            true => k_major_boxes(tensor, Operands::Bf16, BOX_ROWS),
            false => mn_major_boxes(tensor, Operands::Bf16),
        };
        device.tensor_map(&boxes)
    };
    let (a_map, b_map) = (map(&a, form.a_k_major)?, map(&b, form.b_k_major)?);
    let bias = match op {
        Op::Linear(linear) if linear.bias => call.input(2).pointer,
        _ => DevicePtr(0),
    };
    let arguments = vec![
        Argument::TensorMap(a_map),
        Argument::TensorMap(b_map),
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(sizes.m as i32),
        Argument::I32(sizes.n as i32),
        Argument::I32(sizes.k as i32),
        Argument::U32(call.accumulate().into()),
    ];
    let at_once = shape.clusters_at_once(device.sm_count() as usize);
    let ctas = shape.clusters(sizes).min(at_once) * shape.down;
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [ctas as u32, 1, 1],
        block: [THREADS, 1, 1],
        cluster: [shape.down as u32, 1, 1],
        shared_bytes: shape.shared_bytes(),
        programmatic: false,
        arguments,
    })])
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: usize = 132;

    #[test]
    fn stages_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_bf16_gemm.cu");
        for (shape, name, stages) in [
            (SHAPES[0], "128x256", 4),
            (SHAPES[1], "128x256_2x1", 4),
            (SHAPES[2], "256x128", 4),
            (SHAPES[3], "128x128", 6),
        ] {
            let TileShape { waves, columns, down } = shape;
            assert_eq!(shape.name(), name);
            let bytes = SHARED_BESIDE_STAGES + stages * shape.stage_bytes();
            assert_eq!(shape.shared_bytes() as usize, bytes, "{name}");
            let line = format!("GEMMS({name}, {waves}, {columns}, {down})");
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn tiles_fill_the_device() {
        for ((m, n, k), expected) in [
            ((16384, 2048, 2048), "128x256"),
            ((4096, 4096, 4096), "128x256"),
            // Waves that larger tiles would not fill.
            ((1024, 2048, 2048), "128x128"),
            // One tile.
            ((1, 1, 128), "128x128"),
        ] {
            let mut shapes = SHAPES;
            shapes.sort_by_key(|shape| shape.cycles(GemmSizes { m, n, k }, H200));
            assert_eq!(shapes[0].name(), expected, "{m} {n} {k}");
        }
    }
}
