//! What can go wrong.

use thiserror::Error;

/// Undefined or illegal behavior of one operation. Who did it, and where in the PTX, is added by
/// what ran it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message} [{rule}]")]
pub struct Fault {
    /// Short name of the rule that was broken, such as `tensor-memory-out-of-range`.
    pub rule: &'static str,
    /// What was expected and what came.
    pub message: String,
}

impl Fault {
    /// A broken rule.
    pub fn new(rule: &'static str, message: impl Into<String>) -> Fault {
        Fault { rule, message: message.into() }
    }
}
