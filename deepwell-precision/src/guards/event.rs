//! What the guards saw and did.

use alloc::string::String;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// One entry of the guards' record: for the log, the report and the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuardEvent {
    /// Step after which it happened.
    pub step: u64,
    /// Name of the weight whose GEMMs it is about; empty where it is about the whole run. Records
    /// of earlier versions name a `layer`.
    #[serde(alias = "layer")]
    pub gemm: String,
    /// What happened.
    pub kind: GuardEventKind,
    /// Why, in words.
    pub reason: String,
}

/// Kinds of [`GuardEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GuardEventKind {
    /// From the next step on the GEMMs are computed in BF16.
    ToBf16 {
        /// Step after which they are tried in low precision again; `None`: they stay in BF16.
        until_step: Option<u64>,
        /// How often they have fallen back so far, this time included.
        fallbacks: u32,
    },
    /// From the next step on the GEMMs are computed in low precision again, on probation.
    BackToLow {
        /// Step after which probation ends.
        probation_until_step: u64,
    },
    /// The GEMMs got through probation.
    ProbationPassed,
    /// The GEMMs offended and nothing was switched, because the fallback is `off`.
    Offence,
    /// The loss rose far above its recent values.
    LossSpike {
        /// The loss.
        loss: f32,
        /// Median of the window before it.
        median: f32,
        /// Loss from which on it counts as a spike.
        limit: f32,
    },
    /// Loss or gradient norm were not finite; the step is skipped.
    NonFiniteStep,
}

/// Why training has to stop.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The GEMMs of a weight offended and the fallback is `strict`.
    #[error(
        "step {step}: the GEMMs of `{gemm}` are not safe in low precision: {reason}\n\
         hint: `fallback = \"safe\"` computes them in `bf16` instead, or give the weight a rule"
    )]
    Offence {
        /// Step after which it was found.
        step: u64,
        /// Name of the weight.
        gemm: String,
        /// Which threshold was crossed, and how far.
        reason: String,
    },
    /// A step was not finite, no GEMM is to blame, and the fallback is `strict`.
    #[error("step {step}: {reason}, and no quantized tensor was to blame")]
    NonFiniteStep {
        /// The step.
        step: u64,
        /// Which value was not finite.
        reason: String,
    },
    /// Skipping steps did not help.
    #[error(
        "step {step}: {count} steps in a row were not finite, the last because {reason}\n\
         hint: lower the learning rate, or resume from an earlier checkpoint"
    )]
    Diverged {
        /// The last of the steps.
        step: u64,
        /// How many in a row.
        count: u32,
        /// Which value was not finite in the last one.
        reason: String,
    },
}
