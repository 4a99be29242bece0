//! What can go wrong between a graph and a program.

use deepwell_ir::{IrError, NoKernel};
use thiserror::Error;

use crate::PrecisionFallback;

/// Errors of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A pass or a verifier refused.
    #[error(transparent)]
    Ir(#[from] IrError),
    /// No kernel serves a call.
    #[error("call `{call}`: {source}")]
    NoKernel {
        /// The call.
        call: String,
        /// Who was asked and why not.
        #[source]
        source: NoKernel,
    },
    /// A size that cannot be planned for.
    #[error("{what}: expected {expected}, got {got}")]
    Request {
        /// What was asked.
        what: &'static str,
        /// What is possible.
        expected: String,
        /// What came.
        got: String,
    },
    /// A table of measurements that cannot be read.
    #[error("{file}, line {line}: {what}")]
    Score {
        /// The file.
        file: String,
        /// Its line, from 1.
        line: usize,
        /// What was expected and what came.
        what: String,
    },
    /// A policy of which the device serves nothing.
    #[error(
        "precision: expected formats that the device computes, got a policy of which it serves \
         nothing{}\nhint: `bf16` asks for what would run; `allow_fallback` (`--allow-fallback`) \
         runs it nevertheless",
        fallbacks.iter().map(|it| format!("\n  {it}")).collect::<String>()
    )]
    NothingServed {
        /// What was asked for, by reason.
        fallbacks: Vec<PrecisionFallback>,
    },
    /// Nothing fits.
    #[error(
        "no plan fits into {} of memory; tried:{}\nhint: a shorter sequence or a smaller model \
         needs less",
        crate::format_bytes(*limit_bytes),
        rejected.iter().map(|r| format!("\n  {r}")).collect::<String>()
    )]
    NothingFits {
        /// Memory that may be used.
        limit_bytes: u64,
        /// What was tried, with reasons.
        rejected: Vec<String>,
    },
    /// There is no plan, and memory is not the only reason.
    #[error(
        "{what}:{}\nhint: {hint}",
        rejected.iter().map(|r| format!("\n  {r}")).collect::<String>()
    )]
    NoPlan {
        /// What was searched for and does not exist.
        what: String,
        /// What was tried, with reasons.
        rejected: Vec<String>,
        /// What may help.
        hint: String,
    },
}

impl PlanError {
    /// Whether the question was well put and the answer is that there is no plan.
    pub fn is_no_plan(&self) -> bool {
        matches!(self, PlanError::NothingFits { .. } | PlanError::NoPlan { .. })
    }
}
