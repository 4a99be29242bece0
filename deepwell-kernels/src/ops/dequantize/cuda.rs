//! `dequantize.cu`: quantized data and scales back to BF16 or FP32.

use deepwell_ir::{DType, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Rows and columns of the tile of a CTA, as in the source.
const TILE: usize = 64;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_dequantize", &["dequantize"], prepare)];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Dequantize(op) = &call.call.op else {
        return Err(call.refuse("expected a dequantization"));
    };
    let data = call.input(0);
    let scales = call.input(1);
    let target = call.output(0);
    let &[rows, k] = data.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let tiles = (rows.div_ceil(TILE) * k.div_ceil(TILE)).max(1);
    let element = if target.dtype == DType::Bf16 { "bf16" } else { "f32" };
    let entry = format!("dequantize_{element}_{}", op.axis.name());
    let function = device.function("dequantize", &entry, 0)?;
    let arguments = vec![
        data.argument(),
        scales.argument(),
        target.argument(),
        Argument::U32(rows as u32),
        Argument::U32(k as u32),
    ];
    Ok(vec![Device::launch(function, tiles as u32, THREADS, 0, arguments)])
}
