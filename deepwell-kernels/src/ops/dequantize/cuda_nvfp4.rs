//! `dequantize_nvfp4.cu`: NVFP4 operands back to BF16 or FP32.

use deepwell_ir::{DType, Op};
use deepwell_precision::QuantFormat;
use deepwell_precision::nvfp4::BLOCK;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::nvfp4;
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_dequantize_nvfp4", &["dequantize"], prepare)
        .family(QuantFormat::NVFP4)
        .reject(|request| {
            let (data, target) = (&request.operands[0], &request.operands[request.input_count]);
            if data.shape.len() != 2 {
                return Some(format!("takes a matrix, not {} dimensions", data.shape.len()));
            }
            let is_float = matches!(target.dtype, DType::Bf16 | DType::F32);
            (!is_float).then(|| format!("gives bf16 or f32, not {}", target.dtype))
        })];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Dequantize(op) = &call.call.op else {
        return Err(call.refuse("expected a dequantization"));
    };
    let (data, target) = (call.input(0), call.output(0));
    let &[outer, k] = data.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let entry = format!("dequantize_nvfp4_{}_{}", nvfp4::element(target.dtype), op.axis.name());
    let function = device.function("dequantize_nvfp4", &entry, 0)?;
    let mut arguments: Vec<Argument> = (0..3).map(|plane| call.input(plane).argument()).collect();
    arguments.push(target.argument());
    arguments.extend([outer as u32, k as u32, nvfp4::flags(&op.format)].map(Argument::U32));
    let ctas = grid_of(outer * k.div_ceil(BLOCK), THREADS, device.sm_count());
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
