//! The largest magnitude of a tensor, implemented by deepwell-precision.

use deepwell_ir::Op;

use crate::KernelError;
use crate::ops::quantize::nvfp4::nvfp4_amax;
use crate::runtime::cpu::operands::{Operands, Run, by_float};

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Amax(op) = op else { return Err(operands.unknown_kernel()) };
    let &[rows, columns] = operands.shape(0) else {
        return Err(operands.unexpected(0, "a matrix"));
    };
    let (format, axis) = (op.format, op.axis);
    let amax = operands.target::<f32>(operands.output(0))?;
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let largest = nvfp4_amax(x.of(arena), [rows, columns], &format, axis);
            amax.of(arena).fill(largest.map_err(|error| error.to_string())?);
            Ok(())
        }))
    })
}
