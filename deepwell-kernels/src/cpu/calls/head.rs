//! Output head and cross-entropy.

use super::{KernelError, Operands, Run, by_float};
use crate::ops::linear_cross_entropy::cpu::{HeadGradients, linear_cross_entropy_on};

fn prepare(operands: &Operands<'_>, with_gradients: bool) -> Result<Run, KernelError> {
    let tier = operands.tier()?;
    let accumulate = operands.adds();
    let hidden = operands.shape(0)[1];
    let workspace = operands.workspace::<u8>()?;
    let (targets, loss_scale) = (operands.input::<i32>(2)?, operands.input::<f32>(3)?);
    let loss = operands.target::<f32>(4)?;
    by_float!(operands, 0, E => {
        let (x, w) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let gradients = if with_gradients {
            Some((operands.target::<E>(5)?, operands.target::<f32>(6)?))
        } else {
            None
        };
        Ok(Box::new(move |arena| {
            let gradients = gradients
                .as_ref()
                .map(|(dx, dw)| HeadGradients { dx: dx.of(arena), dw: dw.of(arena) });
            linear_cross_entropy_on(
                tier,
                x.of(arena),
                w.of(arena),
                targets.of(arena),
                hidden,
                loss_scale.of(arena)[0],
                &mut loss.of(arena)[0],
                gradients,
                accumulate,
                workspace.of(arena),
            )
            .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn forward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    prepare(operands, false)
}

pub(super) fn with_gradients(operands: &Operands<'_>) -> Result<Run, KernelError> {
    prepare(operands, true)
}
