//! AdamW with decoupled decay and clipping by the global norm.

/// The scalars of one step; see [`StepScalars`](crate::ops::adamw::cpu::StepScalars).
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the corrected second moment.
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

/// One step on one tensor, written as the paper's algorithm 2 (arXiv 1711.05101) reads.
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

#[cfg(test)]
mod tests {
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
            assert!((param - expected).abs() < 1e-12, "{param} is not {expected}");
        }
        let clipped = Settings { max_grad_norm: 0.5, ..settings };
        let updated = step(&[2.0, 2.0], &[3.0, -4.0], &[0.0; 2], &[0.0; 2], &clipped);
        assert!((updated.m[0] - 0.03).abs() < 1e-8, "a tenth of 3, times 1 - 0.9");
    }
}
