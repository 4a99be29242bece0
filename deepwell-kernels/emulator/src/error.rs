//! Errors of the emulator.

use std::fmt;

use thiserror::Error;

/// Undefined or illegal behavior of one operation. The caller that ran the operation adds the
/// thread and the PTX line ([`FaultReport`]).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message} [{rule}]")]
pub struct Fault {
    /// Short name of the rule that was broken, such as `tensor-memory-out-of-range`.
    pub rule: &'static str,
    /// Expected and actual state.
    pub message: String,
}

impl Fault {
    /// Builds a fault from the broken rule and a message.
    pub fn new(rule: &'static str, message: impl Into<String>) -> Fault {
        Fault { rule, message: message.into() }
    }
}

/// A fault with its kernel, PTX line, CTA and thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// The broken rule and the message.
    pub fault: Fault,
    /// The kernel.
    pub kernel: String,
    /// Line of the PTX text, from 1; 0 when no instruction is to blame.
    pub ptx_line: u32,
    /// File (an index into [`crate::ptx::Module::files`]) and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// Position of the CTA in the grid.
    pub cta: [u32; 3],
    /// Position of the thread in the CTA; `None` for an asynchronous operation.
    pub thread: Option<[u32; 3]>,
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}`: {}; PTX line {}", self.kernel, self.fault, self.ptx_line)?;
        if let Some((file, line)) = self.source {
            write!(f, " (line {line} of file {file})")?;
        }
        write!(f, ", CTA {:?}", self.cta)?;
        match self.thread {
            Some(thread) => write!(f, ", thread {thread:?}"),
            None => write!(f, ", in an asynchronous operation"),
        }
    }
}

/// Lanes that are blocked or make no progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Position of the CTA in the grid.
    pub cta: [u32; 3],
    /// Warp of the CTA.
    pub warp: u32,
    /// Lanes of the warp, one bit each.
    pub lanes: u32,
    /// Line of the PTX text at which the lanes wait.
    pub ptx_line: u32,
    /// File and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// The barrier, mbarrier or other event waited for.
    pub what: String,
}

impl fmt::Display for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CTA {:?} warp {} lanes {:#010x} at PTX line {}",
            self.cta, self.warp, self.lanes, self.ptx_line
        )?;
        if let Some((file, line)) = self.source {
            write!(f, " (line {line} of file {file})")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// Formats the first waiters, one per line.
fn list(waiters: &[Waiter]) -> String {
    const SHOWN: usize = 24;
    let mut text = String::new();
    for waiter in waiters.iter().take(SHOWN) {
        text.push_str(&format!("\n  {waiter}"));
    }
    if waiters.len() > SHOWN {
        text.push_str(&format!("\n  and {} more", waiters.len() - SHOWN));
    }
    text
}

/// Reasons why PTX did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EmulatorError {
    /// The text is not PTX.
    #[error(transparent)]
    Parse(#[from] crate::ptx::ParseError),
    /// The text has a form that is unknown to the emulator or illegal in the ISA.
    #[error(transparent)]
    Decode(#[from] crate::decode::DecodeError),
    /// The launch does not fit the kernel or the machine.
    #[error("launch of `{kernel}`: {message}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// Expected and actual values.
        message: String,
    },
    /// The host accessed device memory that is not allocated.
    #[error("access of the host: {0}")]
    Host(Fault),
    /// Undefined or illegal behavior of the kernel.
    #[error("{0}")]
    Fault(Box<FaultReport>),
    /// Every lane that has not exited is blocked.
    #[error("deadlock; who waits for what:{}", list(.waiters))]
    Deadlock {
        /// All lanes that have not exited.
        waiters: Vec<Waiter>,
    },
    /// Warps run, but memory and barriers do not change.
    #[error("nothing changed for {instructions} instructions; who is where:{}", list(.waiters))]
    Hang {
        /// Instructions since the last change of memory or of a barrier.
        instructions: u64,
        /// All lanes that have not exited.
        waiters: Vec<Waiter>,
    },
    /// The launch exceeded the instruction limit.
    #[error("more than {limit} instructions; who is where:{}", list(.waiters))]
    StepLimit {
        /// [`crate::launch::Settings::step_limit`].
        limit: u64,
        /// All lanes that have not exited.
        waiters: Vec<Waiter>,
    },
}
