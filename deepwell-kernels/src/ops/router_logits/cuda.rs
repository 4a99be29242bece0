//! `router_logits.cu`: the projection of a router in FP32, and its backward.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::extents_fit;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{MMA_SYNC_BF16, Rates};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Rows and columns of a tile of logits, and of a tile of the inputs' gradient.
const TILE: [usize; 2] = [64, 64];
/// Experts and columns of a tile of the weight gradient.
const WEIGHT_TILE: [usize; 2] = [64, MANY];
/// Experts of a tile in the kernels for few experts, and the extent of the tile's other side.
const FEW: usize = 32;
const MANY: usize = 128;
/// K of a step; the lengths of runs are multiples of it.
const STEP: usize = 32;
/// CTAs that fill a large GPU. The number determines the order of summation, and so is the same for
/// all devices.
const CTAS_WANTED: usize = 512;
/// Largest number of runs that the last CTA can join quickly.
const RUNS_MAX: usize = 32;
/// Smallest length of a run.
const RUN_MIN: usize = 256;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_router_logits", &["router_logits"], prepare_forward)
        .reject(|request| reject(request, &[0]))
        .predict(|request, target| predict(request, target, 3.0))
        .workspace_bytes(workspace_bytes),
    CudaKernelSpec::new(
        "cuda_router_logits_backward",
        &["router_logits_backward"],
        prepare_backward,
    )
    .reject(|request| reject(request, &[1, 3]))
    .predict(|request, target| predict(request, target, 4.5))
    .workspace_bytes(workspace_bytes),
];

/// Predicts an FP32 GEMM as `gemms` GEMMs of BF16 parts: three, and for dx six. Predicted 79 and
/// 232 us for 16,384 tokens of 2048 elements and 64 experts; measured 98 and 253 on an H200
/// (`benchmarks/moe_layer_h200_2026-11-27.md`).
fn predict(request: &KernelRequest<'_>, target: &Target, gemms: f64) -> f64 {
    Rates::of(target).bf16_gemm_s(request, MMA_SYNC_BF16 / gemms)
}

/// Requires BF16 activations; the op fixes all other operands as FP32.
fn reject(request: &KernelRequest<'_>, activations: &[usize]) -> Option<String> {
    all_bf16(request, activations).or_else(|| extents_fit(request, &[0, 1]))
}

/// Bytes of an operand's tile in shared memory, as `Buffer` of `mma/split_tile.cuh`: two buffers
/// per BF16 part, with `rows` rows padded by 16 bytes.
const fn buffers(parts: usize, rows: usize, elements: usize) -> usize {
    2 * parts * rows * (elements * 2 + 16)
}

/// BF16 parts of an FP32 element.
const PARTS: usize = 3;

/// Shared memory of a tile of logits: x and w, both stored along the contraction.
const fn logits_shared_bytes([tokens, experts]: [usize; 2]) -> u32 {
    (buffers(1, tokens, STEP) + buffers(PARTS, experts, STEP)) as u32
}

/// Shared memory of a tile of the weight gradient: dlogits and x, both stored along the other axis.
const fn weight_shared_bytes([experts, columns]: [usize; 2]) -> u32 {
    (buffers(PARTS, STEP, experts) + buffers(1, STEP, columns)) as u32
}

/// Shared memory of a tile of the inputs' gradient: dlogits, stored along the contraction, and w.
const INPUT_SHARED_BYTES: u32 =
    (buffers(PARTS, TILE[0], STEP) + buffers(PARTS, STEP, TILE[1])) as u32;

/// Most experts for which parts of w fit into shared memory with two CTAs per SM.
const WALKED_EXPERTS_MAX: usize = 160;

/// Shared memory of a column of tiles of the inputs' gradient: two buffers of dlogits, and one
/// buffer of w per step along the experts.
fn walked_shared_bytes(experts: usize) -> u32 {
    let of_w = buffers(PARTS, STEP, TILE[1]) / 2 * experts.div_ceil(STEP);
    (buffers(PARTS, TILE[0], STEP) + of_w) as u32
}

/// Launches the gradient of the inputs.
fn launch_dgrad(
    device: &mut Device<'_>,
    [tokens, experts, width]: [usize; 3],
    arguments: Vec<Argument>,
) -> Result<Step, KernelError> {
    const FILE: &str = "router_logits";
    let all = tiles([tokens, width], TILE).max(1);
    if experts > WALKED_EXPERTS_MAX || width == 0 {
        let function = device.function(FILE, "router_logits_dgrad", INPUT_SHARED_BYTES)?;
        return Ok(Device::launch(function, all as u32, THREADS, INPUT_SHARED_BYTES, arguments));
    }
    let shared_bytes = walked_shared_bytes(experts);
    let function = device.function(FILE, "router_logits_dgrad_few", shared_bytes)?;
    let resident = device.resident_ctas(function, THREADS, shared_bytes)? as usize;
    // The same number of CTAs for each column of tiles.
    let across = width.div_ceil(TILE[1]);
    let down = (resident / across).clamp(1, tokens.div_ceil(TILE[0]).max(1));
    let ctas = (across * down) as u32;
    Ok(Device::launch(function, ctas, THREADS, shared_bytes, arguments))
}

/// Number of tiles of a result.
fn tiles([rows, columns]: [usize; 2], [m, n]: [usize; 2]) -> usize {
    rows.div_ceil(m) * columns.div_ceil(n)
}

/// A GEMM with a result of few rows or columns, and its division among CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Elements of the result.
    elements: usize,
    /// Whether to use the kernel for few experts.
    is_few: bool,
    /// Tiles of the result, at least one.
    tiles: usize,
    /// Number of runs of the contraction, and the length of each.
    runs: usize,
    run: usize,
    /// Shared memory per CTA.
    shared_bytes: u32,
}

impl Division {
    fn new(
        result: [usize; 2],
        tile: [usize; 2],
        is_few: bool,
        contraction: usize,
        shared_bytes: u32,
    ) -> Division {
        let tiles = tiles(result, tile).max(1);
        let wanted = (CTAS_WANTED / tiles).min(RUNS_MAX).min(contraction.div_ceil(RUN_MIN)).max(1);
        let run = contraction.div_ceil(wanted).next_multiple_of(STEP).max(STEP);
        let runs = contraction.div_ceil(run).max(1);
        Division { elements: result[0] * result[1], is_few, tiles, runs, run, shared_bytes }
    }

    /// Division of the logits' GEMM.
    fn of_logits([tokens, experts, width]: [usize; 3]) -> Division {
        let is_few = experts <= FEW;
        let tile = if is_few { [MANY, FEW] } else { TILE };
        Division::new([tokens, experts], tile, is_few, width, logits_shared_bytes(tile))
    }

    /// Division of the weight gradient's GEMM.
    fn of_weights([tokens, experts, width]: [usize; 3]) -> Division {
        let is_few = experts <= FEW;
        let tile = if is_few { [FEW, MANY] } else { WEIGHT_TILE };
        Division::new([experts, width], tile, is_few, tokens, weight_shared_bytes(tile))
    }

    fn workspace_bytes(&self) -> usize {
        if self.runs > 1 { self.runs * self.elements * size_of::<f32>() } else { 0 }
    }

    /// Launches `<entry>` or `<entry>_few`, whose arguments are operands, partial sums, arrival
    /// counters, sizes, runs, and `rest`.
    fn launch(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        entry: &str,
        operands: Vec<Argument>,
        sizes: [usize; 3],
        rest: &[Argument],
    ) -> Result<Step, KernelError> {
        let suffix = if self.is_few { "_few" } else { "" };
        let function =
            device.function("router_logits", &format!("{entry}{suffix}"), self.shared_bytes)?;
        let mut arguments = operands;
        arguments.push(Argument::Pointer(call.workspace().0));
        arguments.push(Argument::Pointer(device.arrival_counters(self.tiles)?));
        arguments.extend(sizes.map(|size| Argument::I32(size as i32)));
        arguments.extend([Argument::I32(self.run as i32), Argument::U32(self.runs as u32)]);
        arguments.extend_from_slice(rest);
        let ctas = (self.tiles * self.runs) as u32;
        Ok(Device::launch(function, ctas, THREADS, self.shared_bytes, arguments))
    }
}

/// Returns tokens, experts and width.
pub(super) fn sizes_of(request: &KernelRequest<'_>) -> [usize; 3] {
    let shape = |index: usize| &request.operands[index].shape;
    let (x, w) = match request.op {
        Op::RouterLogitsBackward(_) => (shape(1), shape(2)),
        _ => (shape(0), shape(1)),
    };
    [x[0], w[0], w[1]]
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let sizes = sizes_of(request);
    match request.op {
        Op::RouterLogitsBackward(_) => Division::of_weights(sizes).workspace_bytes(),
        _ => Division::of_logits(sizes).workspace_bytes(),
    }
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::RouterLogits(op) = &call.call.op else {
        return Err(call.refuse("expected `router_logits`"));
    };
    let (x, w) = (call.input(0), call.input(1));
    let bias = if op.bias { call.input(2).pointer } else { DevicePtr(0) };
    let sizes = [x.shape[0], w.shape[0], w.shape[1]];
    let logits = call.output(0).argument();
    let operands = vec![x.argument(), w.argument(), Argument::Pointer(bias), logits];
    let division = Division::of_logits(sizes);
    Ok(vec![division.launch(call, device, "router_logits", operands, sizes, &[])?])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let [dlogits, x, w] = [0, 1, 2].map(|index| call.input(index));
    let [dx, dw] = [0, 1].map(|index| call.output(index));
    let sizes = [x.shape[0], w.shape[0], w.shape[1]];

    let mut arguments = vec![dlogits.argument(), w.argument(), dx.argument()];
    arguments.extend(sizes.map(|size| Argument::I32(size as i32)));
    let of_input = launch_dgrad(device, sizes, arguments)?;

    let operands = vec![dlogits.argument(), x.argument(), dw.argument()];
    let adds = [Argument::U32(call.accumulate().into())];
    let entry = "router_logits_wgrad";
    let division = Division::of_weights(sizes);
    Ok(vec![of_input, division.launch(call, device, entry, operands, sizes, &adds)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_fill_a_gpu_and_are_worth_it() {
        for (sizes, logits, weights) in [
            ([0, 8, 64], (true, 1, 1, 64), (true, 1, 1, 32)),
            ([1, 1, 1], (true, 1, 1, 32), (true, 1, 1, 32)),
            ([257, 8, 64], (true, 3, 1, 64), (true, 1, 2, 160)),
            ([16_384, 32, 1024], (true, 128, 4, 256), (true, 8, 32, 512)),
            ([16_384, 128, 2048], (false, 512, 1, 2048), (false, 32, 16, 1024)),
        ] {
            let of = |it: Division| (it.is_few, it.tiles, it.runs, it.run);
            let got = (of(Division::of_logits(sizes)), of(Division::of_weights(sizes)));
            assert_eq!(got, (logits, weights), "{sizes:?}");
        }
    }
}
