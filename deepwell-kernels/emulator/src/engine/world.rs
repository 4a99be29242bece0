//! What all clusters of a launch share.

use super::random::Random;
use super::watch::Touches;
use crate::decode::Program;
use crate::hazard::Tracker;
use crate::launch::{Counts, Settings, WaitingWarp};
use crate::memory::GlobalMemory;
use crate::trace::{Trace, TraceRecord};

/// The launch, in numbers.
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
    /// Dynamic shared memory of a CTA.
    pub(crate) shared_dynamic_bytes: u32,
    /// Static and dynamic shared memory.
    pub(crate) shared_bytes: u32,
    /// Where the parameters are in device memory.
    pub(crate) parameters: u64,
    /// Where the module's constants are in device memory.
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

    /// Clusters that are on the machine at a time.
    pub(crate) fn clusters_resident(&self, settings: &Settings) -> u32 {
        let by_threads = 2048 / (self.warps() * 32).max(1);
        // An SM has 228 KiB, of which the system takes one for each CTA.
        let by_shared = 228 * 1024 / (self.shared_bytes + 1024);
        let ctas = by_threads.min(by_shared).clamp(1, settings.ctas_per_sm.max(1));
        (ctas * settings.sm_count / self.cluster_ctas()).max(1)
    }

    /// Clusters along each axis.
    pub(crate) fn clusters(&self) -> [u32; 3] {
        std::array::from_fn(|axis| self.grid[axis] / self.cluster[axis])
    }

    /// Position of a cluster, counted along x first.
    pub(crate) fn cluster_position(&self, index: u64) -> [u32; 3] {
        position(index, self.clusters())
    }

    /// Position in the grid of the CTA with a rank.
    pub(crate) fn cta_position(&self, cluster: [u32; 3], rank: u32) -> [u32; 3] {
        let inside = position(u64::from(rank), self.cluster);
        std::array::from_fn(|axis| cluster[axis] * self.cluster[axis] + inside[axis])
    }
}

/// The axes of a position that is counted along x first.
pub(crate) fn position(index: u64, extents: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(extents[0]), u64::from(extents[1]));
    [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
}

/// Memory, the work that is left, and what was counted.
pub(crate) struct World<'a> {
    pub(crate) program: &'a Program,
    /// The number in the name of its target, such as 90.
    pub(crate) target: u32,
    pub(crate) global: &'a mut GlobalMemory,
    pub(crate) shape: Shape,
    pub(crate) settings: &'a Settings,
    pub(crate) random: Random,
    pub(crate) counts: Counts,
    /// The next cluster that nobody runs.
    pub(crate) next_cluster: u64,
    /// Clusters of the grid.
    pub(crate) cluster_count: u64,
    /// Changes of memory and barriers, by which a standstill is seen.
    pub(crate) changes: u64,
    /// Instructions that ran, of all warps.
    pub(crate) instructions: u64,
    pub(crate) tracker: Option<Tracker>,
    pub(crate) trace: Trace,
    /// For each instruction, the registers of asynchronous ones that it touches; empty if there
    /// are none, or no tracker.
    pub(crate) watched: &'a [Option<Box<Touches>>],
    /// Which lane an operation was at when it failed.
    pub(crate) lane: Option<usize>,
    /// Of which lane a `cp.async` is being done.
    pub(crate) copying_lane: Option<u32>,
    /// Which instruction issued the asynchronous operation that runs.
    pub(crate) operation: Option<u32>,
    /// Where memory was read that nobody wrote, once for each place in the program.
    pub(crate) unwritten: Vec<(u32, String)>,
}

impl World<'_> {
    /// Writes down that lanes run an instruction.
    #[cold]
    pub(crate) fn record(&mut self, cta: [u32; 3], warp: u32, lanes: u32, pc: u32) {
        let ptx_line = self.program.steps.get(pc as usize).map_or(0, |step| step.ptx_line);
        let record = TraceRecord { cta, warp, lanes, ptx_line };
        self.trace.push(self.settings.trace_limit, record);
    }

    /// Notes that a wait of a warp at instruction `pc` is over.
    pub(crate) fn waited(&mut self, warp: u32, pc: u32, since: u64) {
        let ptx_line = self.program.steps.get(pc as usize).map_or(0, |step| step.ptx_line);
        let waited = self.counts.waits.entry(WaitingWarp { warp, ptx_line }).or_default();
        waited.times += 1;
        waited.instructions += self.instructions - since;
    }

    /// Notes that instruction `pc` read bytes that nobody wrote.
    #[cold]
    pub(crate) fn note_unwritten(&mut self, pc: u32, what: impl FnOnce() -> String) {
        if !self.unwritten.iter().any(|(known, _)| *known == pc) {
            self.unwritten.push((pc, what()));
        }
    }
}
