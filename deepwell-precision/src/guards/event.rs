//! Events and errors of the guards.

use alloc::string::String;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// An entry of the guards' record, for the log, the report and the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuardEvent {
    /// Step after which the event happened.
    pub step: u64,
    /// Name of the weight whose GEMMs the event concerns; empty for the whole run. Records of
    /// earlier versions name a `layer`.
    #[serde(alias = "layer")]
    pub gemm: String,
    /// Kind of event.
    pub kind: GuardEventKind,
    /// Reason, in words.
    pub reason: String,
}

/// Kinds of [`GuardEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GuardEventKind {
    /// From the next step on, the GEMMs are computed in BF16.
    ToBf16 {
        /// Step after which low precision is tried again; `None`: never.
        until_step: Option<u64>,
        /// Number of fallbacks so far, including this one.
        fallbacks: u32,
    },
    /// From the next step on, the GEMMs are computed in MXFP8.
    ToMxfp8 {
        /// Step after which the policy's format is tried again; `None`: never.
        until_step: Option<u64>,
        /// Number of fallbacks so far, including this one.
        fallbacks: u32,
    },
    /// From the next step on, the GEMMs are computed in low precision again, on probation.
    BackToLow {
        /// Step after which probation ends.
        probation_until_step: u64,
    },
    /// The GEMMs passed probation.
    ProbationPassed,
    /// The GEMMs offended, without a fallback, because `fallback` is `off`.
    Offence,
    /// The loss rose far above its recent values.
    LossSpike {
        /// The loss.
        loss: f32,
        /// Median of the preceding window.
        median: f32,
        /// Threshold for a spike.
        limit: f32,
    },
    /// Loss or gradient norm was not finite; the step is skipped.
    NonFiniteStep,
}

/// Reasons to stop training.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The GEMMs of a weight offended and the fallback is `strict`.
    #[error(
        "step {step}: the GEMMs of `{gemm}` are not safe in low precision: {reason}\n\
         hint: `fallback = \"safe\"` computes them in `bf16` instead, or give the weight a rule"
    )]
    Offence {
        /// Step after which the offence was found.
        step: u64,
        /// Name of the weight.
        gemm: String,
        /// Which threshold was crossed, and by how much.
        reason: String,
    },
    /// The GEMMs that offend are too large a part of the model.
    #[error(
        "step {step}: the GEMMs of `{gemm}` are not safe in the format of the policy: {reason}; \
         with them {share_percent} % of the linear FLOPs would leave that format, more than \
         {limit_percent} %\n\
         hint: the format does not suit this model or its learning rate: choose `mxfp8`, or raise \
         `guards.moved_flops_max`"
    )]
    TooManyMoved {
        /// Step after which the offence was found.
        step: u64,
        /// Name of the weight.
        gemm: String,
        /// Which threshold was crossed, and by how much.
        reason: String,
        /// Share of the FLOPs outside the policy's format, rounded to percent.
        share_percent: u32,
        /// Largest share, in percent.
        limit_percent: u32,
    },
    /// A step was not finite, no GEMM is at fault, and the fallback is `strict`.
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
        /// Number of consecutive steps.
        count: u32,
        /// The non-finite value of the last step.
        reason: String,
    },
}
