//! Observation of a launch by its events.

use crate::decode::Instruction;

/// Originator of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// Number of the cluster, in order of its start.
    pub cluster: u64,
    /// Place of the cluster among the resident clusters; another cluster takes the place later.
    pub place: u32,
    /// SM of the CTA.
    pub sm: u32,
    /// Rank of the CTA in the cluster.
    pub rank: u32,
    /// Warp of the CTA.
    pub warp: u32,
    /// Position of the instruction in [`Program::steps`](crate::decode::Program::steps).
    pub pc: u32,
}

/// A phase of an mbarrier of the origin's cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Phase {
    /// Rank of the CTA that holds the mbarrier.
    pub rank: u32,
    /// Offset in shared memory.
    pub offset: u32,
    /// Number of the phase, from 0.
    pub phase: u64,
}

/// Direction of a bulk or tensor copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Device memory to shared memory of the CTA of this rank.
    ToShared(u32),
    /// Shared memory to device memory; completes by bulk groups.
    FromShared,
    /// Shared memory to shared memory of the CTA of this rank.
    Between(u32),
}

/// A `tcgen05.mma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMma {
    /// M, over both CTAs of a pair.
    pub m: u32,
    /// N.
    pub n: u32,
    /// K.
    pub k: u32,
    /// CTAs: 1 or 2.
    pub group: u32,
    /// Whether A is in shared memory, not in tensor memory.
    pub a_in_shared: bool,
}

/// Something that happened. Operations are reported when they run: in
/// [`Completion::Eager`](crate::launch::Completion::Eager) mode, right after their issue.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A warp executes an instruction; again at each retry of a wait.
    Instruction(&'a Instruction),
    /// A thread arrives at an mbarrier, or changes its expected bytes.
    Arrival(Phase),
    /// A wait saw the end of this phase; `None` at the start of an mbarrier.
    Wait(Option<Phase>),
    /// A warp arrives at a named barrier of the CTA.
    BarrierArrival {
        /// Number of the barrier.
        name: u32,
        /// Use of the barrier.
        generation: u64,
        /// Whether the warp waits for the others.
        waits: bool,
    },
    /// A warp arrives at the cluster's barrier in this use.
    ClusterArrival(u64),
    /// A warp has passed the cluster's barrier after this use.
    ClusterWait(u64),
    /// A bulk or tensor copy ran.
    Copy {
        /// Direction.
        direction: Direction,
        /// Bytes.
        bytes: u32,
        /// The phase in which the bytes count.
        arrival: Option<Phase>,
    },
    /// A `tcgen05.mma` ran.
    TensorMma(TensorMma),
    /// A `tcgen05.commit` arrives in a phase.
    TensorCommit(Phase),
}

/// Receiver of events.
pub trait Observer {
    /// Called for each event, in execution order.
    fn event(&mut self, origin: Origin, event: Event<'_>);
}
