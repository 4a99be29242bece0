//! Exchanges with other ranks, by the backend's [`Comm`](crate::Comm).

use std::sync::{Arc, PoisonError};

use deepwell_ir::Op;

use crate::cpu::calls::{Operands, Run};
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
    let input = match operands.input_count {
        0 => None,
        _ => Some(operands.input_bytes(0)?),
    };
    let output = match operands.values.get(operands.output(0)) {
        None => None,
        Some(_) => Some(operands.target_bytes(operands.output(0))?),
    };
    Ok(Box::new(move |arena| {
        let input = input.as_ref().map_or(&[][..], |input| input.of(arena));
        let output = output.as_ref().map_or(&mut [][..], |output| output.of(arena));
        let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        comm.exchange(&exchange, input, output).map_err(|error| error.to_string())
    }))
}
