//! Runs `add_positions.cu`: a bias is a position table with one row, which every token uses.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::ops::add_positions::cuda::{FORWARD_THREADS, UNITS_PER_THREAD, WIDTH};
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_add_bias", &["add_bias"], prepare).reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let width = request.operands[1].shape.iter().product::<usize>();
    let limit = i32::MAX as usize;
    let is_one = (1..=limit).contains(&width);
    let wrong = (!is_one).then(|| format!("takes a bias of 1 to {limit} elements, not {width}"));
    all_bf16(request, &[0, 1, 2]).or(wrong)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    if !matches!(call.call.op, Op::AddBias(_)) {
        return Err(call.refuse("expected `add_bias`"));
    }
    let (x, bias, out) = (call.input(0), call.input(1), call.output(0));
    let width = if bias.elements().is_multiple_of(WIDTH) { WIDTH } else { 1 };
    let name = format!("add_positions_{}_bytes", 2 * width);
    let function = device.function("add_positions", &name, 0)?;
    let units = out.elements() / width;
    let threads = units.div_ceil(UNITS_PER_THREAD);
    let ctas = grid_of(threads, FORWARD_THREADS, device.sm_count());
    let arguments = vec![
        x.argument(),
        bias.argument(),
        out.argument(),
        Argument::U64(units as u64),
        Argument::U32((bias.elements() / width) as u32),
        Argument::U32(0),
    ];
    Ok(vec![Device::launch(function, ctas, FORWARD_THREADS, 0, arguments)])
}
