//! Token embedding.

use super::{KernelError, Operands, Run, by_float};
use crate::ops::embedding::cpu::{embedding_backward, embedding_forward};

pub(super) fn forward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let &[vocab, width] = operands.shape(1) else { return Err(operands.unexpected(1, "a matrix")) };
    let tokens = operands.input::<i32>(0)?;
    by_float!(operands, 1, E => {
        let (table, out) = (operands.input::<E>(1)?, operands.target::<E>(2)?);
        Ok(Box::new(move |arena| {
            embedding_forward(tokens.of(arena), table.of(arena), vocab, width, out.of(arena))
                .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn backward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let &[vocab, width] = operands.shape(2) else { return Err(operands.unexpected(2, "a matrix")) };
    let accumulate = operands.adds();
    let (tokens, dtable) = (operands.input::<i32>(0)?, operands.target::<f32>(2)?);
    by_float!(operands, 1, E => {
        let dout = operands.input::<E>(1)?;
        Ok(Box::new(move |arena| {
            embedding_backward(
                tokens.of(arena),
                dout.of(arena),
                vocab,
                width,
                dtable.of(arena),
                accumulate,
            )
            .map_err(|error| error.to_string())
        }))
    })
}
