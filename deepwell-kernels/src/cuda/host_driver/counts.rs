//! Counts of the calls to a driver over host memory.

use std::sync::{Arc, Mutex};

use super::lock;

/// Counts of the calls to a [`HostDriver`](super::HostDriver).
///
/// Work of a captured stream counts when its graph is launched, as part of a single graph launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Device allocations.
    pub allocations: usize,
    /// Device memory freed.
    pub frees: usize,
    /// Pinned allocations.
    pub pinned_allocations: usize,
    /// Modules loaded.
    pub modules: usize,
    /// Synchronous copies to the device.
    pub uploads: usize,
    /// Synchronous copies from the device.
    pub downloads: usize,
    /// Copies enqueued from pinned memory.
    pub copies_from_pinned: usize,
    /// Copies enqueued to pinned memory.
    pub copies_to_pinned: usize,
    /// Copies enqueued within the device.
    pub copies: usize,
    /// Fills enqueued.
    pub fills: usize,
    /// Kernels enqueued.
    pub launches: usize,
    /// GEMMs of a [`FakeBlas`](crate::cuda::FakeBlas) enqueued.
    pub matmuls: usize,
    /// Collectives, sends and receives enqueued.
    pub exchanges: usize,
    /// Graphs enqueued.
    pub graph_launches: usize,
    /// Events recorded in streams.
    pub records: usize,
    /// Waits of streams for events.
    pub waits: usize,
    /// Waits of the host for all streams.
    pub synchronizations: usize,
    /// Waits of the host for an event.
    pub event_synchronizations: usize,
    /// Nodes of each captured graph, in the order of capture.
    pub graphs: Vec<Vec<FakeNode>>,
}

/// A node of a captured graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FakeNode {
    /// A kernel, by its name.
    Launch(String),
    /// A GEMM of a [`FakeBlas`](crate::cuda::FakeBlas).
    Matmul,
    /// A collective, send or receive.
    Exchange,
    /// A copy within the device.
    Copy,
    /// A fill.
    Fill,
    /// A copy from or to pinned memory.
    PinnedCopy,
    /// A graph launch within the graph.
    Graph,
    /// An event with timing.
    Record,
    /// The work of a group.
    Group(Vec<FakeNode>),
}

/// Reads the counts of a [`HostDriver`](super::HostDriver), even after the driver was moved away.
#[derive(Clone, Default)]
pub struct FakeCounts(Arc<Mutex<Counts>>);

impl FakeCounts {
    pub(super) fn change(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut lock(&self.0));
    }

    /// The counts so far.
    pub fn read(&self) -> Counts {
        lock(&self.0).clone()
    }

    /// Returns the counts since the last call (or since the driver was created), and resets the
    /// counts.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut lock(&self.0))
    }
}
