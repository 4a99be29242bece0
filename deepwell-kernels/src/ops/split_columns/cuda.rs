//! `split_columns.cu`: splits a matrix into two side by side, and joins the two.

use deepwell_ir::KernelRequest;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::row_lanes::{RowLanes, THREADS};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_split_columns", &["split_columns"], |call, device| {
        prepare(call, device, "split_columns", 1)
    })
    .reject(reject),
    CudaKernelSpec::new("cuda_join_columns", &["join_columns"], |call, device| {
        prepare(call, device, "join_columns", 0)
    })
    .reject(reject),
];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[0, 1, 2])
}

/// Arguments of both kernels: three operands, rows, and the columns of the parts, which are
/// operands `first_part` and the next.
fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    entry: &str,
    first_part: usize,
) -> Result<Vec<Step>, KernelError> {
    let first = call.operand(first_part);
    let rest = call.operand(first_part + 1);
    let (rows, columns) = (first.shape[0], [first.shape[1], rest.shape[1]]);
    let RowLanes { ctas, lanes, suffix } = RowLanes::of_parts(rows, &columns, device.sm_count());
    let function = device.function("split_columns", &format!("{entry}{suffix}"), 0)?;
    let mut arguments: Vec<_> = [0, 1, 2].map(|index| call.operand(index).argument()).to_vec();
    let sizes = [rows as u32, columns[0] as u32, columns[1] as u32, lanes];
    arguments.extend(sizes.map(Argument::U32));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
