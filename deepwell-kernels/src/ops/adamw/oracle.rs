//! AdamW with decoupled decay and clipping by the global norm.

use deepwell_ir::ops::AdamWCoefficients;

/// The scalars of one step; see [`StepScalars`](crate::ops::adamw::cpu::StepScalars).
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the corrected second moment.
    pub eps: f64,
    /// Decoupled weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm.
    pub max_grad_norm: f64,
    /// Number of the step, from 1.
    pub step: u64,
    /// Global norm of the gradients.
    pub grad_norm: f64,
}

/// Parameters and moments after a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Updated {
    /// The parameters.
    pub param: Vec<f64>,
    /// The first moments.
    pub m: Vec<f64>,
    /// The second moments.
    pub v: Vec<f64>,
}

/// One step on one tensor, written as in the paper's algorithm 2 (arXiv 1711.05101).
pub fn step(param: &[f64], grad: &[f64], m: &[f64], v: &[f64], s: &Settings) -> Updated {
    let mut updated = Updated { param: Vec::new(), m: Vec::new(), v: Vec::new() };
    let clip = (s.max_grad_norm / (s.grad_norm + 1e-6)).min(1.0);
    let t = s.step as f64;
    for i in 0..param.len() {
        let g = grad[i] * clip;
        let m = s.beta1 * m[i] + (1.0 - s.beta1) * g;
        let v = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
        let m_corrected = m / (1.0 - s.beta1.powf(t));
        let v_corrected = v / (1.0 - s.beta2.powf(t));
        let direction = m_corrected / (v_corrected.sqrt() + s.eps);
        let step = s.learning_rate * (direction + s.weight_decay * param[i]);
        updated.param.push(param[i] - step);
        updated.m.push(m);
        updated.v.push(v);
    }
    updated
}

/// Computes the coefficients that a step's settings give for all tensors, in the order of
/// [`AdamWCoefficients`].
pub fn coefficients(s: &Settings) -> [f64; AdamWCoefficients::COUNT] {
    let t = s.step as f64;
    [
        if s.grad_norm.is_finite() { t } else { 0.0 },
        s.learning_rate,
        (s.max_grad_norm / (s.grad_norm + 1e-6)).min(1.0),
        1.0 - s.beta1,
        s.beta2,
        1.0 - s.beta2,
        s.learning_rate / (1.0 - s.beta1.powf(t)),
        1.0 / (1.0 - s.beta2.powf(t)).sqrt(),
        s.eps,
    ]
}

/// [`coefficients`] of one bucket that is updated before the norm is known: `grad_norm` is that of
/// the step before, `sums` are the sums of squares of the bucket's gradients.
pub fn bucket_coefficients(s: &Settings, sums: &[f64]) -> [f64; AdamWCoefficients::COUNT] {
    let grad_norm = if s.grad_norm.is_finite() { s.grad_norm } else { 0.0 };
    let mut made = coefficients(&Settings { grad_norm, ..*s });
    if sums.iter().any(|sum| !sum.is_finite()) {
        made[0] = 0.0;
    }
    made
}

/// [`step`] of one tensor from coefficients; a skipped step returns its inputs.
pub fn update(
    param: &[f64],
    grad: &[f64],
    m: &[f64],
    v: &[f64],
    coefficients: &[f64; AdamWCoefficients::COUNT],
    weight_decay: f64,
) -> Updated {
    let [number, rate, clip, blend1, beta2, blend2, step_size, correction, eps] = *coefficients;
    if number == 0.0 {
        return Updated { param: param.to_vec(), m: m.to_vec(), v: v.to_vec() };
    }
    let mut updated = Updated { param: Vec::new(), m: Vec::new(), v: Vec::new() };
    for i in 0..param.len() {
        let g = grad[i] * clip;
        let m = m[i] + blend1 * (g - m[i]);
        let v = beta2 * v[i] + blend2 * g * g;
        let direction = m / (v.sqrt() * correction + eps);
        updated.param.push(param[i] * (1.0 - rate * weight_decay) - step_size * direction);
        updated.m.push(m);
        updated.v.push(v);
    }
    updated
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;

    #[test]
    fn the_first_step_goes_by_the_learning_rate() {
        // From zero moments both corrections cancel the decays: the direction is the sign.
        let settings = Settings {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            eps: 0.0,
            weight_decay: 0.5,
            max_grad_norm: f64::INFINITY,
            step: 1,
            grad_norm: 5.0,
        };
        let updated = step(&[2.0, 2.0], &[3.0, -4.0], &[0.0; 2], &[0.0; 2], &settings);
        for (param, expected) in updated.param.iter().zip([2.0 - 0.01 - 0.01, 2.0 + 0.01 - 0.01]) {
            assert_abs_diff_eq!(*param, expected, epsilon = 1e-12);
        }
        let clipped = Settings { max_grad_norm: 0.5, ..settings };
        let updated = step(&[2.0, 2.0], &[3.0, -4.0], &[0.0; 2], &[0.0; 2], &clipped);
        // A tenth of 3, times 1 - 0.9.
        assert_abs_diff_eq!(updated.m[0], 0.03, epsilon = 1e-8);
    }

    #[test]
    fn the_update_by_coefficients_is_the_step() {
        let settings = Settings {
            learning_rate: 0.02,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-3,
            weight_decay: 0.1,
            max_grad_norm: 1.0,
            step: 3,
            grad_norm: 2.5,
        };
        let (param, grad) = ([1.0, -2.0, 0.0, 3.0], [0.5, -0.25, 4.0, 0.0]);
        let (m, v) = ([0.1, 0.2, 0.0, -0.3], [0.5, 0.01, 0.0, 0.2]);
        let expected = step(&param, &grad, &m, &v, &settings);
        let made = coefficients(&settings);
        let got = update(&param, &grad, &m, &v, &made, settings.weight_decay);
        let pairs = [(got.param, expected.param), (got.m, expected.m), (got.v, expected.v)];
        for (got, expected) in pairs.iter().flat_map(|(a, b)| a.iter().zip(b)) {
            assert_abs_diff_eq!(got, expected, epsilon = 1e-15);
        }
        let not_finite = Settings { grad_norm: f64::NAN, ..settings };
        let skipped = update(&param, &grad, &m, &v, &coefficients(&not_finite), 0.1);
        assert_eq!(skipped, Updated { param: param.into(), m: m.into(), v: v.into() });
    }
}
