//! What the functions of elements that quantize their results share on the host:
//! `layout/elementwise_quantize.cuh`.

use deepwell_ir::ops::WithQuantize;
use deepwell_ir::{KernelRequest, Op};

use super::support::all_bf16;
use super::{fused, mx};
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr};
use crate::cuda::prepare::{CallView, Device, Step};

/// Elements of a piece, 16 bytes of BF16.
const PIECE: usize = 8;

fn fused_op(op: &Op) -> Option<&WithQuantize> {
    match op {
        Op::WithQuantize(op) => Some(op),
        _ => None,
    }
}

/// Why a request cannot be served.
pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let op = fused_op(request.op)?;
    if let Some(reason) = fused::reject(op) {
        return Some(reason);
    }
    let shape = &request.operands[0].shape;
    if let &[_, columns] = shape.as_slice()
        && !columns.is_multiple_of(PIECE)
    {
        return Some(format!("takes rows of whole pieces of {PIECE} elements, not {columns}"));
    }
    let kept = (0..op.producer_output_count()).filter_map(|output| op.position_of_output(output));
    let kept = kept.map(|position| request.input_count + position);
    let floats: Vec<usize> = (0..request.input_count).chain(kept).collect();
    let of_entries = || op.quantized.iter().find_map(|entry| mx::reject(&entry.quantize, shape));
    all_bf16(request, &floats).or_else(of_entries)
}

/// Prepares a call for kernel `<entry>_quantize_<axis>` of `<file>.cu`. It takes the inputs; the
/// producer's outputs, or null; four copies of each of them; the extents; flags of each;
/// totals; statistics of each.
pub(crate) fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    file: &'static str,
    entry: &str,
) -> Result<Vec<Step>, KernelError> {
    let Some(op) = fused_op(&call.call.op) else {
        return Err(call.refuse("expected a function of elements and its quantization"));
    };
    let &[rows, columns] = call.input(0).shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let outputs = op.producer_output_count();
    let mut entries = Vec::with_capacity(outputs);
    for output in 0..outputs {
        match op.quantized.iter().position(|entry| entry.output == output) {
            Some(index) => entries.push(index),
            None => return Err(call.refuse(format!("expected output {output} quantized"))),
        }
    }
    let Some(&first) = entries.first() else {
        return Err(call.refuse("expected a quantized output"));
    };
    let axis = op.quantized[first].quantize.axis;
    let kernel = format!("{entry}_quantize_{}", axis.name());
    let flags: Vec<u32> =
        entries.iter().map(|&index| mx::flags(&op.quantized[index].quantize.spec)).collect();
    let shared_bytes = match flags.as_slice() {
        &[flags] => mx::shared_bytes(rows, columns, flags),
        // The tiles of all results lie there.
        _ => outputs as u32 * mx::BF16_TILE_BYTES,
    };
    let function = device.function(file, &kernel, shared_bytes)?;

    let copies = entries.iter().map(|&index| {
        mx::copies(call, op.quantized[index].quantize.axis, op.positions_of_quantized(index).start)
    });
    let copies: Vec<mx::Copies> = copies.collect();
    let mut arguments: Vec<Argument> =
        (0..call.call.input_count).map(|index| call.input(index).argument()).collect();
    arguments.extend((0..outputs).map(|output| match op.position_of_output(output) {
        Some(position) => call.output(position).argument(),
        None => Argument::Pointer(DevicePtr(0)),
    }));
    arguments.extend(copies.iter().flat_map(|copies| copies.places));
    arguments.extend([Argument::U32(rows as u32), Argument::U32(columns as u32)]);
    arguments.extend(flags.into_iter().map(Argument::U32));
    arguments.push(mx::totals(device, outputs)?);
    arguments.extend(copies.iter().map(|copies| copies.statistics));
    let blocks = mx::blocks(rows, columns);
    Ok(vec![Device::launch(function, blocks, mx::BF16_TILE_THREADS, shared_bytes, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{Axis, Gelu, Quantize, QuantizedOutput, SwiGlu, SwiGluBackward};
    use deepwell_ir::{DType, OperandType};
    use deepwell_precision::MxSpec;

    use super::*;

    fn fused(producer: impl Into<Op>, outputs: &[(usize, Axis)]) -> Op {
        let entry = |&(output, axis): &(usize, Axis)| QuantizedOutput {
            output,
            quantize: Quantize { spec: MxSpec::default(), axis },
            keep: output == 1,
        };
        let quantized = outputs.iter().map(entry).collect();
        WithQuantize { producer: Box::new(producer.into()), quantized }.into()
    }

    #[test]
    fn requests_that_kernels_serve() {
        let check =
            |op: Op, inputs: usize, columns: usize, dtype: DType, expected: Option<&str>| {
                let matrix = OperandType { dtype, shape: vec![40, columns] };
                let inputs = vec![matrix; inputs];
                let mut operands = inputs.clone();
                operands.extend(op.outputs_of(&inputs).unwrap());
                let request =
                    KernelRequest { op: &op, operands: &operands, input_count: inputs.len() };
                let reason = reject(&request);
                match expected {
                    None => assert_eq!(reason, None),
                    Some(part) => {
                        let reason = reason.unwrap_or_default();
                        assert!(reason.contains(part), "`{reason}` lacks `{part}`");
                    }
                }
            };
        let bf16 = DType::Bf16;
        let gelu = || fused(Gelu { tanh: true }, &[(0, Axis::Column)]);
        check(gelu(), 1, 96, bf16, None);
        check(gelu(), 1, 100, bf16, Some("whole pieces of 8 elements, not 100"));
        check(gelu(), 1, 96, DType::F32, Some("bf16 operands, not f32"));
        check(fused(SwiGlu {}, &[(0, Axis::Both)]), 2, 0, bf16, None);
        let backward = |outputs: &[(usize, Axis)]| fused(SwiGluBackward {}, outputs);
        check(backward(&[(1, Axis::Both), (0, Axis::Both)]), 3, 64, bf16, None);
        check(backward(&[(1, Axis::Both)]), 3, 64, bf16, Some("together"));
        check(backward(&[(0, Axis::Row), (1, Axis::Both)]), 3, 64, bf16, Some("together"));
    }
}
