//! `permute.cu` and `permute_f32.cu`: rows of tokens to rows of pairs, and sums of these per token.

use deepwell_ir::{DType, KernelRequest};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::row_lanes::{RowLanes, THREADS};
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_permute", &["permute"], prepare_permute)
        .reject(|request| reject(request, &[0, 3])),
    CudaKernelSpec::new("cuda_unpermute", &["unpermute"], |call, device| {
        prepare_unpermute(call, device, "unpermute", 1)
    })
    .reject(|request| reject(request, &[0, 3])),
    CudaKernelSpec::new("cuda_add_unpermute", &["add_unpermute"], |call, device| {
        prepare_unpermute(call, device, "add_unpermute", 2)
    })
    .reject(|request| all_bf16(request, &[0, 1, 4])),
];

fn reject(request: &KernelRequest<'_>, matrices: &[usize]) -> Option<String> {
    // The result has the input's dtype. Gates have few columns and are FP32.
    if request.operands[0].dtype == DType::F32 { None } else { all_bf16(request, matrices) }
}

/// Arguments: the matrix, both maps, the result, its rows and columns, the tokens, and the experts
/// per token. The FP32 kernel takes only the map of rows, and no tokens.
fn prepare_permute(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let [x, of_pairs, pairs] = [0, 1, 2].map(|index| call.input(index));
    let out = call.output(0);
    let (rows, columns) = (out.shape[0], out.shape[1]);
    let (tokens, top_k) = (of_pairs.shape[0], of_pairs.shape[1]);
    if out.dtype == DType::F32 {
        let function = device.function("permute_f32", "permute_f32", 0)?;
        let ctas = grid_of(rows * columns, THREADS, device.sm_count());
        let mut arguments = [x, pairs, out].map(|operand| operand.argument()).to_vec();
        arguments.extend([rows, columns, top_k].map(|size| Argument::U32(size as u32)));
        return Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)]);
    }
    let RowLanes { ctas, lanes, suffix } =
        RowLanes::new(rows.max(tokens), columns, device.sm_count());
    let function = device.function("permute", &format!("permute_bf16{suffix}"), 0)?;
    let mut arguments = [x, of_pairs, pairs, out].map(|operand| operand.argument()).to_vec();
    arguments.extend([rows, columns, tokens, top_k].map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::U32(lanes));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

/// Arguments: `matrices` matrices, the map of the result's rows, the result, its rows and columns,
/// and the experts per token.
fn prepare_unpermute(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    entry: &str,
    matrices: usize,
) -> Result<Vec<Step>, KernelError> {
    let out = call.output(0);
    let rows = out.shape[0];
    let columns = out.shape[1];
    let top_k = call.input(matrices).shape[1];
    let mut arguments: Vec<Argument> =
        (0..=matrices).map(|index| call.input(index).argument()).collect();
    arguments.push(out.argument());
    arguments.extend([rows, columns, top_k].map(|size| Argument::U32(size as u32)));
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
