//! The result of planning.

use deepwell_ir::{Program, TensorPrecision};
use deepwell_precision::Format;

use crate::{
    DryRun, LinearFlops, Plan, PlanError, PrecisionFallback, arena_bytes_with_fallbacks,
    precision_fallbacks,
};

/// The best plan, its program, and the rejected candidates.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Its program.
    pub program: Program,
    /// BF16 fallback program; `None` if no tensor is quantized.
    pub fallback: Option<Program>,
    /// Program all in MXFP8, of a policy whose format has a tensor scale.
    pub in_mxfp8: Option<Program>,
    /// Program of the steps with forward GEMMs in BF16; `None` without a repair in the policy.
    pub repaired: Option<Program>,
    /// Further bytes of the arena for the steps that measure the error of GEMMs.
    pub measuring_bytes: usize,
    /// Its prediction.
    pub prediction: DryRun,
    /// Prediction of the same plan in BF16, if any tensor is quantized.
    pub in_bf16: Option<DryRun>,
    /// FLOPs of the linear layers of a step, over all pipeline stages.
    pub linear_flops: LinearFlops,
    /// Format of each tensor, over all pipeline stages.
    pub precision: Vec<TensorPrecision>,
    /// Rejected candidates, with reasons.
    pub rejected: Vec<String>,
}

impl Planned {
    /// Size of an arena in which the program can be lowered again with the GEMMs of any of its
    /// weights in BF16 or MXFP8, with all forward GEMMs in BF16 if the policy has a repair, and
    /// with measurements of GEMMs.
    pub fn arena_bytes(&self) -> usize {
        let programs = [Some(&self.program), self.repaired.as_ref()].into_iter().flatten();
        let fallbacks = [self.fallback.as_ref(), self.in_mxfp8.as_ref()];
        let fallbacks: Vec<&Program> = fallbacks.into_iter().flatten().collect();
        let bytes = |program| arena_bytes_with_fallbacks(program, &fallbacks);
        programs.map(bytes).max().unwrap_or_default() + self.measuring_bytes
    }

    /// The unsupported formats of the policy, over all pipeline stages.
    ///
    /// # Errors
    /// [`PlanError::NothingServed`] if quantized formats are requested but no tensor gets one, or
    /// if no tensor gets the format of the policy itself (the exceptions of `nvfp4` alone are no
    /// NVFP4), unless `allow_fallback`.
    pub fn fallbacks(&self, allow_fallback: bool) -> Result<Vec<PrecisionFallback>, PlanError> {
        let fallbacks = precision_fallbacks(&self.precision);
        let own = self.plan.policy.format();
        let is_own = |format: Format| format.name() == own.name();
        let lacks_own = fallbacks.iter().any(|fallback| is_own(fallback.asked));
        let is_served = |tensor: &TensorPrecision| match lacks_own {
            true => is_own(tensor.format),
            false => tensor.format.is_quantized(),
        };
        if fallbacks.is_empty() || self.precision.iter().any(is_served) || allow_fallback {
            return Ok(fallbacks);
        }
        Err(PlanError::NothingServed { fallbacks })
    }
}
