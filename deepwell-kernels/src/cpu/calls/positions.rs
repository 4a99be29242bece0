//! Learned positions.

use super::{KernelError, Operands, Run, by_float};
use crate::ops::add_positions::cpu::{
    add_positions_backward, add_positions_forward, too_few_positions,
};

/// The sequence length and the width of a position table at operand `index`, which must have a
/// row for each token of a sequence.
fn sizes(operands: &Operands<'_>, index: usize) -> Result<(usize, usize), KernelError> {
    let seq = operands.program.seq;
    match *operands.shape(index) {
        [positions, width] if positions >= seq && width > 0 && seq > 0 => Ok((seq, width)),
        [positions, _] => Err(KernelError::Run {
            call: operands.call.name.clone(),
            what: too_few_positions(positions, seq),
        }),
        _ => Err(operands.unexpected(index, "a matrix")),
    }
}

pub(super) fn forward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let (seq, width) = sizes(operands, 1)?;
    by_float!(operands, 0, E => {
        let (x, table) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            add_positions_forward(x.of(arena), table.of(arena), seq, width, out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn backward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let (seq, width) = sizes(operands, 1)?;
    let accumulate = operands.adds();
    let dtable = operands.target::<f32>(1)?;
    by_float!(operands, 0, E => {
        let dout = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            add_positions_backward(dout.of(arena), seq, width, dtable.of(arena), accumulate);
            Ok(())
        }))
    })
}
