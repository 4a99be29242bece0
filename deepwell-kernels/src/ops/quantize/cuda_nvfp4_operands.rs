//! `quantize_nvfp4_operands.cu`: block quantization to NVFP4 along rows and down columns in two
//! formats, after one pass over the source for the largest magnitude of each operand.

use deepwell_ir::ops::{Axis, QuantizeOperands};
use deepwell_ir::{DType, KernelRequest, Op};
use deepwell_precision::QuantFormat;
use deepwell_precision::hadamard::POINTS;

use crate::KernelError;
use crate::ops::amax::cuda as amax;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::{mx, nvfp4};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Words that one evaluation of Philox gives: rows of an operand begin with the first of them.
const RANDOM_WORDS: usize = 4;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_quantize_nvfp4_operands", &["quantize_operands"], prepare)
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(nvfp4::predicted_s)
        .workspace_bytes(|_, _| 2 * amax::BYTES)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::QuantizeOperands(op) = request.op else { return None };
    let x = &request.operands[0];
    if x.dtype != DType::Bf16 {
        return Some(format!("takes bf16, not {}", x.dtype));
    }
    if op.has_key() && x.shape.iter().any(|size| !size.is_multiple_of(RANDOM_WORDS)) {
        let got = &x.shape;
        return Some(format!("rounds stochastically multiples of {RANDOM_WORDS}, not {got:?}"));
    }
    op.operands().into_iter().find_map(|it| nvfp4::reject(x, None, &it.format, it.axis))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::QuantizeOperands(op) = &call.call.op else {
        return Err(call.refuse("expected a quantization of two operands"));
    };
    let x = call.input(0);
    let &[rows, columns] = x.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let (mut steps, amaxes) = amaxes(call, device, op, [rows, columns])?;
    let key = match op.has_key() {
        true => call.input(1).argument(),
        false => Argument::Pointer(DevicePtr(0)),
    };
    let mut arguments = vec![x.argument()];
    arguments.extend(amaxes.map(Argument::Pointer));
    arguments.push(key);
    arguments.extend((0..call.output_count()).map(|index| call.output(index).argument()));
    let flags = op.operands().map(|it| nvfp4::flags(&it.format));
    let sizes = [rows as u32, columns as u32].into_iter().chain(flags);
    arguments.extend(sizes.map(Argument::U32));
    arguments.extend(op.streams.map(|stream| Argument::U64(stream.unwrap_or_default())));
    arguments.push(mx::totals(device, 2)?);
    let rounding = match op.streams {
        [None, None] => "nearest",
        [Some(_), None] => "row_stochastic",
        [None, Some(_)] => "column_stochastic",
        [Some(_), Some(_)] => "stochastic",
    };
    let shared_bytes = nvfp4::shared_bytes(x.dtype);
    let entry = format!("quantize_nvfp4_operands_{rounding}");
    let function = device.function("quantize_nvfp4_operands", &entry, shared_bytes)?;
    let ctas = nvfp4::ctas(rows, columns);
    steps.push(Device::launch(function, ctas, nvfp4::THREADS, shared_bytes, arguments));
    Ok(steps)
}

/// Writes the largest magnitude of the tensor for each operand into the workspace, with one read if
/// only the columnwise operand is transformed.
fn amaxes(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    op: &QuantizeOperands,
    [rows, columns]: [usize; 2],
) -> Result<(Vec<Step>, [DevicePtr; 2]), KernelError> {
    let x = call.input(0);
    let first = call.workspace().0;
    let both = [first, first.offset(amax::BYTES)];
    let [of_row, of_column] = op.operands().map(|it| it.format);
    let steps = match [of_row, of_column].map(|format| format.hadamard.is_some()) {
        [false, false] => {
            let steps = amax::steps(device, &x, &of_row, Axis::Row, first)?;
            return Ok((steps.to_vec(), [first; 2]));
        }
        [false, true] if columns.is_multiple_of(2) => {
            amax::steps_of_both(device, &x, rows / POINTS, &of_column, first)?.to_vec()
        }
        _ => {
            let row = amax::steps(device, &x, &of_row, Axis::Row, both[0])?;
            let column = amax::steps(device, &x, &of_column, Axis::Column, both[1])?;
            row.into_iter().chain(column).collect()
        }
    };
    Ok((steps, both))
}
