//! `stored_swiglu.cu`: the gated activation and its backward from gate and up in MXFP8.

use deepwell_ir::{KernelRequest, Op};
use deepwell_precision::ElementFormat;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements that a thread processes at a time.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_stored_swiglu", &["stored_swiglu"], |call, device| {
        prepare(call, device, "stored_swiglu_bf16")
    })
    .reject(|request| reject(request, &[4])),
    CudaKernelSpec::new(
        "cuda_stored_swiglu_backward",
        &["stored_swiglu_backward"],
        |call, device| prepare(call, device, "stored_swiglu_backward_bf16"),
    )
    .reject(|request| reject(request, &[0, 5, 6])),
];

/// Why kernels cannot read gate and up.
pub(super) fn reject_format(request: &KernelRequest<'_>) -> Option<String> {
    let element = match request.op.leading() {
        Op::StoredSwiGlu(op) => op.format.element,
        Op::StoredSwiGluBackward(op) => op.format.element,
        _ => return None,
    };
    (element != ElementFormat::E4M3).then(|| format!("reads e4m3, not {element}"))
}

fn reject(request: &KernelRequest<'_>, matrices: &[usize]) -> Option<String> {
    let columns = request.operands[0].shape.last().copied().unwrap_or(0);
    let is_whole = columns.is_multiple_of(WIDTH);
    let cut = || format!("takes rows that are multiples of {WIDTH} elements, not {columns}");
    reject_format(request).or_else(|| all_bf16(request, matrices)).or_else(|| (!is_whole).then(cut))
}

/// Arguments are the operands in the op's order, then rows and columns.
fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    entry: &str,
) -> Result<Vec<Step>, KernelError> {
    let &[rows, columns] = call.input(0).shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let function = device.function("stored_swiglu", entry, 0)?;
    let ctas = grid_of((rows * columns).div_ceil(WIDTH), THREADS, device.sm_count());
    let operands = 0..call.call.operands.len();
    let mut arguments: Vec<_> = operands.map(|index| call.operand(index).argument()).collect();
    arguments.extend([Argument::U32(rows as u32), Argument::U32(columns as u32)]);
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
