//! `add.cu`: element-wise sum.

use deepwell_ir::{DType, KernelRequest};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Bytes of each tensor that a thread processes at a time.
const VECTOR_BYTES: usize = 16;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_add", &["add"], prepare).reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let dtype = request.operands[0].dtype;
    (!matches!(dtype, DType::Bf16 | DType::F32)).then(|| format!("takes bf16 or f32, not {dtype}"))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (a, b, sum) = (call.input(0), call.input(1), call.output(0));
    // The op's three tensors have the same dtype.
    let entry = if sum.dtype == DType::F32 { "add_f32" } else { "add_bf16" };
    let function = device.function("add", entry, 0)?;
    let ctas = grid_of(sum.bytes().div_ceil(VECTOR_BYTES), THREADS, device.sm_count());
    let arguments =
        vec![a.argument(), b.argument(), sum.argument(), Argument::U64(sum.elements() as u64)];
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
