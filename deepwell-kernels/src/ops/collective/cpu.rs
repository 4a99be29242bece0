//! Exchanges with other ranks, by the backend's [`Comm`](crate::Comm).

use std::sync::{Arc, PoisonError};

use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{ByteRange, Op};

use crate::cpu::calls::{Operands, Run, SharedComm};
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
    let own = {
        let comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        (comm.rank(), comm.world_size())
    };
    if own != (ranks.rank, ranks.world_size) {
        let (rank, size) = own;
        return Err(operands.refused(format!(
            "the program is for rank {} of {}, the backend is rank {rank} of {size}",
            ranks.rank, ranks.world_size
        )));
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
            if operands.adds() || own.bytes < whole {
                return scatter(operands, own, whole, comm, exchange);
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

/// Sums of a bucket that may be shorter than its slices, which zeros fill up; added to what is
/// there from the second micro-batch on.
fn scatter(
    operands: &Operands<'_>,
    bucket: ByteRange,
    whole: usize,
    comm: SharedComm,
    exchange: Exchange,
) -> Result<Run, KernelError> {
    let own = operands.output(0);
    let (input, adds) = (operands.input_range(bucket)?, operands.adds());
    if !adds {
        let output = operands.target_bytes(own)?;
        return Ok(Box::new(move |arena| {
            let mut filled = input.of(arena).to_vec();
            filled.resize(whole, 0);
            let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
            let scattered = comm.exchange(&exchange, &filled, output.of(arena));
            scattered.map_err(|error| error.to_string())
        }));
    }
    let output = operands.target::<f32>(own)?;
    Ok(Box::new(move |arena| {
        let mut filled = input.of(arena).to_vec();
        filled.resize(whole, 0);
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
