//! State shared by all clusters of a launch.

use super::cluster::ClusterState;
use super::random::Random;
use super::register_pool::SM_REGISTERS;
use super::warp::Warp;
use super::watch::Touches;
use crate::decode::Program;
use crate::hazard::Tracker;
use crate::launch::{Counts, Settings, WaitingWarp};
use crate::memory::GlobalMemory;
use crate::observe::{Event, Observer, Origin};
use crate::trace::{Trace, TraceRecord};

/// Dimensions of the launch.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// CTAs along each axis.
    pub(crate) grid: [u32; 3],
    /// Threads of a CTA along each axis.
    pub(crate) block: [u32; 3],
    /// CTAs of a cluster along each axis.
    pub(crate) cluster: [u32; 3],
    /// Whether the launch or the kernel asked for clusters.
    pub(crate) explicit_cluster: bool,
    /// Dynamic shared memory of a CTA, in bytes.
    pub(crate) shared_dynamic_bytes: u32,
    /// Static and dynamic shared memory of a CTA, in bytes.
    pub(crate) shared_bytes: u32,
    /// Registers of a thread at launch, if known.
    pub(crate) launch_registers: Option<u32>,
    /// Address of the parameters in device memory.
    pub(crate) parameters: u64,
    /// Address of the module's constants in device memory.
    pub(crate) constants: u64,
}

impl Shape {
    /// Threads of a CTA.
    pub(crate) fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Warps of a CTA.
    pub(crate) fn warps(&self) -> u32 {
        self.threads().div_ceil(32)
    }

    /// CTAs of a cluster.
    pub(crate) fn cluster_ctas(&self) -> u32 {
        self.cluster.iter().product()
    }

    /// Number of clusters resident at a time.
    pub(crate) fn clusters_resident(&self, settings: &Settings) -> u32 {
        let by_threads = 2048 / (self.warps() * 32).max(1);
        // An SM has 228 KiB, of which the system reserves 1 KiB per CTA.
        let by_shared = 228 * 1024 / (self.shared_bytes + 1024);
        let by_registers = self
            .launch_registers
            .map_or(u32::MAX, |registers| SM_REGISTERS / (registers * self.warps() * 32).max(1));
        let ctas =
            by_threads.min(by_shared).min(by_registers).clamp(1, settings.ctas_per_sm.max(1));
        (ctas * settings.sm_count / self.cluster_ctas()).max(1)
    }

    /// Number of clusters along each axis.
    pub(crate) fn clusters(&self) -> [u32; 3] {
        std::array::from_fn(|axis| self.grid[axis] / self.cluster[axis])
    }

    /// Returns the position of a cluster; x is the fastest axis.
    pub(crate) fn cluster_position(&self, index: u64) -> [u32; 3] {
        position(index, self.clusters())
    }

    /// Returns the grid position of a CTA from its rank.
    pub(crate) fn cta_position(&self, cluster: [u32; 3], rank: u32) -> [u32; 3] {
        let inside = position(u64::from(rank), self.cluster);
        std::array::from_fn(|axis| cluster[axis] * self.cluster[axis] + inside[axis])
    }
}

/// Splits an index into axes; x is the fastest axis.
pub(crate) fn position(index: u64, extents: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(extents[0]), u64::from(extents[1]));
    [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
}

/// Memory, remaining work and statistics of a launch.
pub(crate) struct World<'a> {
    pub(crate) program: &'a Program,
    /// Number in the target's name, such as 90.
    pub(crate) target: u32,
    pub(crate) global: &'a mut GlobalMemory,
    pub(crate) shape: Shape,
    pub(crate) settings: &'a Settings,
    pub(crate) random: Random,
    pub(crate) counts: Counts,
    /// Next cluster to start.
    pub(crate) next_cluster: u64,
    /// Number of clusters of the grid.
    pub(crate) cluster_count: u64,
    /// Number of changes of memory and barriers, to detect a lack of progress.
    pub(crate) changes: u64,
    /// Number of instructions executed by all warps.
    pub(crate) instructions: u64,
    pub(crate) tracker: Option<Tracker>,
    pub(crate) trace: Trace,
    pub(crate) observer: Option<&'a mut (dyn Observer + 'a)>,
    /// For each instruction, its accesses to registers of asynchronous instructions; empty without
    /// such instructions or without a tracker.
    pub(crate) watched: &'a [Option<Box<Touches>>],
    /// Lane of the current access, for faults.
    pub(crate) lane: Option<usize>,
    /// Lane of the running `cp.async`.
    pub(crate) copying_lane: Option<u32>,
    /// Position of the instruction that issued the running asynchronous operation.
    pub(crate) operation: Option<u32>,
    /// Reads of unwritten memory, once per position in the program.
    pub(crate) unwritten: Vec<(u32, String)>,
}

impl World<'_> {
    /// Reports an event of a warp to the observer.
    pub(crate) fn observe(&mut self, warp: &Warp, cluster: &ClusterState, event: Event<'_>) {
        self.observe_of((warp.rank, warp.index, warp.pc), cluster, event);
    }

    /// Reports an event of an operation that rank and warp issued at a position.
    pub(crate) fn observe_of(
        &mut self,
        (rank, warp, pc): (u32, u32, u32),
        cluster: &ClusterState,
        event: Event<'_>,
    ) {
        if let Some(observer) = &mut self.observer {
            let sm = cluster.ctas[rank as usize].sm_id;
            let (place, cluster) = (cluster.place, cluster.number);
            observer.event(Origin { cluster, place, sm, rank, warp, pc }, event);
        }
    }

    /// Adds an instruction to the trace.
    #[cold]
    pub(crate) fn record(&mut self, cta: [u32; 3], warp: u32, lanes: u32, pc: u32) {
        let ptx_line = self.program.steps.get(pc as usize).map_or(0, |step| step.ptx_line);
        let record = TraceRecord { cta, warp, lanes, ptx_line };
        self.trace.push(self.settings.trace_limit, record);
    }

    /// Records the end of a wait of a warp at instruction `pc`.
    pub(crate) fn waited(&mut self, warp: u32, pc: u32, since: u64) {
        let ptx_line = self.program.steps.get(pc as usize).map_or(0, |step| step.ptx_line);
        let waited = self.counts.waits.entry(WaitingWarp { warp, ptx_line }).or_default();
        waited.times += 1;
        waited.instructions += self.instructions - since;
    }

    /// Records that instruction `pc` read unwritten bytes.
    #[cold]
    pub(crate) fn note_unwritten(&mut self, pc: u32, what: impl FnOnce() -> String) {
        if !self.unwritten.iter().any(|(known, _)| *known == pc) {
            self.unwritten.push((pc, what()));
        }
    }
}
