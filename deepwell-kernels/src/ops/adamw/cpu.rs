//! AdamW over many tensors, with gradient clipping; non-finite steps are skipped.
//!
//! Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101,
//! algorithm 2, in the form of `torch.optim.AdamW` (the decay is multiplied by the learning rate,
//! `eps` is added after the bias correction), with the clip factor of
//! `torch.nn.utils.clip_grad_norm_`.

use deepwell_ir::ops::{AdamW, AdamWCoefficients, MomentFormat};
use deepwell_ir::{DType, Op};
use rayon::prelude::*;

use super::bf16::MomentsMut;
use super::{bf16, fp8};
use crate::KernelError;
use crate::runtime::cpu::arena::{In, Out};
use crate::runtime::cpu::operands::{Operands, Run};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};

/// One parameter tensor with its gradient and moments, all of the same length.
#[derive(Debug)]
pub struct AdamwTensor<'a> {
    /// Master weights, updated in place.
    pub param: &'a mut [f32],
    /// The gradient, before clipping.
    pub grad: &'a [f32],
    /// First moment, the running mean of the gradient.
    pub m: &'a mut [f32],
    /// Second moment, the running mean of the squared gradient.
    pub v: &'a mut [f32],
    /// Decoupled weight decay per unit of learning rate; usually zero for norms and biases.
    pub weight_decay: f64,
}

/// Scalar settings of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepScalars {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment, in `0..1`.
    pub beta1: f64,
    /// Decay of the second moment, in `0..1`.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Gradients are scaled down to this global norm; infinite for no clipping.
    pub max_grad_norm: f64,
    /// Number of this step, from 1. Counts applied steps only: a skipped step is repeated under the
    /// same number.
    pub step: u64,
    /// The global norm of the gradients, from
    /// [`global_norm`](crate::ops::grad_norm::cpu::global_norm).
    pub grad_norm: f32,
}

impl StepScalars {
    /// The factor on the gradients: `min(1, max_grad_norm / (grad_norm + 1e-6))`.
    pub fn clip_factor(&self) -> f32 {
        (self.max_grad_norm / (f64::from(self.grad_norm) + 1e-6)).min(1.0) as f32
    }
}

/// Result of [`adamw`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a skipped step must not be counted"]
pub struct StepOutcome {
    /// Whether the step was skipped, with no change, because the gradient norm was not finite.
    pub skipped: bool,
}

/// Scalars in the form that the loop over elements uses, see [`AdamWCoefficients`].
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    /// From 1; 0 if the step is skipped.
    step: f32,
    learning_rate: f32,
    clip: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    root_correction: f32,
    eps: f32,
}

impl Coefficients {
    /// Computes in `f64`, where `1 - beta2` and the powers of the betas keep their precision.
    fn new(scalars: &StepScalars) -> Self {
        let StepScalars { learning_rate, beta1, beta2, eps, .. } = *scalars;
        let step = scalars.step as f64;
        Coefficients {
            step: if scalars.grad_norm.is_finite() { step as f32 } else { 0.0 },
            learning_rate: learning_rate as f32,
            clip: scalars.clip_factor(),
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (learning_rate / (1.0 - beta1.powf(step))) as f32,
            root_correction: (1.0 / (1.0 - beta2.powf(step)).sqrt()) as f32,
            eps: eps as f32,
        }
    }

    /// Number of the step, from 1.
    pub(super) fn step(&self) -> u64 {
        self.step as u64
    }

    /// Returns the scalars in the order of the op's output.
    fn to_array(self) -> [f32; AdamWCoefficients::COUNT] {
        [
            self.step,
            self.learning_rate,
            self.clip,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.step_size,
            self.root_correction,
            self.eps,
        ]
    }

    pub(super) fn from_array(array: [f32; AdamWCoefficients::COUNT]) -> Coefficients {
        let [step, learning_rate, clip, one_minus_beta1, ..] = array;
        let [.., beta2, one_minus_beta2, step_size, root_correction, eps] = array;
        Coefficients {
            step,
            learning_rate,
            clip,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            step_size,
            root_correction,
            eps,
        }
    }

    /// Factor of weight decay on a weight.
    pub(super) fn decay(&self, weight_decay: f64) -> f32 {
        (1.0 - f64::from(self.learning_rate) * weight_decay) as f32
    }
}

/// One AdamW step over all tensors; does nothing when `grad_norm` is not finite.
///
/// Per element, with `g = grad * clip_factor`, `t = step`:
///
/// ```text
/// m = m + (1 - beta1) (g - m)
/// v = beta2 v + (1 - beta2) g^2
/// param = param (1 - learning_rate weight_decay)
///       - learning_rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// # Panics
///
/// If the slices of a tensor differ in length, or `step` is zero.
pub fn adamw(tensors: &mut [AdamwTensor<'_>], scalars: &StepScalars) -> StepOutcome {
    assert!(scalars.step > 0, "`step` counts from 1");
    for (index, tensor) in tensors.iter().enumerate() {
        let len = tensor.param.len();
        assert_eq!(tensor.grad.len(), len, "`grad` of tensor {index} differs in length");
        assert_eq!(tensor.m.len(), len, "`m` of tensor {index} differs in length");
        assert_eq!(tensor.v.len(), len, "`v` of tensor {index} differs in length");
    }
    let coefficients = Coefficients::new(scalars);
    if coefficients.step == 0.0 {
        return StepOutcome { skipped: true };
    }
    tensors.par_iter_mut().for_each(|tensor| apply(tensor, coefficients));
    StepOutcome { skipped: false }
}

fn apply(tensor: &mut AdamwTensor<'_>, c: Coefficients) {
    let decay = c.decay(tensor.weight_decay);
    tensor
        .param
        .par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(tensor.grad.par_chunks(ELEMENTS_PER_CHUNK))
        .zip(tensor.m.par_chunks_mut(ELEMENTS_PER_CHUNK))
        .zip(tensor.v.par_chunks_mut(ELEMENTS_PER_CHUNK))
        .for_each(|(((param, grad), m), v)| {
            vectorized(
                #[inline(always)]
                || update(param, grad, m, v, decay, c),
            );
        });
}

#[inline(always)]
pub(super) fn update(
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    decay: f32,
    c: Coefficients,
) {
    for (((param, &grad), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let grad = grad * c.clip;
        let m_new = *m + c.one_minus_beta1 * (grad - *m);
        let v_new = c.beta2 * *v + c.one_minus_beta2 * (grad * grad);
        let denominator = v_new.sqrt() * c.root_correction + c.eps;
        *m = m_new;
        *v = v_new;
        *param = *param * decay - c.step_size * (m_new / denominator);
    }
}

pub(super) fn prepare_coefficients(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::AdamWCoefficients(op) = op else { return Err(operands.unknown_kernel()) };
    let norm = operands.input::<f32>(0)?;
    let schedule = operands.input::<f32>(1)?;
    let scalars =
        |op: &AdamWCoefficients, schedule: &[f32], applied: u64, grad_norm: f32| StepScalars {
            learning_rate: f64::from(schedule[0]),
            beta1: f64::from(op.beta1),
            beta2: f64::from(op.beta2),
            eps: f64::from(op.eps),
            max_grad_norm: f64::from(schedule[1]),
            step: applied + 1,
            grad_norm,
        };
    let op = op.clone();
    if op.of_bucket {
        let counters = operands.input::<u64>(2)?;
        let sums = operands.input::<u64>(3)?;
        let coefficients = operands.target::<f32>(4)?;
        return Ok(Box::new(move |arena| {
            let (norm, applied) = (norm.of(arena)[0], counters.of(arena)[0]);
            // A norm of zero does not clip.
            let norm = if norm.is_finite() { norm } else { 0.0 };
            let mut made = Coefficients::new(&scalars(&op, schedule.of(arena), applied, norm));
            if !sums.of(arena).iter().all(|&sum| f64::from_bits(sum).is_finite()) {
                made.step = 0.0;
            }
            coefficients.of(arena).copy_from_slice(&made.to_array());
            Ok(())
        }));
    }
    let counters = operands.target::<u64>(2)?;
    let coefficients = operands.target::<f32>(3)?;
    Ok(Box::new(move |arena| {
        let grad_norm = norm.of(arena)[0];
        let counters = counters.of(arena);
        let made = Coefficients::new(&scalars(&op, schedule.of(arena), counters[0], grad_norm));
        counters[if made.step == 0.0 { 1 } else { 0 }] += 1;
        coefficients.of(arena).copy_from_slice(&made.to_array());
        Ok(())
    }))
}

struct Parameter {
    /// Among the parameters of the program.
    index: usize,
    gradient: In<f32>,
    master: Master,
    moments: Moments,
    weight_decay: f64,
}

/// Master weights.
enum Master {
    Fp32(Out<f32>),
    Bf16(Out<half::bf16>),
}

impl Master {
    fn of(operands: &Operands<'_>, index: usize) -> Result<Master, KernelError> {
        Ok(match operands.dtype(index) {
            DType::Bf16 => Master::Bf16(operands.target(index)?),
            _ => Master::Fp32(operands.target(index)?),
        })
    }
}

/// First and second moment.
enum Moments {
    Fp32([Out<f32>; 2]),
    Fp8([Out<u8>; 2]),
}

impl Moments {
    fn of(
        operands: &Operands<'_>,
        first: usize,
        format: MomentFormat,
    ) -> Result<Moments, KernelError> {
        Ok(match format {
            MomentFormat::Fp32 => {
                Moments::Fp32([operands.target(first)?, operands.target(first + 1)?])
            }
            MomentFormat::Fp8 => {
                Moments::Fp8([operands.target_bytes(first)?, operands.target_bytes(first + 1)?])
            }
        })
    }
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::AdamW(op) = op else { return Err(operands.unknown_kernel()) };
    let copies = op
        .copies_with_outputs()
        .map(|(copy, outputs)| {
            let first = op.input_count() + outputs.start;
            let outputs = first..first + outputs.len();
            operands.run_of_part(&copy.kind.to_op(), &[AdamW::master(copy.parameter)], outputs)
        })
        .collect::<Result<Vec<Run>, KernelError>>()?;
    let coefficients = operands.input::<f32>(0)?;
    let parameters = op
        .weight_decay
        .iter()
        .enumerate()
        .map(|(index, &weight_decay)| {
            let at = AdamW::LEADING_OPERANDS + index * AdamW::OPERANDS_PER_PARAMETER;
            Ok(Parameter {
                index: op.parameters.start + index,
                gradient: operands.input(at)?,
                master: Master::of(operands, at + 1)?,
                moments: Moments::of(operands, at + 2, op.moments)?,
                weight_decay: f64::from(weight_decay),
            })
        })
        .collect::<Result<Vec<_>, KernelError>>()?;
    Ok(Box::new(move |arena| {
        let coefficients: &[f32; AdamWCoefficients::COUNT] =
            coefficients.of(arena).try_into().map_err(|_| "expected nine coefficients")?;
        let coefficients = Coefficients::from_array(*coefficients);
        if coefficients.step == 0.0 {
            return Ok(());
        }
        for parameter in &parameters {
            let grad = parameter.gradient.of(arena);
            let (index, weight_decay) = (parameter.index, parameter.weight_decay);
            let decay = coefficients.decay(weight_decay);
            match (&parameter.master, &parameter.moments) {
                (Master::Fp32(master), Moments::Fp32([first, second])) => {
                    let (m, v) = (first.of(arena), second.of(arena));
                    let param = master.of(arena);
                    let mut tensor = AdamwTensor { param, grad, m, v, weight_decay };
                    apply(&mut tensor, coefficients);
                }
                (Master::Fp32(master), Moments::Fp8([first, second])) => {
                    let moments = [first.of(arena), second.of(arena)];
                    fp8::apply(master.of(arena), grad, moments, index, decay, coefficients);
                }
                (Master::Bf16(master), moments) => {
                    let moments = match moments {
                        Moments::Fp32(both) => {
                            MomentsMut::Fp32(both.each_ref().map(|it| it.of(arena)))
                        }
                        Moments::Fp8(both) => {
                            MomentsMut::Fp8(both.each_ref().map(|it| it.of(arena)))
                        }
                    };
                    bf16::apply(master.of(arena), grad, moments, index, decay, coefficients);
                }
            }
        }
        copies.iter().try_for_each(|copy| copy(arena))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::adamw::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, assert_close_each, for_thread_counts, to_f64,
    };

    #[derive(Clone, Debug, PartialEq)]
    struct State {
        param: Vec<f32>,
        m: Vec<f32>,
        v: Vec<f32>,
    }

    const SCALARS: StepScalars = StepScalars {
        learning_rate: 3e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        max_grad_norm: 1.0,
        step: 1,
        grad_norm: 1.0,
    };

    fn tensors<'a>(
        states: &'a mut [State],
        grads: &'a [Vec<f32>],
        weight_decay: f64,
    ) -> Vec<AdamwTensor<'a>> {
        states
            .iter_mut()
            .zip(grads)
            .enumerate()
            .map(|(index, (state, grad))| AdamwTensor {
                param: &mut state.param,
                grad,
                m: &mut state.m,
                v: &mut state.v,
                weight_decay: if index == 0 { 0.0 } else { weight_decay },
            })
            .collect()
    }

    fn check(lengths: &[usize], scalars: StepScalars, grad_size: f32) {
        let mut random = Random::new(lengths.len() as u64);
        let mut random_tensor = |len: usize, size: f32| -> Vec<f32> {
            random.normals::<f32>(len).into_iter().map(|x| x * size).collect()
        };
        let before: Vec<State> = lengths
            .iter()
            .map(|&len| State {
                param: random_tensor(len, 0.02),
                m: random_tensor(len, 0.1 * grad_size),
                v: random_tensor(len, 0.1 * grad_size).iter().map(|x| x * x).collect(),
            })
            .collect();
        let grads: Vec<Vec<f32>> =
            lengths.iter().map(|&len| random_tensor(len, grad_size)).collect();

        for_thread_counts(|| {
            let mut states = before.clone();
            let outcome = adamw(&mut tensors(&mut states, &grads, 0.1), &scalars);
            assert!(!outcome.skipped);
            for (index, state) in states.iter().enumerate() {
                let old = &before[index];
                let expected = oracle::step(
                    &to_f64(&old.param),
                    &to_f64(&grads[index]),
                    &to_f64(&old.m),
                    &to_f64(&old.v),
                    &oracle::Settings {
                        learning_rate: scalars.learning_rate,
                        beta1: scalars.beta1,
                        beta2: scalars.beta2,
                        eps: scalars.eps,
                        weight_decay: if index == 0 { 0.0 } else { 0.1 },
                        max_grad_norm: scalars.max_grad_norm,
                        step: scalars.step,
                        grad_norm: f64::from(scalars.grad_norm),
                    },
                );
                // m: four roundings relative to its terms, which may cancel; v: five, all of one
                // sign. The update: ten more, relative to the step's size, and one rounding of the
                // parameter.
                let clip = f64::from(scalars.clip_factor());
                let m_size: Vec<f64> = (0..state.m.len())
                    .map(|i| {
                        let m = f64::from(old.m[i]);
                        let g = f64::from(grads[index][i]) * clip;
                        (m.abs() + g.abs()) * 4.0 * 2f64.powi(-24) + 1e-45
                    })
                    .collect();
                assert_close_each("m", &state.m, &expected.m, 0.0, &m_size);
                assert_close("v", &state.v, &expected.v, 5.0 * 2f64.powi(-24), 2e-45);
                let param_error: Vec<f64> = (0..state.m.len())
                    .map(|i| {
                        let rate =
                            scalars.learning_rate / (1.0 - scalars.beta1.powf(scalars.step as f64));
                        let correction = (1.0 - scalars.beta2.powf(scalars.step as f64)).sqrt();
                        let denominator = expected.v[i].sqrt() / correction + scalars.eps;
                        let step = rate * expected.m[i].abs() / denominator;
                        rate * m_size[i] / denominator
                            + 10.0 * 2f64.powi(-24) * step
                            + 3.0 * 2f64.powi(-24) * f64::from(old.param[i]).abs()
                    })
                    .collect();
                assert_close_each("param", &state.param, &expected.param, 0.0, &param_error);
            }
            states.into_iter().map(|s| (s.param, s.m, s.v)).collect::<Vec<_>>()
        });
    }

    #[test]
    fn matches_the_oracle() {
        let c = ELEMENTS_PER_CHUNK;
        let lengths: [&[usize]; 4] = [&[], &[0, 1], &[31, 33, 64], &[c - 1, c, c + 1, 3 * c + 5]];
        for lengths in lengths {
            check(lengths, SCALARS, 1.0);
        }
        for scalars in [
            StepScalars { step: 2, grad_norm: 7.5, ..SCALARS },
            StepScalars { step: 100_000, grad_norm: 0.0, beta2: 0.999, ..SCALARS },
            StepScalars { max_grad_norm: f64::INFINITY, grad_norm: 1e20, ..SCALARS },
            StepScalars { learning_rate: 0.0, ..SCALARS },
            StepScalars { max_grad_norm: 0.0, ..SCALARS },
        ] {
            check(&[100, 1000], scalars, 1.0);
        }
        for grad_size in [1e-12, 1e12] {
            check(&[100], SCALARS, grad_size);
        }
    }

    #[test]
    fn two_steps_by_hand() {
        // param 1, gradients 0.5 then -0.25, learning rate 0.1, betas 0.9 and 0.99, decay 0.1.
        // Step 1: both corrected moments are the gradient's, so the step is 0.1 * sign:
        //   1 * 0.99 - 0.1 = 0.89.
        // Step 2: m = 0.05 * 0.9 - 0.025 = 0.02, corrected 0.02 / 0.19 = 0.105263;
        //   v = 0.0025 * 0.99 + 0.01 * 0.0625 = 0.0031, corrected 0.0031 / 0.0199 = 0.155779;
        //   0.89 * 0.99 - 0.1 * 0.105263 / 0.394688 = 0.8811 - 0.0266699 = 0.8544301.
        let (mut param, mut m, mut v) = ([1.0], [0.0], [0.0]);
        for (step, grad, expected) in [(1, 0.5, 0.89), (2, -0.25, 0.854_430_1)] {
            let scalars = StepScalars {
                learning_rate: 0.1,
                beta1: 0.9,
                beta2: 0.99,
                step,
                grad_norm: 0.5,
                ..SCALARS
            };
            let mut tensors = [AdamwTensor {
                param: &mut param,
                grad: &[grad],
                m: &mut m,
                v: &mut v,
                weight_decay: 0.1,
            }];
            assert!(!adamw(&mut tensors, &scalars).skipped);
            assert!((param[0] - expected).abs() < 1e-6, "step {step}: {} {expected}", param[0]);
        }
    }

    #[test]
    fn a_non_finite_norm_changes_nothing() {
        for grad_norm in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let before = State { param: vec![1.0, 2.0], m: vec![0.1; 2], v: vec![0.2; 2] };
            let mut states = [before.clone()];
            let grads = [vec![f32::NAN, 1.0]];
            let scalars = StepScalars { grad_norm, ..SCALARS };
            assert!(adamw(&mut tensors(&mut states, &grads, 0.1), &scalars).skipped);
            assert_eq!(states[0], before);
        }
    }

    #[test]
    fn clip_factor_is_torchs() {
        for (max_grad_norm, grad_norm, expected) in [
            (1.0, 0.5, 1.0),
            (1.0, 1.0, 1.0 / 1.000001),
            (1.0, 4.0, 0.25 / (1.0 + 2.5e-7)),
            (f64::INFINITY, 1e30, 1.0),
            (0.0, 3.0, 0.0),
        ] {
            let scalars = StepScalars { max_grad_norm, grad_norm, ..SCALARS };
            assert_eq!(scalars.clip_factor(), expected as f32, "{max_grad_norm} {grad_norm}");
        }
    }
}
