//! A cluster of CTAs: what its warps share.

use super::asynchronous::Queue;
use super::barrier::{ClusterBarrier, CtaBarriers};
use super::warp::Warp;
use super::warp_group::WarpGroups;
use crate::mbarrier::MbarrierTable;
use crate::memory::{SharedMemory, TensorMemory};
use crate::tcgen05::Allocator;

/// What the warps of one CTA share.
#[derive(Debug)]
pub(crate) struct Cta {
    /// Position in the grid.
    pub(crate) position: [u32; 3],
    /// The SM that it is on.
    pub(crate) sm_id: u32,
    pub(crate) shared: SharedMemory,
    pub(crate) tensor: TensorMemory,
    pub(crate) barriers: CtaBarriers,
    /// Threads that have not exited.
    pub(crate) live_threads: u32,
    /// Who owns which columns of tensor memory.
    pub(crate) allocator: Allocator,
    /// MMAs of its warp groups.
    pub(crate) warp_groups: WarpGroups,
    /// Frees of tensor memory so far.
    pub(crate) tensor_frees: u64,
    /// Columns that the CTA asks for as one of a pair.
    pub(crate) tensor_asked: Option<u32>,
    /// The column that its peer's request brought.
    pub(crate) tensor_granted: Option<u32>,
}

/// What all warps of a cluster share.
#[derive(Debug)]
pub(crate) struct ClusterState {
    /// Position among clusters, in units of clusters.
    pub(crate) position: [u32; 3],
    pub(crate) ctas: Vec<Cta>,
    pub(crate) barriers: MbarrierTable,
    pub(crate) barrier: ClusterBarrier,
    pub(crate) queue: Queue,
    /// Its number in the hazard tracker.
    pub(crate) tracked: u32,
}

impl ClusterState {
    /// Threads of all CTAs that have not exited.
    pub(crate) fn live_threads(&self) -> u32 {
        self.ctas.iter().map(|cta| cta.live_threads).sum()
    }

    /// Changes of the allocations of a CTA's tensor memory, by which waiters see them.
    pub(crate) fn tensor_frees(&self, rank: u32) -> u64 {
        self.ctas[rank as usize].tensor_frees
    }
}

/// A cluster that runs.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// CTA by CTA.
    pub(crate) warps: Vec<Warp>,
    pub(crate) state: ClusterState,
}

impl Cluster {
    /// Whether nothing of it will run again.
    pub(crate) fn done(&self) -> bool {
        self.warps.iter().all(Warp::done)
    }
}
