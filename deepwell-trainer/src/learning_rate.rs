//! The learning rate: linear warm-up, then half a cosine down to a fraction of the peak.

use serde::{Deserialize, Serialize};

/// Learning rate over a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearningRateSchedule {
    /// Largest learning rate.
    pub peak: f64,
    /// Steps of the warmup to the peak.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Last learning rate over the peak.
    pub final_ratio: f64,
}

impl LearningRateSchedule {
    /// The learning rate of step `step`, counted from 1.
    pub fn at(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps.max(1) as f64;
        }
        let rest = self.steps.saturating_sub(self.warmup_steps).max(1);
        let progress = ((step - self.warmup_steps) as f64 / rest as f64).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        self.peak * (self.final_ratio + (1.0 - self.final_ratio) * cosine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_the_final_ratio() {
        let schedule =
            LearningRateSchedule { peak: 2.0, warmup_steps: 10, steps: 110, final_ratio: 0.1 };
        for (step, rate) in [(1, 0.2), (10, 2.0), (60, 1.1), (110, 0.2), (500, 0.2)] {
            assert!((schedule.at(step) - rate).abs() < 1e-12, "{step}: {}", schedule.at(step));
        }
    }
}
