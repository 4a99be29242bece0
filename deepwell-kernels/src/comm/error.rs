//! Errors of collectives, sends and receives.

use std::time::Duration;

use thiserror::Error;

/// Errors of a [`Comm`](super::Comm).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CommError {
    /// This rank's request is invalid.
    #[error("{what}: {reason}")]
    Request {
        /// The request.
        what: String,
        /// The reason.
        reason: String,
    },
    /// Ranks disagree about a collective or message.
    #[error(
        "rank {rank} came to {got}, where rank {other} came to {expected}\n\
         hint: all ranks of a group issue the same collectives in the same order"
    )]
    Mismatch {
        /// The rank that arrived later.
        rank: u32,
        /// Its request.
        got: String,
        /// The rank that arrived earlier.
        other: u32,
        /// Its request.
        expected: String,
    },
    /// A deadlock of several ranks.
    #[error(
        "the ranks wait for each other: {}\n\
         hint: all ranks issue the collectives of several groups in one order",
        chain.join(", ")
    )]
    Deadlock {
        /// Ranks of the cycle, each with the collective in which the rank waits.
        chain: Vec<String>,
    },
    /// A rank did not arrive in time.
    #[error("{what} waited {waited:?}; not there: {}", list(missing))]
    Timeout {
        /// The collective or message.
        what: String,
        /// The timeout.
        waited: Duration,
        /// The missing ranks.
        missing: Vec<u32>,
    },
    /// A rank has ended before the collective or message.
    #[error("{what}: rank {rank} has ended and will not come")]
    Ended {
        /// The collective or message.
        what: String,
        /// The rank that ended.
        rank: u32,
    },
    /// A rank has failed, so all ranks fail.
    #[error("rank {rank} failed: {reason}")]
    Failed {
        /// The rank that failed first.
        rank: u32,
        /// The reason.
        reason: String,
    },
}

fn list(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().map(|rank| format!("rank {rank}")).collect();
    names.join(", ")
}
