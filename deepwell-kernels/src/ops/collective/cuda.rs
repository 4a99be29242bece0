//! Collectives and sends between ranks, through the backend's communicator.
//!
//! A bucket is communicated as one range. The gaps between tensors and after the last tensor belong
//! to no tensor. They are zeroed before a reduction, so that a gradient norm over the bucket does
//! not include stale values.

use std::ops::Range;

use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{
    ALIGNMENT_BYTES, Access, Accumulate, ByteRange, DType, KernelRequest, Op, OperandType,
};

use crate::KernelError;
use crate::runtime::cuda::architecture::COLLECTIVES;
use crate::runtime::cuda::comm::DeviceExchange;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA of `add.cu`.
const THREADS: u32 = 256;
/// Bytes that a thread adds at a time.
const VECTOR_BYTES: usize = 16;

pub(super) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_collective", &Collective::NAMES, prepare)
        .library(COLLECTIVES)
        .reject(reject)];

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
                "a bucket that ends before its slices needs a tensor to fill it up".into(),
            );
        }
    }
    op.check(inputs, outputs).err().map(|error| error.to_string())
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Collective(op) = &call.call.op else {
        return Err(call.refuse("it exchanges nothing"));
    };
    let scatters = matches!(op.kind, CollectiveKind::ReduceScatter { .. });
    if call.call.accumulate != Accumulate::Never && !(scatters && op.bucket.is_some()) {
        return Err(call.refuse(format!(
            "expected an exchange that overwrites, got one of {} that adds to what is there\n\
             hint: scattered sums of a bucket can be added up",
            call.call.op.name()
        )));
    }
    if op.each {
        return gather_each(call, op, device);
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
    // A bucket is as long as the slices of all ranks; the bucket's tensors may be shorter.
    let (input_whole, output_whole) = match &op.kind {
        CollectiveKind::ReduceScatter { .. } => (slice_bytes(inputs).map(ranks_bytes), None),
        CollectiveKind::AllGather => (None, slice_bytes(0).map(ranks_bytes)),
        _ => (None, None),
    };
    let gaps = if scatters { gaps(call, input.clone(), input_whole)? } else { Vec::new() };
    let (input, input_bytes) = place(call, input, input_whole)?;
    let (mut output, output_bytes) = place(call, output, output_whole)?;
    let mut added = None;
    if call.accumulate() {
        // The sums go to the rank's own slice of the bucket, whose content has been sent by then.
        let position = exchange.group.position_of(ranks.rank).unwrap_or_default();
        let sums = input.offset(position * output_bytes);
        added = Some(add(call.output(0), sums, call, device)?);
        output = sums;
    }
    let exchange = DeviceExchange { exchange, input, input_bytes, output, output_bytes };
    let step = device.exchange(&exchange, (ranks.rank, ranks.world_size));
    let step = step.map_err(|error| call.refuse(error.to_string()))?;
    Ok(gaps.into_iter().chain([step]).chain(added).collect())
}

/// Prepares several all-gathers, which the backend enqueues together.
fn gather_each(
    call: &CallView<'_>,
    op: &Collective,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let ranks = &call.program.target.ranks;
    let gather = |index: usize| {
        let (slice, gathered) = (call.input(index), call.output(index));
        let exchange = crate::Exchange::of(op, ranks, slice.dtype)
            .map_err(|error| call.refuse(error.to_string()))?;
        let exchange = DeviceExchange {
            exchange,
            input: slice.pointer,
            input_bytes: slice.bytes(),
            output: gathered.pointer,
            output_bytes: gathered.bytes(),
        };
        let step = device.exchange(&exchange, (ranks.rank, ranks.world_size));
        step.map_err(|error| call.refuse(error.to_string()))
    };
    (0..call.call.input_count).map(gather).collect()
}

/// Adds `sums` to `slice`, both FP32.
fn add(
    slice: DeviceTensor,
    sums: DevicePtr,
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Step, KernelError> {
    if slice.dtype != DType::F32 {
        return Err(call.refuse(format!("adds up sums in f32, got {}", slice.dtype)));
    }
    let function = device.function("add", "add_f32", 0)?;
    let ctas = grid_of(slice.bytes().div_ceil(VECTOR_BYTES), THREADS, device.sm_count());
    let arguments = vec![
        slice.argument(),
        Argument::Pointer(sums),
        slice.argument(),
        Argument::U64(slice.elements() as u64),
    ];
    Ok(Device::launch(function, ctas, THREADS, 0, arguments))
}

/// Fills the gaps of a bucket of `whole` bytes with zeros: gaps between two tensors, tensors that
/// the call itself writes, and the rest after the last tensor.
fn gaps(
    call: &CallView<'_>,
    operands: Range<usize>,
    whole: Option<usize>,
) -> Result<Vec<Step>, KernelError> {
    let (first, bytes) = place(call, operands.clone(), whole)?;
    let mut filled = first;
    let mut steps = Vec::new();
    let mut fill_to = |from: DevicePtr, to: DevicePtr| {
        if to.0 > from.0 {
            steps.push(Step::Fill { target: from, byte: 0, bytes: (to.0 - from.0) as usize });
        }
    };
    for index in operands {
        if call.call.operands[index].access == Access::Write {
            continue;
        }
        let tensor = call.operand(index);
        fill_to(filled, tensor.pointer);
        filled = tensor.pointer.offset(tensor.bytes());
    }
    fill_to(filled, first.offset(bytes));
    Ok(steps)
}

/// First byte and length of contiguous operands; a bucket's length is `whole`.
fn place(
    call: &CallView<'_>,
    operands: Range<usize>,
    whole: Option<usize>,
) -> Result<(DevicePtr, usize), KernelError> {
    let Some(first) = operands.clone().next() else { return Ok((DevicePtr(0), 0)) };
    let range = |index: usize| {
        let value = call.program.value(call.call.operands[index].value);
        value.range_in(call.instance.slot)
    };
    let ranges: Vec<ByteRange> = operands.map(range).collect();
    let span = ByteRange::spanning(&ranges)
        .ok_or_else(|| call.refuse("expected a bucket of one operand behind the other"))?;
    Ok((call.operand(first).pointer, whole.unwrap_or(span.bytes)))
}
