//! What a driver over host memory was asked.

use std::sync::{Arc, Mutex};

use super::lock;

/// How often each thing was asked of a [`HostDriver`](super::HostDriver).
///
/// What is put into a recorded stream counts when its graph is launched, as part of one graph
/// launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Device memory taken.
    pub allocations: usize,
    /// Device memory given back.
    pub frees: usize,
    /// Pinned buffers taken.
    pub pinned_allocations: usize,
    /// Modules loaded.
    pub modules: usize,
    /// Copies to the device that the host waits for.
    pub uploads: usize,
    /// Copies from the device that the host waits for.
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
    /// Exchanges with other ranks enqueued.
    pub exchanges: usize,
    /// Graphs enqueued.
    pub graph_launches: usize,
    /// Events put into streams.
    pub records: usize,
    /// Waits of streams for events.
    pub waits: usize,
    /// Waits of the host for all streams.
    pub synchronizations: usize,
    /// Waits of the host for an event.
    pub event_synchronizations: usize,
    /// Nodes of each graph ever recorded, in the order of recording.
    pub graphs: Vec<Vec<FakeNode>>,
}

/// A node of a recorded graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FakeNode {
    /// A kernel, by its name.
    Launch(String),
    /// A GEMM of a [`FakeBlas`](crate::cuda::FakeBlas).
    Matmul,
    /// An exchange with other ranks.
    Exchange,
    /// A copy within the device.
    Copy,
    /// A fill.
    Fill,
    /// A copy from or to pinned memory.
    PinnedCopy,
    /// A graph within the graph.
    Graph,
    /// An event with timing.
    Record,
    /// What stood between the begin and the end of a group.
    Group(Vec<FakeNode>),
}

/// Reads the counts of a [`HostDriver`](super::HostDriver), also after the driver was given away.
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

    /// The counts since this was called last, or since the driver was made; they start over.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut lock(&self.0))
    }
}
