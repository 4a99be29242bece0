//! Root-mean-square and layer normalization.

use super::{KernelError, Operands, Run, by_float};
use crate::ops::layer_norm::cpu::{
    add_layer_norm_forward, layer_norm_backward, layer_norm_forward,
};
use crate::ops::rms_norm::cpu::{add_rms_norm_forward, rms_norm_backward, rms_norm_forward};

pub(super) fn rms_norm(operands: &Operands<'_>, eps: f64) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (x, weight) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (y, rstd) = (operands.target::<E>(2)?, operands.target::<f32>(3)?);
        Ok(Box::new(move |arena| {
            let (x, weight) = (x.of(arena), weight.of(arena));
            rms_norm_forward(x, weight, eps as f32, y.of(arena), rstd.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn add_rms_norm(operands: &Operands<'_>, eps: f64) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (x, delta) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let weight = operands.input::<E>(2)?;
        let (sum, y) = (operands.target::<E>(3)?, operands.target::<E>(4)?);
        let rstd = operands.target::<f32>(5)?;
        Ok(Box::new(move |arena| {
            add_rms_norm_forward(
                x.of(arena),
                delta.of(arena),
                weight.of(arena),
                eps as f32,
                sum.of(arena),
                y.of(arena),
                rstd.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn rms_norm_backward_call(
    operands: &Operands<'_>,
    residual: bool,
) -> Result<Run, KernelError> {
    let accumulate = operands.adds();
    let workspace = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (weight, rstd) = (operands.input::<E>(2)?, operands.input::<f32>(3)?);
        let dresidual = if residual { Some(operands.input::<E>(4)?) } else { None };
        let dx = operands.target::<E>(operands.output(0))?;
        let dweight = operands.target::<f32>(operands.output(1))?;
        Ok(Box::new(move |arena| {
            rms_norm_backward(
                dy.of(arena),
                x.of(arena),
                weight.of(arena),
                rstd.of(arena),
                dresidual.as_ref().map(|dresidual| dresidual.of(arena)),
                dx.of(arena),
                dweight.of(arena),
                accumulate,
                workspace.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn layer_norm(operands: &Operands<'_>, eps: f64) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (x, weight) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (bias, y) = (operands.input::<E>(2)?, operands.target::<E>(3)?);
        let (mean, rstd) = (operands.target::<f32>(4)?, operands.target::<f32>(5)?);
        Ok(Box::new(move |arena| {
            layer_norm_forward(
                x.of(arena),
                weight.of(arena),
                bias.of(arena),
                eps as f32,
                y.of(arena),
                mean.of(arena),
                rstd.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn add_layer_norm(operands: &Operands<'_>, eps: f64) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (x, delta) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (weight, bias) = (operands.input::<E>(2)?, operands.input::<E>(3)?);
        let (sum, y) = (operands.target::<E>(4)?, operands.target::<E>(5)?);
        let (mean, rstd) = (operands.target::<f32>(6)?, operands.target::<f32>(7)?);
        Ok(Box::new(move |arena| {
            add_layer_norm_forward(
                x.of(arena),
                delta.of(arena),
                weight.of(arena),
                bias.of(arena),
                eps as f32,
                sum.of(arena),
                y.of(arena),
                mean.of(arena),
                rstd.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn layer_norm_backward_call(
    operands: &Operands<'_>,
    residual: bool,
) -> Result<Run, KernelError> {
    let accumulate = operands.adds();
    let workspace = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let weight = operands.input::<E>(2)?;
        let (mean, rstd) = (operands.input::<f32>(3)?, operands.input::<f32>(4)?);
        let dresidual = if residual { Some(operands.input::<E>(5)?) } else { None };
        let dx = operands.target::<E>(operands.output(0))?;
        let dweight = operands.target::<f32>(operands.output(1))?;
        let dbias = operands.target::<f32>(operands.output(2))?;
        Ok(Box::new(move |arena| {
            layer_norm_backward(
                dy.of(arena),
                x.of(arena),
                weight.of(arena),
                mean.of(arena),
                rstd.of(arena),
                dresidual.as_ref().map(|dresidual| dresidual.of(arena)),
                dx.of(arena),
                dweight.of(arena),
                dbias.of(arena),
                accumulate,
                workspace.of(arena),
            );
            Ok(())
        }))
    })
}
