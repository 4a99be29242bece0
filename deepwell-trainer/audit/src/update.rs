//! The gradient norm, the coefficients of a step, and the AdamW update of sampled elements in
//! `f64`.
//!
//! # Tolerance
//!
//! With `u = 2^-24`, the error of the first moment is 4 u of the two terms of its sum, which may
//! cancel. Dividing by the root of the second moment, at least `sqrt(1 - beta2)` of the gradient,
//! makes this error `4 u / sqrt(1 - beta2)` of the learning rate. Some ten roundings of the step
//! and three of the parameter are relative to the larger of weight and learning rate. The sum is
//! `(16 + 4 / sqrt(1 - beta2)) u` of the larger of weight and learning rate: 2e-6 for a beta2 of
//! 0.95. A weight rounded to BF16 is off by up to 4e-3 of itself. Masters in BF16 are rounded
//! stochastically: off by up to 8e-3.

use deepwell_ir::ops::{AdamW, AdamWCoefficients};
use deepwell_ir::{Call, DType, Program, ValueId};
use deepwell_kernels::KernelError;
use deepwell_kernels::ops::adamw::oracle::{Settings, bucket_coefficients, coefficients, update};
use deepwell_precision::moments::Moment;
use rayon::prelude::*;

use super::moments::StoredMoment;
use super::report::AuditReport;
use super::view::{Memory, View, sample_indices, view};

/// Unit roundoff of FP32, `2^-24`.
const ROUNDOFF: f64 = 1.0 / (1 << 24) as f64;

/// A coefficient is made in `f64` and rounded once; a factor of 2 for another `pow`.
const COEFFICIENT_TOLERANCE: f64 = 2.0 * ROUNDOFF;

/// Largest distance of a BF16 number to a neighbour, relative to the number: stochastic rounding
/// gives one of two neighbours.
const BF16_STEP: f64 = 1.0 / (1 << 7) as f64;

/// The norm is a sum in `f64` rounded once to `f32`; the factor of 16 is a margin.
const NORM_TOLERANCE: f64 = 16.0 * ROUNDOFF;

/// Compares the norm with the root of the sum of all squares, in `f64`.
pub(super) fn check_norm(
    report: &mut AuditReport,
    program: &Program,
    call: &Call,
    memory: &Memory<'_>,
) -> Result<(), KernelError> {
    let mut squares = 0.0;
    for operand in call.inputs() {
        let gradient = view(program, operand.value, memory)?;
        report.count_tensor(gradient.len());
        squares += (0..gradient.len())
            .into_par_iter()
            .map(|index| f64::from(gradient.float(index)).powi(2))
            .sum::<f64>();
    }
    report.calls_checked += 1;
    let expected = squares.sqrt();
    let got = view(program, call.outputs()[0].value, memory)?;
    let got = f64::from(got.float(0));
    let both_not_finite = !expected.is_finite() && !got.is_finite();
    if !((got - expected).abs() <= NORM_TOLERANCE * expected || both_not_finite) {
        report.add(&call.name, format!("expected a gradient norm of {expected:e}, got {got:e}"));
    }
    Ok(())
}

/// Sampled elements of one parameter.
struct Sampled {
    indices: Vec<usize>,
    master: Vec<f64>,
    first_moment: Vec<f64>,
    second_moment: Vec<f64>,
    gradient: Vec<f64>,
}

/// The operands of one parameter.
struct ParameterOperands {
    gradient: ValueId,
    master: ValueId,
    first_moment: ValueId,
    second_moment: ValueId,
}

impl ParameterOperands {
    fn of(call: &Call, parameter: usize) -> ParameterOperands {
        let at = AdamW::LEADING_OPERANDS + parameter * AdamW::OPERANDS_PER_PARAMETER;
        let value = |offset: usize| call.operands[at + offset].value;
        ParameterOperands {
            gradient: value(0),
            master: value(1),
            first_moment: value(2),
            second_moment: value(3),
        }
    }
}

/// The coefficients of a step that all buckets share.
pub(super) struct StepCoefficients {
    expected: [f64; AdamWCoefficients::COUNT],
    /// Applied and skipped steps.
    counters: [u64; 2],
}

impl StepCoefficients {
    /// Computes the expected coefficients before the call that writes them.
    pub(super) fn read(
        program: &Program,
        call: &Call,
        op: &AdamWCoefficients,
        memory: &Memory<'_>,
    ) -> Result<StepCoefficients, KernelError> {
        let operand = |index: usize| view(program, call.operands[index].value, memory);
        let norm = operand(0)?;
        let schedule = operand(1)?;
        let counters = operand(2)?;
        let [applied, skipped] = [counters.counter(0), counters.counter(1)];
        let settings = Settings {
            learning_rate: schedule.float(0).into(),
            beta1: op.beta1.into(),
            beta2: op.beta2.into(),
            eps: op.eps.into(),
            weight_decay: 0.0,
            max_grad_norm: schedule.float(1).into(),
            step: applied + 1,
            grad_norm: norm.float(0).into(),
        };
        let expected = match op.of_bucket {
            true => {
                let sums = operand(3)?;
                let sums = (0..sums.len()).map(|index| f64::from_bits(sums.counter(index)));
                bucket_coefficients(&settings, &sums.collect::<Vec<f64>>())
            }
            false => coefficients(&settings),
        };
        let is_skipped = expected[0] == 0.0;
        let counters = match (op.of_bucket, is_skipped) {
            (true, _) => [applied, skipped],
            (false, true) => [applied, skipped + 1],
            (false, false) => [applied + 1, skipped],
        };
        Ok(StepCoefficients { expected, counters })
    }

    /// Compares the coefficients after the call.
    pub(super) fn check(
        &self,
        report: &mut AuditReport,
        program: &Program,
        call: &Call,
        memory: &Memory<'_>,
    ) -> Result<(), KernelError> {
        report.calls_checked += 1;
        let counters = view(program, call.operands[2].value, memory)?;
        let expected = self.counters;
        let got = [counters.counter(0), counters.counter(1)];
        report.count_tensor(2);
        if got != expected {
            let what = format!("expected {expected:?} applied and skipped steps, got {got:?}");
            report.add(&call.name, what);
        }
        let made = view(program, call.outputs()[0].value, memory)?;
        report.count_tensor(made.len());
        for (index, &expected) in self.expected.iter().enumerate() {
            let got = f64::from(made.float(index));
            let both_nan = got.is_nan() && expected.is_nan();
            if !((got - expected).abs() <= COEFFICIENT_TOLERANCE * expected.abs() || both_nan) {
                let what = format!("coefficient {index}: expected {expected:e}, got {got:e}");
                report.add(&call.name, what);
            }
        }
        Ok(())
    }
}

/// Operands of a bucket's update before the update.
pub(super) struct BeforeUpdate {
    parameters: Vec<Sampled>,
    coefficients: [f64; AdamWCoefficients::COUNT],
}

impl BeforeUpdate {
    /// Reads the sampled operands.
    pub(super) fn read(
        program: &Program,
        call: &Call,
        op: &AdamW,
        memory: &Memory<'_>,
    ) -> Result<BeforeUpdate, KernelError> {
        let made = view(program, call.operands[0].value, memory)?;
        let coefficients = std::array::from_fn(|index| f64::from(made.float(index)));
        let parameters = (0..op.weight_decay.len())
            .map(|index| {
                let operands = ParameterOperands::of(call, index);
                let master = view(program, operands.master, memory)?;
                let indices = sample_indices(master.name, master.len());
                let sample = |view: View<'_>| -> Vec<f64> {
                    indices.iter().map(|&index| f64::from(view.float(index))).collect()
                };
                let moment = |id: ValueId, moment: Moment| {
                    let stored = view(program, id, memory)?;
                    let stored = StoredMoment::new(stored, master.shape, op.moments, moment);
                    Ok::<Vec<f64>, KernelError>(sample(stored.view()))
                };
                Ok(Sampled {
                    master: sample(master),
                    first_moment: moment(operands.first_moment, Moment::First)?,
                    second_moment: moment(operands.second_moment, Moment::Second)?,
                    gradient: sample(view(program, operands.gradient, memory)?),
                    indices,
                })
            })
            .collect::<Result<Vec<_>, KernelError>>()?;
        Ok(BeforeUpdate { parameters, coefficients })
    }

    /// Compares the operands after the update.
    pub(super) fn check(
        &self,
        report: &mut AuditReport,
        program: &Program,
        call: &Call,
        op: &AdamW,
        memory: &Memory<'_>,
    ) -> Result<(), KernelError> {
        report.calls_checked += 1;
        let [_, learning_rate, clip, _, _, one_minus_beta2, ..] = self.coefficients;
        let of_weight = (16.0 + 4.0 / one_minus_beta2.sqrt()) * ROUNDOFF;
        for (index, before) in self.parameters.iter().enumerate() {
            let Sampled { master, gradient, first_moment, second_moment, .. } = before;
            let decay = op.weight_decay[index].into();
            let expected =
                update(master, gradient, first_moment, second_moment, &self.coefficients, decay);
            let operands = ParameterOperands::of(call, index);
            let weight_tolerance =
                |at: usize| of_weight * master[at].abs().max(learning_rate.abs());
            let first_tolerance = |at: usize| {
                let gradient = (gradient[at] * clip).abs();
                8.0 * ROUNDOFF * (first_moment[at].abs() + gradient) + TINY
            };
            let second_tolerance = |at: usize| 8.0 * ROUNDOFF * expected.v[at] + TINY;
            let mut compare = |got: View<'_>, expected: &[f64], tolerance: Tolerance<'_>| {
                report.count_tensor(before.indices.len());
                let what = differences(&got, &before.indices, expected, tolerance);
                if let Some(what) = what {
                    report.add(&call.name, what);
                }
            };
            let master = view(program, operands.master, memory)?;
            let is_bf16 = program.value(operands.master).dtype == DType::Bf16;
            let weight_tolerance = |at: usize| {
                weight_tolerance(at)
                    + if is_bf16 { BF16_STEP * expected.param[at].abs() } else { 0.0 }
            };
            compare(master, &expected.param, &weight_tolerance);
            let stored = |id: ValueId, moment: Moment| {
                let stored = view(program, id, memory)?;
                Ok::<_, KernelError>(StoredMoment::new(stored, master.shape, op.moments, moment))
            };
            let first = stored(operands.first_moment, Moment::First)?;
            let second = stored(operands.second_moment, Moment::Second)?;
            compare(first.view(), &expected.m, &|at| {
                first_tolerance(at) + first.storage_error(before.indices[at], expected.m[at])
            });
            compare(second.view(), &expected.v, &|at| {
                second_tolerance(at) + second.storage_error(before.indices[at], expected.v[at])
            });
        }
        Ok(())
    }
}

/// Allowed difference of the sample at an index.
type Tolerance<'a> = &'a dyn Fn(usize) -> f64;

/// The smallest normal FP32 number; below it the relative tolerances do not hold.
const TINY: f64 = f32::MIN_POSITIVE as f64;

fn differences(
    got: &View<'_>,
    indices: &[usize],
    expected: &[f64],
    tolerance: Tolerance<'_>,
) -> Option<String> {
    let is_right = |at: usize| {
        let got = f64::from(got.float(indices[at]));
        let expected = expected[at];
        let same = got == expected || (got.is_nan() && expected.is_nan());
        same || (got - expected).abs() <= tolerance(at)
    };
    let wrong: Vec<usize> = (0..indices.len()).filter(|&at| !is_right(at)).collect();
    let &first = wrong.first()?;
    let all_bf16 = indices.iter().all(|&index| got.float(index).to_bits() & 0xFFFF == 0);
    Some(format!(
        "`{}`: {} of {} sampled elements are not AdamW's, first at {}: expected {:e} to within \
         {:.1e}, got {:e}{}",
        got.name,
        wrong.len(),
        indices.len(),
        got.coordinate(indices[first]),
        expected[first],
        tolerance(first),
        got.float(indices[first]),
        if all_bf16 { "; all sampled elements are BF16 numbers" } else { "" },
    ))
}
