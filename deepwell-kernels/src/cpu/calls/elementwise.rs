//! RoPE, SwiGLU, GELU, sums and casts.

use deepwell_ir::ops::Rope;

use super::{KernelError, Operands, Run, by_float};
use crate::ops::add::cpu::{add as add_kernel, bias_add_backward};
use crate::ops::cast::cpu::cast as cast_kernel;
use crate::ops::gelu::cpu::{gelu_backward as gelu_backward_kernel, gelu_forward};
use crate::ops::rope::cpu::{RopeShape, rope_backward, rope_forward, rope_tables};
use crate::ops::swiglu::cpu::{swiglu_backward as swiglu_backward_kernel, swiglu_forward};

pub(super) fn rope(operands: &Operands<'_>, op: &Rope, backward: bool) -> Result<Run, KernelError> {
    let seq = operands.program.seq;
    let shape = RopeShape { heads: op.heads, head_dim: op.head_dim, seq };
    let factor = op.attention_factor;
    let frequencies = op.inverse_frequencies.clone();
    let tables = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let (x, y) = (operands.input::<E>(0)?, operands.target::<E>(1)?);
        Ok(Box::new(move |arena| {
            // A few thousand sines: less work than a pass over one head's queries.
            // The workspace is as long as a micro-batch, the tables only as one sequence.
            let numbers = seq * frequencies.len();
            let (cos, sin) = tables.of(arena)[..2 * numbers].split_at_mut(numbers);
            rope_tables(&frequencies, seq, cos, sin);
            if factor != 1.0 {
                cos.iter_mut().chain(sin.iter_mut()).for_each(|value| *value *= factor);
            }
            if backward {
                rope_backward(x.of(arena), shape, cos, sin, y.of(arena));
            } else {
                rope_forward(x.of(arena), shape, cos, sin, y.of(arena));
            }
            Ok(())
        }))
    })
}

pub(super) fn swiglu(operands: &Operands<'_>) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (gate, up) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            swiglu_forward(gate.of(arena), up.of(arena), out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn swiglu_backward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let dout = operands.input::<E>(0)?;
        let (gate, up) = (operands.input::<E>(1)?, operands.input::<E>(2)?);
        let (dgate, dup) = (operands.target::<E>(3)?, operands.target::<E>(4)?);
        Ok(Box::new(move |arena| {
            swiglu_backward_kernel(
                dout.of(arena),
                gate.of(arena),
                up.of(arena),
                dgate.of(arena),
                dup.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn gelu(operands: &Operands<'_>, tanh: bool) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (x, y) = (operands.input::<E>(0)?, operands.target::<E>(1)?);
        Ok(Box::new(move |arena| {
            gelu_forward(x.of(arena), tanh, y.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn gelu_backward(operands: &Operands<'_>, tanh: bool) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let dx = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            gelu_backward_kernel(dy.of(arena), x.of(arena), tanh, dx.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn add(operands: &Operands<'_>) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (a, b) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            add_kernel(a.of(arena), b.of(arena), out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn cast(operands: &Operands<'_>) -> Result<Run, KernelError> {
    by_float!(operands, 0, Source => by_float!(operands, 1, Target => {
        let (x, y) = (operands.input::<Source>(0)?, operands.target::<Target>(1)?);
        Ok(Box::new(move |arena| {
            cast_kernel(x.of(arena), y.of(arena));
            Ok(())
        }))
    }))
}

pub(super) fn bias_grad(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let accumulate = operands.adds();
    let workspace = operands.workspace::<f32>()?;
    let dbias = operands.target::<f32>(1)?;
    by_float!(operands, 0, E => {
        let dy = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            bias_add_backward(dy.of(arena), dbias.of(arena), accumulate, workspace.of(arena));
            Ok(())
        }))
    })
}
