//! Gradient norm and AdamW.

use deepwell_ir::ops::AdamW;

use super::{KernelError, Operands, Run};
use crate::cpu::arena::{In, Out};
use crate::ops::adamw::cpu::{AdamwTensor, StepScalars, adamw as adamw_kernel};
use crate::ops::grad_norm::cpu::sum_of_squares;

pub(super) fn grad_norm(operands: &Operands<'_>) -> Result<Run, KernelError> {
    let gradients: Vec<In<f32>> =
        (0..operands.input_count).map(|i| operands.input(i)).collect::<Result<_, _>>()?;
    let norm = operands.target::<f32>(operands.output(0))?;
    Ok(Box::new(move |arena| {
        // In operand order, so that the sum is the same at any thread count.
        let total: f64 = gradients.iter().map(|g| sum_of_squares(g.of(arena))).sum();
        norm.of(arena)[0] = total.sqrt() as f32;
        Ok(())
    }))
}

struct Parameter {
    gradient: In<f32>,
    master: Out<f32>,
    first_moment: Out<f32>,
    second_moment: Out<f32>,
    weight_decay: f64,
}

pub(super) fn adamw(operands: &Operands<'_>, op: &AdamW) -> Result<Run, KernelError> {
    let (norm, schedule) = (operands.input::<f32>(0)?, operands.input::<f32>(1)?);
    let counters = operands.target::<u64>(2)?;
    let parameters = op
        .weight_decay
        .iter()
        .enumerate()
        .map(|(index, &weight_decay)| {
            let at = AdamW::LEADING_OPERANDS + index * AdamW::OPERANDS_PER_PARAMETER;
            Ok(Parameter {
                gradient: operands.input(at)?,
                master: operands.target(at + 1)?,
                first_moment: operands.target(at + 2)?,
                second_moment: operands.target(at + 3)?,
                weight_decay: f64::from(weight_decay),
            })
        })
        .collect::<Result<Vec<_>, KernelError>>()?;
    let (beta1, beta2, eps) = (f64::from(op.beta1), f64::from(op.beta2), f64::from(op.eps));
    Ok(Box::new(move |arena| {
        let grad_norm = norm.of(arena)[0];
        let counters = counters.of(arena);
        if !grad_norm.is_finite() {
            counters[1] += 1;
            return Ok(());
        }
        counters[0] += 1;
        let schedule = schedule.of(arena);
        let scalars = StepScalars {
            learning_rate: f64::from(schedule[0]),
            beta1,
            beta2,
            eps,
            max_grad_norm: f64::from(schedule[1]),
            step: counters[0],
            grad_norm,
        };
        for parameter in &parameters {
            let tensor = AdamwTensor {
                param: parameter.master.of(arena),
                grad: parameter.gradient.of(arena),
                m: parameter.first_moment.of(arena),
                v: parameter.second_moment.of(arena),
                weight_decay: parameter.weight_decay,
            };
            // The norm is finite, so nothing is skipped: the step has been counted above.
            let _ = adamw_kernel(&mut [tensor], &scalars);
        }
        Ok(())
    }))
}
