//! Why an exchange between ranks did not happen.

use std::time::Duration;

use thiserror::Error;

/// Errors of a [`Comm`](super::Comm).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CommError {
    /// What this rank asked for cannot be exchanged.
    #[error("{what}: {reason}")]
    Request {
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Ranks came to the same exchange with different wishes.
    #[error(
        "rank {rank} came to {got}, where rank {other} came to {expected}\n\
         hint: all ranks of a group issue the same collectives in the same order"
    )]
    Mismatch {
        /// Who came later.
        rank: u32,
        /// With what.
        got: String,
        /// Who came before.
        other: u32,
        /// With what.
        expected: String,
    },
    /// Ranks wait for each other.
    #[error(
        "the ranks wait for each other: {}\n\
         hint: all ranks issue the collectives of several groups in one order",
        chain.join(", ")
    )]
    Deadlock {
        /// Each rank of the circle and what it waits for.
        chain: Vec<String>,
    },
    /// Somebody did not come in time.
    #[error("{what} waited {waited:?}; not there: {}", list(missing))]
    Timeout {
        /// What was waited in.
        what: String,
        /// How long.
        waited: Duration,
        /// Who did not come.
        missing: Vec<u32>,
    },
    /// Somebody has ended without coming.
    #[error("{what}: rank {rank} has ended and will not come")]
    Ended {
        /// What was waited in.
        what: String,
        /// Who ended.
        rank: u32,
    },
    /// A rank has failed, and the others with it.
    #[error("rank {rank} failed: {reason}")]
    Failed {
        /// Who failed first.
        rank: u32,
        /// How.
        reason: String,
    },
}

fn list(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().map(|rank| format!("rank {rank}")).collect();
    names.join(", ")
}
