//! `add.cu`: element-wise sum.

use deepwell_ir::KernelRequest;

use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::launch::support::{all_bf16, grid_of};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements that a thread takes at a time.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_add",
    ops: &["add"],
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[0, 1, 2])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (a, b, sum) = (call.input(0), call.input(1), call.output(0));
    let function = device.function("add", "add_bf16", 0)?;
    let ctas = grid_of(sum.elements().div_ceil(WIDTH), THREADS, device.sm_count());
    let arguments =
        vec![a.argument(), b.argument(), sum.argument(), Argument::U64(sum.elements() as u64)];
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
