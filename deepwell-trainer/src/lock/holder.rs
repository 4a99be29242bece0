//! The process that holds a lock.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Holder of a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    /// Process of the holder.
    pub pid: u32,
    /// The machine's name.
    pub host: String,
    /// Start time, such as `2026-01-31T23:59:59Z`.
    pub since: String,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on `{}`, since {}", self.pid, self.host, self.since)
    }
}
