//! `permute.cu` and `permute_f32.cu`: rows of tokens to rows of pairs, and their sums back.

use deepwell_ir::{DType, KernelRequest};

use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::launch::row_lanes::{RowLanes, THREADS};
use crate::cuda::launch::support::{all_bf16, grid_of};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

/// The maps among the operands of both ops.
const ROWS: usize = 1;
const PAIRS: usize = 2;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec {
        name: "cuda_permute",
        ops: &["permute"],
        epilogue: no_epilogue,
        architectures: &Architecture::ALL,
        library: None,
        reject,
        predict: roofline,
        workspace_bytes: no_workspace,
        select_tile: None,
        prepare: |call, device| prepare(call, device, "permute", PAIRS),
    },
    CudaKernelSpec {
        name: "cuda_unpermute",
        ops: &["unpermute"],
        epilogue: no_epilogue,
        architectures: &Architecture::ALL,
        library: None,
        reject,
        predict: roofline,
        workspace_bytes: no_workspace,
        select_tile: None,
        prepare: |call, device| prepare(call, device, "unpermute", ROWS),
    },
];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    // A result is of the type of what went in. Gates are few and FP32.
    if request.operands[0].dtype == DType::F32 { None } else { all_bf16(request, &[0, 3]) }
}

/// Both take the matrix, the map of the result's rows, the result, its rows and columns, and the
/// experts of a token.
fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    entry: &str,
    map: usize,
) -> Result<Vec<Step>, KernelError> {
    let out = call.output(0);
    let (rows, columns, top_k) = (out.shape[0], out.shape[1], call.input(ROWS).shape[1]);
    let mut arguments = vec![call.input(0).argument(), call.input(map).argument(), out.argument()];
    let sizes = [rows as u32, columns as u32, top_k as u32];
    arguments.extend(sizes.map(Argument::U32));
    if out.dtype == DType::F32 {
        let function = device.function("permute_f32", &format!("{entry}_f32"), 0)?;
        let ctas = grid_of(rows * columns, THREADS, device.sm_count());
        return Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)]);
    }
    let RowLanes { ctas, lanes, suffix } = RowLanes::new(rows, columns, device.sm_count());
    let function = device.function("permute", &format!("{entry}_bf16{suffix}"), 0)?;
    arguments.push(Argument::U32(lanes));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
