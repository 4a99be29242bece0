//! A copy within memory: on a CPU, device and host are one.

use deepwell_ir::{DType, Op};
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::operands::{Operands, Run, Stored};
use crate::runtime::cpu::parallel::ELEMENTS_PER_CHUNK;

pub(super) fn prepare(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    match operands.dtype(0) {
        DType::F32 => copy::<f32>(operands),
        DType::Bf16 => copy::<half::bf16>(operands),
        DType::E4m3 => copy::<u8>(operands),
        _ => Err(operands.unexpected(0, "f32, bf16 or e4m3")),
    }
}

fn copy<E: Stored + Send + Sync>(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let (from, to) = (operands.input::<E>(0)?, operands.target::<E>(1)?);
    Ok(Box::new(move |arena| {
        let parts = to.of(arena).par_chunks_mut(ELEMENTS_PER_CHUNK);
        parts
            .zip(from.of(arena).par_chunks(ELEMENTS_PER_CHUNK))
            .for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }))
}
