//! What can go wrong.

use std::fmt;

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

/// Where and in whose hands a launch failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// What was wrong.
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

/// Lanes that cannot go on, or do not get anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Position of the CTA in the grid.
    pub cta: [u32; 3],
    /// Warp of the CTA.
    pub warp: u32,
    /// Lanes of the warp, one bit each.
    pub lanes: u32,
    /// Line of the PTX text at which they wait.
    pub ptx_line: u32,
    /// File and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// What they wait for.
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

/// The first waiters, one a line.
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

/// Why PTX did not run, or not to its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EmulatorError {
    /// The text is no PTX.
    #[error(transparent)]
    Parse(#[from] crate::ptx::ParseError),
    /// The text has what the emulator does not know or the ISA does not allow.
    #[error(transparent)]
    Decode(#[from] crate::decode::DecodeError),
    /// The launch does not fit the kernel or the machine.
    #[error("launch of `{kernel}`: {message}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What was expected and what came.
        message: String,
    },
    /// An access of the host to device memory that is not there.
    #[error("access of the host: {0}")]
    Host(Fault),
    /// Undefined or illegal behavior of the kernel.
    #[error("{0}")]
    Fault(Box<FaultReport>),
    /// Nothing can go on.
    #[error("deadlock; who waits for what:{}", list(.waiters))]
    Deadlock {
        /// All lanes that have not exited.
        waiters: Vec<Waiter>,
    },
    /// Warps run, and nothing changes.
    #[error("nothing changed for {instructions} instructions; who is where:{}", list(.waiters))]
    Hang {
        /// Instructions since the last change of memory or of a barrier.
        instructions: u64,
        /// All lanes that have not exited.
        waiters: Vec<Waiter>,
    },
    /// The launch ran longer than it may.
    #[error("more than {limit} instructions; who is where:{}", list(.waiters))]
    StepLimit {
        /// [`crate::launch::Settings::step_limit`].
        limit: u64,
        /// All lanes that have not exited.
        waiters: Vec<Waiter>,
    },
}
