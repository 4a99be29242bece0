//! Output head and cross-entropy.

use deepwell_ir::Access;

use super::{KernelError, Operands, Run, by_float};
use crate::cpu::linear_cross_entropy::{
    HeadShape, linear_cross_entropy, linear_cross_entropy_grad,
};

fn shape(operands: &Operands<'_>) -> HeadShape {
    let (x, w) = (operands.shape(0), operands.shape(1));
    HeadShape { tokens: x[0], hidden: x[1], vocab: w[0] }
}

/// Whether output `index` is added to what is there.
fn accumulates(operands: &Operands<'_>, index: usize) -> bool {
    operands.call.outputs()[index].access == Access::Update
}

pub(super) fn forward(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let (tier, shape) = (operands.tier()?, shape(operands));
    let accumulate = accumulates(operands, 0);
    let workspace = operands.workspace::<u8>();
    let (targets, loss_scale) = (operands.input::<i32>(2)?, operands.input::<f32>(3)?);
    let loss = operands.target::<f32>(4)?;
    by_float!(operands, 0, E => {
        let (x, w) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        Ok(Box::new(move |arena| {
            linear_cross_entropy(
                tier,
                &shape,
                x.of(arena),
                w.of(arena),
                targets.of(arena),
                loss_scale.of(arena)[0],
                &mut loss.of(arena)[0],
                accumulate,
                workspace.of(arena),
            )
            .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn with_gradients(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let (tier, shape) = (operands.tier()?, shape(operands));
    let (accumulate_loss, accumulate_dw) = (accumulates(operands, 0), accumulates(operands, 2));
    let workspace = operands.workspace::<u8>();
    let (targets, loss_scale) = (operands.input::<i32>(2)?, operands.input::<f32>(3)?);
    let (loss, dw) = (operands.target::<f32>(4)?, operands.target::<f32>(6)?);
    by_float!(operands, 0, E => {
        let (x, w) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let dx = operands.target::<E>(5)?;
        Ok(Box::new(move |arena| {
            linear_cross_entropy_grad(
                tier,
                &shape,
                x.of(arena),
                w.of(arena),
                targets.of(arena),
                loss_scale.of(arena)[0],
                &mut loss.of(arena)[0],
                accumulate_loss,
                dx.of(arena),
                dw.of(arena),
                accumulate_dw,
                workspace.of(arena),
            )
            .map_err(|error| error.to_string())
        }))
    })
}
