//! Exchanges between ranks, by whatever the backend is given for them.

use std::ops::Range;

use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{
    ALIGNMENT_BYTES, Accumulate, ByteRange, KernelRequest, Op, Operand, OperandType,
};

use crate::KernelError;
use crate::cuda::catalog::COLLECTIVES;
use crate::cuda::comm::DeviceExchange;
use crate::cuda::driver::DevicePtr;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_collective",
    ops: &Collective::NAMES,
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: Some(COLLECTIVES),
    reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Collective(op) = request.op else {
        return Some(format!("exchanges data, does not compute `{}`", request.op.name()));
    };
    let (inputs, outputs) = request.operands.split_at(request.input_count);
    if let (CollectiveKind::ReduceScatter { .. }, Some(_), [slice]) = (&op.kind, op.bucket, outputs)
    {
        let elements = |operand: &OperandType| operand.shape.iter().product::<usize>();
        let last = elements(slice) * op.ranks as usize;
        let bytes = |operand: &OperandType| operand.storage_bytes().unwrap_or(usize::MAX);
        let aligned = inputs.iter().map(|it| bytes(it).next_multiple_of(ALIGNMENT_BYTES));
        if aligned.sum::<usize>() < last * size_of::<f32>() {
            return Some(
                "a bucket that ends before its slices is filled up by the CPU alone".into(),
            );
        }
    }
    op.check(inputs, outputs).err().map(|error| error.to_string())
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Collective(op) = &call.call.op else {
        return Err(call.refuse("it exchanges nothing"));
    };
    if call.call.accumulate != Accumulate::Never {
        return Err(call.refuse(
            "expected an exchange that overwrites, got one that adds up micro-batches\n\
             hint: ZeRO 2 and 3 are there on the CPU; take ZeRO 1 on a GPU",
        ));
    }
    let ranks = &call.program.target.ranks;
    let dtype = call.operand(0).dtype;
    let exchange = crate::Exchange::of(op, ranks, dtype);
    let exchange = exchange.map_err(|error| call.refuse(error.to_string()))?;
    let inputs = call.call.input_count;
    let (input, output) = match &op.kind {
        CollectiveKind::AllReduce { .. } if op.bucket.is_some() => (0..inputs, 0..inputs),
        _ => (0..inputs, inputs..call.call.operands.len()),
    };
    let slice_bytes = |index: usize| op.bucket.map(|_| call.operand(index).bytes());
    let ranks_bytes = |bytes: usize| bytes * op.ranks as usize;
    // A bucket is as long as the slices of all ranks; its tensors may be shorter.
    let (input_whole, output_whole) = match &op.kind {
        CollectiveKind::ReduceScatter { .. } => (slice_bytes(inputs).map(ranks_bytes), None),
        CollectiveKind::AllGather => (None, slice_bytes(0).map(ranks_bytes)),
        _ => (None, None),
    };
    let (input, input_bytes) = place(call, input, input_whole)?;
    let (output, output_bytes) = place(call, output, output_whole)?;
    let exchange = DeviceExchange { exchange, input, input_bytes, output, output_bytes };
    let step = device.exchange(&exchange, (ranks.rank, ranks.world_size));
    Ok(vec![step.map_err(|error| call.refuse(error.to_string()))?])
}

/// First byte and length of operands one behind the other; of a bucket `whole` bytes.
fn place(
    call: &CallView<'_>,
    operands: Range<usize>,
    whole: Option<usize>,
) -> Result<(DevicePtr, usize), KernelError> {
    let Some(first) = operands.clone().next() else { return Ok((DevicePtr(0), 0)) };
    let range = |operand: &Operand| call.program.value(operand.value).range;
    let ranges: Vec<ByteRange> = call.call.operands[operands].iter().map(range).collect();
    let span = ByteRange::spanning(&ranges)
        .ok_or_else(|| call.refuse("expected a bucket of one operand behind the other"))?;
    Ok((call.operand(first).pointer, whole.unwrap_or(span.bytes)))
}
