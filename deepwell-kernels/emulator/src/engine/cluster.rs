//! State of a cluster of CTAs.

use super::asynchronous::Queue;
use super::barrier::{ClusterBarrier, CtaBarriers};
use super::register_pool::RegisterPool;
use super::warp::Warp;
use super::warp_group::WarpGroups;
use crate::mbarrier::MbarrierTable;
use crate::memory::{SharedMemory, TensorMemory};
use crate::tcgen05::Allocator;

/// State shared by the warps of one CTA.
#[derive(Debug)]
pub(crate) struct Cta {
    /// Position in the grid.
    pub(crate) position: [u32; 3],
    /// SM of the CTA.
    pub(crate) sm_id: u32,
    pub(crate) shared: SharedMemory,
    pub(crate) tensor: TensorMemory,
    pub(crate) barriers: CtaBarriers,
    /// Threads that have not exited.
    pub(crate) live_threads: u32,
    /// Allocated columns of tensor memory.
    pub(crate) allocator: Allocator,
    /// MMAs of the CTA's warp groups.
    pub(crate) warp_groups: WarpGroups,
    /// Whether a thread has seen an answer of launch control without a canceled cluster.
    pub(crate) launch_control_failed: bool,
    /// Registers that `setmaxnreg` moves between warps.
    pub(crate) registers: RegisterPool,
    /// Number of deallocations of tensor memory.
    pub(crate) tensor_frees: u64,
    /// Columns requested by the CTA as part of a CTA pair.
    pub(crate) tensor_asked: Option<u32>,
    /// Column allocated by the request of the peer CTA.
    pub(crate) tensor_granted: Option<u32>,
}

/// State shared by all warps of a cluster.
#[derive(Debug)]
pub(crate) struct ClusterState {
    /// Position in the grid, in units of clusters.
    pub(crate) position: [u32; 3],
    pub(crate) ctas: Vec<Cta>,
    /// Number in order of start.
    pub(crate) number: u64,
    /// Place among the resident clusters.
    pub(crate) place: u32,
    pub(crate) barriers: MbarrierTable,
    pub(crate) barrier: ClusterBarrier,
    pub(crate) queue: Queue,
    /// Number in the hazard tracker.
    pub(crate) tracked: u32,
}

impl ClusterState {
    /// Number of threads that have not exited, over all CTAs.
    pub(crate) fn live_threads(&self) -> u32 {
        self.ctas.iter().map(|cta| cta.live_threads).sum()
    }

    /// Number of deallocations in a CTA's tensor memory; a change wakes waiting warps.
    pub(crate) fn tensor_frees(&self, rank: u32) -> u64 {
        self.ctas[rank as usize].tensor_frees
    }
}

/// A running cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Warps, CTA by CTA.
    pub(crate) warps: Vec<Warp>,
    pub(crate) state: ClusterState,
}

impl Cluster {
    /// Whether all threads have exited.
    pub(crate) fn done(&self) -> bool {
        self.warps.iter().all(Warp::done)
    }
}
