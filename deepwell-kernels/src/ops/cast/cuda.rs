//! `cast.cu`: change of storage type.

use deepwell_ir::DType;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements that a thread converts at a time, as in the source.
const WIDTH: usize = 16;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new("cuda_cast", &["cast"], prepare)];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (x, y) = (call.input(0), call.output(0));
    let entry = match (x.dtype, y.dtype) {
        (DType::F32, DType::Bf16) => "cast_f32_to_bf16",
        (DType::Bf16, DType::F32) => "cast_bf16_to_f32",
        (from, to) if from == to => {
            let bytes = x.bytes();
            return Ok(vec![Step::Copy { target: y.pointer, source: x.pointer, bytes }]);
        }
        (from, to) => {
            return Err(call.refuse(format!("expected a cast of f32 or bf16, got {from} to {to}")));
        }
    };
    let function = device.function("cast", entry, 0)?;
    let ctas = grid_of(x.elements().div_ceil(WIDTH), THREADS, device.sm_count());
    let arguments = vec![x.argument(), y.argument(), Argument::U64(x.elements() as u64)];
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
