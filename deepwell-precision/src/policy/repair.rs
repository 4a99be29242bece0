//! The end of a run with forward GEMMs in BF16, which repairs most of the loss that quantization
//! costs.
//!
//! Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, appendix D: BF16 in
//! the forward pass of the last 18 % of the tokens brings a gap of 1.5 % to 0.5 %, for about 6 %
//! of the compute; BF16 in the backward pass gains nothing.

use serde::{Deserialize, Serialize};

use super::PrecisionPolicy;
use crate::{Format, OperandClass};

/// When the forward GEMMs of a run are computed in BF16. The switch changes no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {
    /// Format of the operands of fprop during the repair; BF16 is the only one.
    pub forward: Format,
    /// Share of the steps at the end of the run, in percent, at most 100; rounded up to whole
    /// steps.
    #[serde(default)]
    pub percent: u8,
    /// Steps of repair after a loss spike; 0 for none.
    #[serde(default)]
    pub spike_steps: u64,
}

impl Repair {
    /// The published share: the last 18 % of the steps.
    pub const PUBLISHED: Self = Self { forward: Format::Bf16, percent: 18, spike_steps: 0 };

    /// # Errors
    /// A message about a wrong value.
    pub(super) fn checked(self) -> Result<Self, String> {
        if self.forward != Format::Bf16 {
            return Err(format!(
                "expected `bf16` as `forward` of a repair, got `{}`",
                self.forward
            ));
        }
        match (self.percent, self.spike_steps) {
            (0, 0) => {
                Err("expected `percent` or `spike_steps` in a repair, got `forward` alone"
                    .to_owned())
            }
            (101.., _) => {
                Err(format!("expected 0 to 100 `percent` of the steps, got {}", self.percent))
            }
            _ => Ok(self),
        }
    }

    /// Whether step `step` (from 1) of `steps` is one of the last `percent`.
    ///
    /// ```
    /// use deepwell_precision::Repair;
    /// let repaired = (1..=100).filter(|&step| Repair::PUBLISHED.is_due(step, 100));
    /// assert!(repaired.eq(83..=100));
    /// ```
    #[must_use]
    pub fn is_due(self, step: u64, steps: u64) -> bool {
        let count = (u128::from(steps) * u128::from(self.percent)).div_ceil(100) as u64;
        step > steps.saturating_sub(count)
    }
}

impl PrecisionPolicy {
    /// The repair at the end of a run, if there is one.
    #[must_use]
    pub fn repair(&self) -> Option<Repair> {
        self.repair
    }

    /// Sets the repair.
    #[must_use]
    pub fn with_repair(self, repair: Option<Repair>) -> Self {
        Self { repair, ..self }
    }

    /// The policy during a repair: both operands of every fprop in BF16, the backward pass as it
    /// was. `None` without a repair.
    #[must_use]
    pub fn repaired(&self) -> Option<Self> {
        let fprop = [OperandClass::FpropActivation, OperandClass::FpropWeight];
        self.repair.map(|_| self.clone().without(&fprop))
    }
}
