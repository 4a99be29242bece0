//! `stochastic_round.cu`: stochastic rounding of a quantized operand's elements.

use deepwell_ir::ops::StochasticRound;
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
    &[CudaKernelSpec::new("cuda_stochastic_round", &["stochastic_round"], prepare)];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::StochasticRound(op) = &call.call.op else {
        return Err(call.refuse("expected a rounding at random"));
    };
    let (x, scales, key, data) = (call.input(0), call.input(1), call.input(2), call.output(0));
    let &[rows, k] = data.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let tiles = (rows.div_ceil(TILE) * k.div_ceil(TILE)).max(1);
    let element = if x.dtype == DType::Bf16 { "bf16" } else { "f32" };
    let entry = format!("stochastic_round_{element}_{}", op.axis.name());
    let function = device.function("stochastic_round", &entry, 0)?;
    let arguments = vec![
        x.argument(),
        scales.argument(),
        key.argument(),
        data.argument(),
        Argument::U32(rows as u32),
        Argument::U32(k as u32),
        Argument::U64(StochasticRound::stream(&call.call.name)),
    ];
    Ok(vec![Device::launch(function, tiles as u32, THREADS, 0, arguments)])
}
