//! What a launch did.

use std::collections::BTreeMap;

use crate::hazard::{Hazard, Severity};
use crate::trace::Trace;

/// Bytes that moved, by memory. Those of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesMoved {
    /// By loads and atomics from device memory.
    pub global_read: u64,
    /// By stores and atomics to device memory.
    pub global_written: u64,
    /// Of parameters.
    pub parameter_read: u64,
    /// From shared memory, by threads.
    pub shared_read: u64,
    /// To shared memory, by threads.
    pub shared_written: u64,
    /// Of these, from and to other CTAs of the cluster.
    pub cluster: u64,
    /// From local memory.
    pub local_read: u64,
    /// To local memory.
    pub local_written: u64,
    /// From device to shared memory by asynchronous copies, once for each destination.
    pub copied_to_shared: u64,
    /// From shared to device memory by asynchronous copies.
    pub copied_from_shared: u64,
    /// From tensor memory, by threads.
    pub tensor_read: u64,
    /// To tensor memory, by threads.
    pub tensor_written: u64,
}

/// What a launch did, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps.
    pub instructions: u64,
    /// CTAs that ran.
    pub ctas: u64,
    /// Bytes that moved.
    pub bytes: BytesMoved,
    /// Atomic operations and reductions of threads.
    pub atomics: u64,
    /// Attempts to see a phase of an mbarrier complete.
    pub mbarrier_tests: u64,
    /// Matrix instructions: `mma.sync` of a warp, `wgmma` of a warp group, `tcgen05.mma`.
    pub mmas: u64,
    /// Products of elements in them.
    pub multiply_adds: u64,
    /// Bulk and tensor copies.
    pub bulk_copies: u64,
    /// How often a warp ran each instruction, by its position in
    /// [`Program::steps`](crate::decode::Program::steps). One that has to wait counts again when it
    /// is tried again.
    pub executed: Vec<u64>,
    /// Parities that `mbarrier.try_wait` and `.test_wait` tested with success, by position: bit 0
    /// for parity 0, bit 1 for parity 1. Waits by state leave none.
    pub parities: Vec<u8>,
    /// Instructions of others that ran while lanes waited.
    pub waits: BTreeMap<WaitingWarp, Waited>,
}

/// Which warp waited, and where; those of all CTAs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingWarp {
    /// Warp of the CTA.
    pub warp: u32,
    /// Line of the PTX text.
    pub ptx_line: u32,
}

/// Waiting of one warp at one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// How often warps waited there.
    pub times: u64,
    /// Instructions that the machine ran meanwhile.
    pub instructions: u64,
}

/// Bytes that were read before anybody wrote them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwritten {
    /// Line of the PTX text.
    pub ptx_line: u32,
    /// File and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
    /// Which bytes, the first time.
    pub what: String,
}

/// How a launch ended that ran to its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Accesses that nothing orders.
    pub hazards: Vec<Hazard>,
    /// Reads of shared and tensor memory that nobody had written, once for each instruction.
    pub unwritten: Vec<Unwritten>,
    /// What it did.
    pub counts: Counts,
    /// What ran, when [`Settings::trace_limit`](super::Settings::trace_limit) asks for it.
    pub trace: Trace,
}

impl Report {
    /// Whether nothing is wrong. Warnings do not count.
    pub fn is_clean(&self) -> bool {
        self.errors().next().is_none() && self.unwritten.is_empty()
    }

    /// The hazards that are errors.
    pub fn errors(&self) -> impl Iterator<Item = &Hazard> {
        self.hazards.iter().filter(|hazard| hazard.kind.severity() == Severity::Error)
    }
}
