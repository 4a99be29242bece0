//! `sample_operand.cu` and `product_error.cu`.

use deepwell_ir::ops::{Axis, ProductError, SAMPLED_ROWS, first_sampled_row};
use deepwell_ir::{DType, Op, Storage};
use deepwell_precision::QuantFormat;

use super::cpu;
use super::window::Part;
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the sources.
const THREADS: u32 = 256;
/// CTAs that measure a product, each with 16 x 16 elements of the tile.
const PARTS: u32 = 64;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_sample_operand", &["sample_operand"], prepare_sample),
    ERROR,
    ERROR.name("cuda_product_error_nvfp4").family(QuantFormat::NVFP4),
];

const ERROR: CudaKernelSpec =
    CudaKernelSpec::new("cuda_product_error_mxfp8", &["product_error"], prepare_error)
        .workspace_bytes(|_, _| 2 * PARTS as usize * size_of::<f64>());

fn prepare_sample(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::SampleOperand(op) = &call.call.op else {
        return Err(call.refuse("expected a sample of an operand"));
    };
    let (x, sample) = (call.input(0), call.output(0));
    let (&[.., rows, columns], &[window_rows, window_columns]) =
        (x.shape.as_slice(), sample.shape.as_slice())
    else {
        return Err(call.refuse("expected matrices"));
    };
    let (is_grouped, groups) = groups_of(call, 1);
    let part = Part::of_source(&x.shape, op.axis, is_grouped);
    let first = match op.axis {
        Axis::Column => [0, first_sampled_row(columns)],
        _ => [first_sampled_row(rows), 0],
    };
    let element = if x.dtype == DType::Bf16 { "bf16" } else { "f32" };
    let function = device.function("sample_operand", &format!("sample_operand_{element}"), 0)?;
    let sizes = [rows, columns, first[0], first[1], window_rows, window_columns];
    let mut arguments = vec![x.argument(), sample.argument()];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    arguments.extend(groups);
    arguments.push(Argument::U32(part as u32));
    Ok(vec![Device::launch(function, window_rows as u32, THREADS, 0, arguments)])
}

/// Whether a call has offsets of groups, as the input at this index; offsets and their number as
/// arguments.
fn groups_of(call: &CallView<'_>, index: usize) -> (bool, [Argument; 2]) {
    let is_grouped = call.call.input_count > index;
    let (offsets, groups) = match is_grouped {
        true => (call.input(index).pointer, call.input(index).elements().saturating_sub(1)),
        false => (DevicePtr(0), 0),
    };
    (is_grouped, [Argument::Pointer(offsets), Argument::U32(groups as u32)])
}

fn prepare_error(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ProductError(op) = &call.call.op else {
        return Err(call.refuse("expected the error of a product"));
    };
    let function = device.function("product_error", "product_error", 0)?;
    let mut arguments = Vec::new();
    let (is_grouped, groups) = groups_of(call, op.offsets_input());
    for index in 0..2 {
        let part = Part::of_planes(op, index, is_grouped);
        arguments.extend(operand(call, op, (index, part))?);
    }
    let shapes: Vec<Vec<usize>> =
        (0..call.call.input_count).map(|index| call.input(index).shape).collect();
    let depth = cpu::depth(op, |index| &shapes[index]);
    arguments.extend(groups);
    arguments.extend([
        Argument::U32(depth as u32),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.arrival_counters(1)?),
        call.output(0).argument(),
    ]);
    Ok(vec![Device::launch(function, PARTS, THREADS, 0, arguments)])
}

/// The arguments of one operand: its sample and its planes.
fn operand(
    call: &CallView<'_>,
    op: &ProductError,
    (index, part): (usize, Part),
) -> Result<Vec<Argument>, KernelError> {
    let (sample, first) = (call.input(index), op.data_inputs()[index]);
    let format = [op.a, op.b][index];
    let data = call.input(first);
    let (&[_, width], &[.., outer, k]) = (sample.shape.as_slice(), data.shape.as_slice()) else {
        return Err(call.refuse("expected matrices"));
    };
    let strides = match op.axes()[index] {
        Axis::Column => [1, SAMPLED_ROWS],
        _ => [width, 1],
    };
    let tensor_scale = match Storage::plane_count(&format) {
        3 => call.input(first + 2).argument(),
        _ => Argument::Pointer(DevicePtr(0)),
    };
    let mut arguments = vec![sample.argument()];
    arguments.extend(strides.map(|stride| Argument::U32(stride as u32)));
    arguments.push(Argument::U32(u32::from(sample.dtype == DType::F32)));
    arguments.extend([data.argument(), call.input(first + 1).argument(), tensor_scale]);
    let sizes = [outer, k, first_sampled_row(outer)];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::U32(part as u32));
    Ok(arguments)
}
