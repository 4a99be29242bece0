//! A warp: registers, program counters of lanes, and waits.

use super::matrix::PendingWgmma;
use crate::decode::{BarrierAction, Program};
use crate::hazard::{Mark, RegisterWatch};
use crate::scalar::Registers;

/// All lanes.
pub(crate) const ALL_LANES: u32 = u32::MAX;

/// Reasons for which lanes wait. The scheduler checks at the warp's turn whether the wait is over.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wait {
    /// Other lanes must reach the same instruction.
    Lanes {
        /// Mask of all needed lanes.
        needed: u32,
    },
    /// `bar.warp.sync` with this mask, at any position.
    WarpBarrier {
        /// Mask of all needed lanes.
        needed: u32,
    },
    /// A barrier of the CTA.
    CtaBarrier {
        /// Number of the barrier.
        barrier: u32,
        /// Use that must complete.
        generation: u64,
        /// Action, which determines the result to write.
        action: BarrierAction,
    },
    /// The barrier of the cluster.
    Cluster {
        /// Use that must complete.
        generation: u64,
    },
    /// An mbarrier; the lanes retry the instruction when the phase has changed.
    Mbarrier {
        /// Rank of the CTA that holds the mbarrier.
        rank: u32,
        /// Offset in shared memory.
        offset: u32,
        /// The incomplete phase.
        phase: u64,
        /// The tested parity.
        parity: u32,
    },
    /// `wgmma`s of the other warps of the warp group; the lanes retry the instruction when these
    /// are complete.
    Wgmmas {
        /// Number of `wgmma`s of each warp.
        wgmmas: u64,
    },
    /// Registers of the CTA's pool; the lanes retry the instruction when there are enough.
    Registers {
        /// Registers of a thread.
        count: u32,
    },
    /// Columns of tensor memory; the lanes retry the instruction after a deallocation.
    TensorColumns {
        /// Number of deallocations at the time of the attempt.
        frees: u64,
    },
}

/// Lanes with a common wait. Their program counters point to the next instruction to run.
#[derive(Clone, Debug)]
pub(crate) struct Parked {
    pub(crate) lanes: u32,
    pub(crate) wait: Wait,
    /// Instructions of the machine at the beginning of the wait.
    pub(crate) since: u64,
    /// Position at the beginning of the wait.
    pub(crate) pc: u32,
}

/// A `cp.async` of one lane, or an arrival after such copies.
#[derive(Clone, Debug)]
pub(crate) struct LaneCopy {
    pub(crate) lane: u32,
    /// Number of groups that the lane had committed before.
    pub(crate) group: u32,
    pub(crate) pc: u32,
    pub(crate) tracked: super::track::Tracked,
    pub(crate) what: LaneCopyKind,
}

/// Operations of a [`LaneCopy`].
#[derive(Clone, Debug)]
pub(crate) enum LaneCopyKind {
    /// Copies `source_bytes` bytes and fills up to `bytes` with zeros.
    Bytes { rank: u32, offset: u32, source: u64, bytes: u32, source_bytes: u32 },
    /// Arrives on an mbarrier after all earlier copies of the lane.
    Arrive { rank: u32, offset: u32, mark: Option<Box<Mark>> },
}

/// One warp.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Rank of the CTA in the cluster.
    pub(crate) rank: u32,
    /// Index in the CTA.
    pub(crate) index: u32,
    pub(crate) registers: Registers,
    /// Program counter of each lane; not up to date for the active lanes.
    pub(crate) pcs: [u32; 32],
    /// Lanes that have not exited.
    pub(crate) alive: u32,
    /// Lanes that run together.
    pub(crate) active: u32,
    /// Program counter of the active lanes.
    pub(crate) pc: u32,
    /// Program counter of the next runnable lanes ahead, at which the active lanes stop to merge.
    pub(crate) limit: u32,
    pub(crate) parked: Vec<Parked>,
    /// Union of the lanes in `parked`.
    pub(crate) blocked: u32,
    /// Whether `try_wait`s of this warp time out now.
    pub(crate) expire: bool,
    /// Local memory, lane by lane.
    pub(crate) local: Vec<u8>,
    /// `cp.async` operations that have not run yet, in order.
    pub(crate) copies: Vec<LaneCopy>,
    /// Number of `cp.async` groups committed by each lane.
    pub(crate) copy_groups: [u32; 32],
    /// Number of bulk groups committed by each lane.
    pub(crate) bulk_groups: [u32; 32],
    /// Use of the cluster barrier in which each lane arrived, if the lane has not waited yet.
    pub(crate) cluster_arrival: [u64; 32],
    /// Lanes that arrived at the cluster barrier and have not waited yet.
    pub(crate) cluster_arrived: u32,
    /// Registers of asynchronous instructions.
    pub(crate) watch: RegisterWatch,
    /// `wgmma`s that have not run yet, in order.
    pub(crate) wgmmas: Vec<PendingWgmma>,
    /// Number of committed `wgmma` groups.
    pub(crate) wgmma_groups: u32,
    /// Thread index of each lane in its CTA.
    pub(crate) threads: [[u16; 3]; 32],
    /// Number of executed instructions.
    pub(crate) instructions: u64,
}

impl Warp {
    /// Creates warp `index` of a CTA of shape `block`, at the start of `program`.
    pub(crate) fn new(program: &Program, rank: u32, index: u32, block: [u32; 3]) -> Warp {
        let mut warp = Warp {
            rank,
            index,
            registers: Registers::new(program),
            pcs: [0; 32],
            alive: 0,
            active: 0,
            pc: 0,
            limit: u32::MAX,
            parked: Vec::with_capacity(4),
            blocked: 0,
            expire: false,
            local: vec![0; program.local_bytes as usize * 32],
            copies: Vec::new(),
            copy_groups: [0; 32],
            bulk_groups: [0; 32],
            cluster_arrival: [0; 32],
            cluster_arrived: 0,
            watch: RegisterWatch::default(),
            wgmmas: Vec::new(),
            wgmma_groups: 0,
            threads: [[0; 3]; 32],
            instructions: 0,
        };
        warp.restart(rank, index, block);
        warp
    }

    /// Reuses a finished warp as warp `index` of another CTA of the same program and shape.
    pub(crate) fn restart(&mut self, rank: u32, index: u32, block: [u32; 3]) {
        (self.rank, self.index) = (rank, index);
        let threads = block[0] * block[1] * block[2];
        let lanes = (threads - index * 32).min(32);
        self.alive = if lanes == 32 { ALL_LANES } else { (1 << lanes) - 1 };
        self.active = self.alive;
        (self.pc, self.pcs, self.limit) = (0, [0; 32], u32::MAX);
        self.parked.clear();
        (self.blocked, self.expire) = (0, false);
        self.copies.clear();
        (self.copy_groups, self.bulk_groups) = ([0; 32], [0; 32]);
        (self.cluster_arrival, self.cluster_arrived, self.wgmma_groups) = ([0; 32], 0, 0);
        self.instructions = 0;
        self.watch = RegisterWatch::default();
        self.wgmmas.clear();
        for lane in 0..32 {
            let thread = index * 32 + lane;
            let position =
                [thread % block[0], thread / block[0] % block[1], thread / block[0] / block[1]];
            self.threads[lane as usize] = position.map(|axis| axis as u16);
        }
    }

    /// Whether all lanes have exited.
    pub(crate) fn done(&self) -> bool {
        self.alive == 0
    }

    /// Writes the program counter of the active lanes to `pcs`.
    pub(crate) fn spread(&mut self) {
        for lane in lanes(self.active) {
            self.pcs[lane] = self.pc;
        }
    }

    /// Selects the lanes that run next: the lanes furthest behind, or with `after` the furthest
    /// behind of those beyond that position. Returns whether there are any. The active lanes must
    /// have been [spread](Warp::spread).
    pub(crate) fn select(&mut self, after: Option<u32>) -> bool {
        let ready = self.alive & !self.blocked;
        let nearest = |from: u32| {
            let mut found = u32::MAX;
            for lane in lanes(ready) {
                if self.pcs[lane] >= from {
                    found = found.min(self.pcs[lane]);
                }
            }
            found
        };
        if ready == 0 {
            (self.active, self.limit) = (0, u32::MAX);
            return false;
        }
        let mut pc = after.map_or(u32::MAX, |pc| nearest(pc.saturating_add(1)));
        if pc == u32::MAX {
            pc = nearest(0);
        }
        self.limit = nearest(pc + 1);
        self.active = lanes(ready).filter(|lane| self.pcs[*lane] == pc).fold(0, |m, l| m | 1 << l);
        self.pc = pc;
        true
    }

    /// Parks `lanes_waiting` of the active lanes, to continue at `pc`. The program counters of the
    /// other lanes must be up to date. The caller selects the next lanes.
    pub(crate) fn park(&mut self, lanes_waiting: u32, pc: u32, wait: Wait, since: u64) {
        for lane in lanes(lanes_waiting) {
            self.pcs[lane] = pc;
        }
        self.blocked |= lanes_waiting;
        self.parked.push(Parked { lanes: lanes_waiting, wait, since, pc: self.pc });
    }
}

/// Returns the lanes of a mask, lowest first.
#[inline]
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let lane = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        Some(lane)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_a_mask() {
        assert_eq!(lanes(0x8000_0005).collect::<Vec<_>>(), [0, 2, 31]);
        assert_eq!(lanes(0).count(), 0);
        assert_eq!(lanes(ALL_LANES).count(), 32);
    }
}
