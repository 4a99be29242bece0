//! Errors of planning and lowering.

use deepwell_ir::{IrError, NoKernel};
use thiserror::Error;

use crate::PrecisionFallback;

/// Errors of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Error of a pass or of a verifier.
    #[error(transparent)]
    Ir(#[from] IrError),
    /// No kernel serves a call.
    #[error("call `{call}`: {source}")]
    NoKernel {
        /// The call.
        call: String,
        /// The rejected kernels, with reasons.
        #[source]
        source: NoKernel,
    },
    /// A size that cannot be planned.
    #[error("{what}: expected {expected}, got {got}")]
    Request {
        /// The requested quantity.
        what: &'static str,
        /// The possible values.
        expected: String,
        /// The given value.
        got: String,
    },
    /// A table of measurements that cannot be read.
    #[error("{file}, line {line}: {what}")]
    Score {
        /// The file.
        file: String,
        /// Line of the file, from 1.
        line: usize,
        /// Expected and actual content.
        what: String,
    },
    /// A policy without any format supported by the device.
    #[error(
        "precision: expected formats that the device computes, got a policy of which it serves \
         nothing{}\nhint: `bf16` asks for what would run; `allow_fallback` (`--allow-fallback`) \
         runs it nevertheless",
        fallbacks.iter().map(|it| format!("\n  {it}")).collect::<String>()
    )]
    NothingServed {
        /// Unsupported formats, by reason.
        fallbacks: Vec<PrecisionFallback>,
    },
    /// No candidate fits into memory.
    #[error(
        "no plan fits into {} of memory; tried:{}\nhint: a shorter sequence or a smaller model \
         needs less",
        crate::format_bytes(*limit_bytes),
        rejected.iter().map(|r| format!("\n  {r}")).collect::<String>()
    )]
    NothingFits {
        /// Memory limit.
        limit_bytes: u64,
        /// The candidates, with reasons.
        rejected: Vec<String>,
    },
    /// No plan exists, for reasons other than memory alone.
    #[error(
        "{what}:{}\nhint: {hint}",
        rejected.iter().map(|r| format!("\n  {r}")).collect::<String>()
    )]
    NoPlan {
        /// The missing plan.
        what: String,
        /// The candidates, with reasons.
        rejected: Vec<String>,
        /// A suggestion.
        hint: String,
    },
}

impl PlanError {
    /// Whether the request is valid but no plan exists.
    pub fn is_no_plan(&self) -> bool {
        matches!(self, PlanError::NothingFits { .. } | PlanError::NoPlan { .. })
    }
}
