//! Collectives on the CPU, through the backend's [`Comm`](crate::Comm).

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{ByteRange, Op};

use crate::runtime::cpu::operands::{Operands, Run, SharedComm};
use crate::{Exchange, KernelError};

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Collective(op) = op else { return Err(operands.unknown_kernel()) };
    let Some(comm) = operands.comm.map(Arc::clone) else {
        return Err(operands.refused(
            "expected a backend that exchanges data with other ranks, got one alone\n\
             hint: give it a `Comm` by `CpuBackend::with_comm`"
                .to_string(),
        ));
    };
    let ranks = &operands.program.target.ranks;
    let backend_ranks = {
        let comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        (comm.rank(), comm.world_size())
    };
    if backend_ranks != (ranks.rank, ranks.world_size) {
        let (rank, size) = backend_ranks;
        return Err(operands.refused(format!(
            "the program is for rank {} of {}, the backend is rank {rank} of {size}",
            ranks.rank, ranks.world_size
        )));
    }
    if op.each {
        return gather_each(operands, op, comm);
    }
    let exchange = Exchange::of(op, ranks, operands.dtype(0))
        .map_err(|error| operands.refused(error.to_string()))?;
    let inputs = operands.input_count;
    let of_group = |bytes: usize| bytes * op.ranks as usize;
    let (input, output) = match (&op.kind, op.bucket) {
        (_, None) => {
            let is_there = |index: usize| operands.values.get(index).is_some();
            let output = operands.output(0);
            (
                (inputs > 0).then(|| operands.input_bytes(0)).transpose()?,
                is_there(output).then(|| operands.target_bytes(output)).transpose()?,
            )
        }
        (CollectiveKind::ReduceScatter { .. }, _) => {
            let slice = operands.output(0);
            let whole = of_group(operands.value(slice).range.bytes);
            let own = operands.bucket_bytes(0..inputs, None)?;
            let gaps = gaps(operands, own);
            if operands.adds() || own.bytes < whole || !gaps.is_empty() {
                return scatter(operands, Bucket { range: own, whole, gaps }, comm, exchange);
            }
            let bucket = operands.bucket_bytes(0..inputs, Some(whole))?;
            (Some(operands.input_range(bucket)?), Some(operands.target_bytes(slice)?))
        }
        (CollectiveKind::AllGather, _) => {
            let whole = of_group(operands.value(0).range.bytes);
            let bucket = operands.bucket_bytes(inputs..operands.values.len(), Some(whole))?;
            (Some(operands.input_bytes(0)?), Some(operands.target_range(bucket)?))
        }
        _ => {
            let bucket = operands.bucket_bytes(0..inputs, None)?;
            (None, Some(operands.target_range(bucket)?))
        }
    };
    let in_place = op.bucket.is_some() && input.is_none();
    Ok(Box::new(move |arena| {
        let output = output.as_ref().map_or(&mut [][..], |output| output.of(arena));
        let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        let exchanged = if in_place {
            let input = output.to_vec();
            comm.exchange(&exchange, &input, output)
        } else {
            let input = input.as_ref().map_or(&[][..], |input| input.of(arena));
            comm.exchange(&exchange, input, output)
        };
        exchanged.map_err(|error| error.to_string())
    }))
}

/// Prepares a call of several all-gathers, one tensor after the other.
fn gather_each(
    operands: &Operands<'_>,
    op: &Collective,
    comm: SharedComm,
) -> Result<Run, KernelError> {
    let ranks = &operands.program.target.ranks;
    let gather = |index: usize| {
        let exchange = Exchange::of(op, ranks, operands.dtype(index))
            .map_err(|error| operands.refused(error.to_string()))?;
        let output = operands.target_bytes(operands.output(index))?;
        Ok((exchange, operands.input_bytes(index)?, output))
    };
    let gathers: Result<Vec<_>, KernelError> = (0..operands.input_count).map(gather).collect();
    let gathers = gathers?;
    Ok(Box::new(move |arena| {
        let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        gathers.iter().try_for_each(|(exchange, input, output)| {
            let gathered = comm.exchange(exchange, input.of(arena), output.of(arena));
            gathered.map_err(|error| error.to_string())
        })
    }))
}

/// A bucket that may be shorter than the slices of all ranks.
struct Bucket {
    /// Range in the arena.
    range: ByteRange,
    /// Total bytes of all ranks' slices.
    whole: usize,
    /// Gaps between tensors, relative to the bucket's start.
    gaps: Vec<Range<usize>>,
}

impl Bucket {
    /// Copies the bucket with zeros in the gaps, whose previous content must not enter a sum.
    fn filled(&self, bytes: &[u8]) -> Vec<u8> {
        let mut filled = bytes.to_vec();
        self.gaps.iter().for_each(|gap| filled[gap.clone()].fill(0));
        filled.resize(self.whole, 0);
        filled
    }
}

/// Gaps between the tensors of a bucket.
fn gaps(operands: &Operands<'_>, bucket: ByteRange) -> Vec<Range<usize>> {
    let ranges = (0..operands.input_count).map(|index| operands.value(index).range);
    let ranges: Vec<ByteRange> = ranges.collect();
    let begin = ranges.first().map_or(bucket.offset, |first| first.offset);
    let between = ranges.windows(2).map(|pair| pair[0].end() - begin..pair[1].offset - begin);
    between.filter(|gap| !gap.is_empty()).collect()
}

/// Prepares a reduce-scatter of a bucket, which accumulates from the second micro-batch on.
fn scatter(
    operands: &Operands<'_>,
    bucket: Bucket,
    comm: SharedComm,
    exchange: Exchange,
) -> Result<Run, KernelError> {
    let slice = operands.output(0);
    let input = operands.input_range(bucket.range)?;
    let adds = operands.adds();
    if !adds {
        let output = operands.target_bytes(slice)?;
        return Ok(Box::new(move |arena| {
            let filled = bucket.filled(input.of(arena));
            let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
            let scattered = comm.exchange(&exchange, &filled, output.of(arena));
            scattered.map_err(|error| error.to_string())
        }));
    }
    let output = operands.target::<f32>(slice)?;
    Ok(Box::new(move |arena| {
        let filled = bucket.filled(input.of(arena));
        let output = output.of(arena);
        let mut sums = vec![0f32; output.len()];
        let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        comm.exchange(&exchange, &filled, bytemuck::cast_slice_mut(&mut sums))
            .map_err(|error| error.to_string())?;
        for (all, sum) in output.iter_mut().zip(sums) {
            *all += sum;
        }
        Ok(())
    }))
}
