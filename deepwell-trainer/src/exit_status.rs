//! How a command ended.

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// The command succeeded, with a positive verdict if it has one.
    Success,
    /// The run finished with a negative verdict.
    Failed,
    /// The run finished without enough data for a verdict.
    Open,
    /// The run stopped on request, and wrote a checkpoint.
    Interrupted,
    /// The run failed with this exit code; another process has already printed the error.
    Reported(u8),
}
