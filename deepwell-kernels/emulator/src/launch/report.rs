//! Results and statistics of a launch.

use std::collections::BTreeMap;

use crate::hazard::{Hazard, Severity};
use crate::trace::Trace;

/// Bytes moved by a launch, per memory space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesMoved {
    /// Read from device memory by loads and atomics.
    pub global_read: u64,
    /// Written to device memory by stores and atomics.
    pub global_written: u64,
    /// Read from kernel parameters.
    pub parameter_read: u64,
    /// Read from shared memory by threads.
    pub shared_read: u64,
    /// Written to shared memory by threads.
    pub shared_written: u64,
    /// Part of the two shared-memory counts that went to or came from other CTAs of the cluster.
    pub cluster: u64,
    /// Read from local memory.
    pub local_read: u64,
    /// Written to local memory.
    pub local_written: u64,
    /// Copied from device to shared memory asynchronously, counted once per destination.
    pub copied_to_shared: u64,
    /// Copied from shared to device memory asynchronously.
    pub copied_from_shared: u64,
    /// Read from tensor memory by threads.
    pub tensor_read: u64,
    /// Written to tensor memory by threads.
    pub tensor_written: u64,
}

/// Statistics of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Executed warp instructions.
    pub instructions: u64,
    /// CTAs that ran.
    pub ctas: u64,
    /// Bytes that moved.
    pub bytes: BytesMoved,
    /// Atomic operations and reductions of threads.
    pub atomics: u64,
    /// Tests of an mbarrier phase (`test_wait`, and attempts of `try_wait`).
    pub mbarrier_tests: u64,
    /// Matrix instructions: `mma.sync` of a warp, `wgmma` of a warp group, `tcgen05.mma`.
    pub mmas: u64,
    /// Multiply-adds of matrix instructions.
    pub multiply_adds: u64,
    /// Bulk and tensor copies.
    pub bulk_copies: u64,
    /// How often a warp ran each instruction, by its position in
    /// [`Program::steps`](crate::decode::Program::steps). An instruction that has to wait counts
    /// again at every retry.
    pub executed: Vec<u64>,
    /// Parities that `mbarrier.try_wait` and `.test_wait` tested successfully, by position: bit 0
    /// for parity 0, bit 1 for parity 1. Waits on a state are not recorded.
    pub parities: Vec<u8>,
    /// Time that warps waited, in instructions of other warps.
    pub waits: BTreeMap<WaitingWarp, Waited>,
}

/// A warp and the line at which it waited, summed over all CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingWarp {
    /// Warp of the CTA.
    pub warp: u32,
    /// Line of the PTX text.
    pub ptx_line: u32,
}

/// Waits of one warp at one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// Number of waits.
    pub times: u64,
    /// Instructions that the machine ran during the waits.
    pub instructions: u64,
}

/// A read of bytes that were never written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwritten {
    /// Line of the PTX text.
    pub ptx_line: u32,
    /// File and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// The bytes of the first such read.
    pub what: String,
}

/// Outcome of a completed launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Accesses that no synchronization orders, and other findings of the tracker.
    pub hazards: Vec<Hazard>,
    /// Whether warnings fail the launch.
    pub warnings_fail: bool,
    /// Reads of shared and tensor memory that was never written, once per instruction.
    pub unwritten: Vec<Unwritten>,
    /// Statistics of the launch.
    pub counts: Counts,
    /// Executed instructions, if [`Settings::trace_limit`](super::Settings::trace_limit) is set.
    pub trace: Trace,
}

impl Report {
    /// Whether the launch has no errors and no unwritten reads. Warnings count only with
    /// [`Rules::warnings_fail`](crate::hazard::Rules::warnings_fail).
    pub fn is_clean(&self) -> bool {
        self.errors().next().is_none() && self.unwritten.is_empty()
    }

    /// Hazards that fail the launch: those of severity [`Severity::Error`], or all.
    pub fn errors(&self) -> impl Iterator<Item = &Hazard> {
        let fails = |severity| self.warnings_fail || severity == Severity::Error;
        self.hazards.iter().filter(move |hazard| fails(hazard.kind.severity()))
    }
}
