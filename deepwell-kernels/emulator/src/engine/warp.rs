//! One warp: registers, where its lanes are, and what they wait for.

use super::matrix::PendingWgmma;
use crate::decode::{BarrierAction, Program};
use crate::hazard::{Mark, RegisterWatch};
use crate::scalar::Registers;

/// All lanes.
pub(crate) const ALL_LANES: u32 = u32::MAX;

/// What lanes of a warp wait for. Whether the wait is over is looked up when the warp's turn comes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wait {
    /// Other lanes, which must come to the same instruction.
    Lanes {
        /// All that must be there.
        needed: u32,
    },
    /// `bar.warp.sync` with this mask, wherever it is.
    WarpBarrier {
        /// All that must come.
        needed: u32,
    },
    /// A barrier of the CTA.
    CtaBarrier {
        /// Its name.
        barrier: u32,
        /// The use of it that must be over.
        generation: u64,
        /// What is to be written then.
        action: BarrierAction,
    },
    /// The barrier of the cluster.
    Cluster {
        /// The use of it that must be over.
        generation: u64,
    },
    /// An mbarrier; the lanes run the instruction again when its phase has changed.
    Mbarrier {
        /// The CTA whose shared memory holds it.
        rank: u32,
        /// Where.
        offset: u32,
        /// The phase that was not over.
        phase: u64,
        /// The parity that is waited for.
        parity: u32,
    },
    /// `wgmma`s of the other warps of the warp group; the lanes run the instruction again when they
    /// are complete.
    Wgmmas {
        /// How many of each warp.
        wgmmas: u64,
    },
    /// Columns of tensor memory; the lanes run the instruction again when some were freed.
    TensorColumns {
        /// Frees seen so far.
        frees: u64,
    },
}

/// Lanes that wait for the same thing. Their counters are where they go on.
#[derive(Clone, Debug)]
pub(crate) struct Parked {
    pub(crate) lanes: u32,
    pub(crate) wait: Wait,
    /// Instructions that the machine had run when the wait began.
    pub(crate) since: u64,
    /// Where the wait began.
    pub(crate) pc: u32,
}

/// One `cp.async` of one lane, or an arrival behind it.
#[derive(Clone, Debug)]
pub(crate) struct LaneCopy {
    pub(crate) lane: u32,
    /// Groups that the lane had committed before.
    pub(crate) group: u32,
    pub(crate) pc: u32,
    pub(crate) tracked: super::track::Tracked,
    pub(crate) what: LaneCopyKind,
}

/// What a [`LaneCopy`] does.
#[derive(Clone, Debug)]
pub(crate) enum LaneCopyKind {
    /// Bytes, the rest of `bytes` behind `source_bytes` being zeros.
    Bytes { rank: u32, offset: u32, source: u64, bytes: u32, source_bytes: u32 },
    /// An arrival on an mbarrier when everything before is there.
    Arrive { rank: u32, offset: u32, mark: Option<Box<Mark>> },
}

/// One warp.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Rank of its CTA in the cluster.
    pub(crate) rank: u32,
    /// Position in its CTA.
    pub(crate) index: u32,
    pub(crate) registers: Registers,
    /// Where each lane goes on; for the lanes of `active` it is `pc`.
    pub(crate) pcs: [u32; 32],
    /// Lanes that have not exited.
    pub(crate) alive: u32,
    /// Lanes that run together now.
    pub(crate) active: u32,
    /// Where they are.
    pub(crate) pc: u32,
    /// The nearest lanes that could run too are here: the group stops to join them.
    pub(crate) limit: u32,
    pub(crate) parked: Vec<Parked>,
    /// Union of the lanes of `parked`.
    pub(crate) blocked: u32,
    /// `try_wait`s of this warp give up now.
    pub(crate) expire: bool,
    /// Local memory, lane by lane.
    pub(crate) local: Vec<u8>,
    /// `cp.async` that did not happen yet, in order.
    pub(crate) copies: Vec<LaneCopy>,
    /// Groups of `cp.async` committed by each lane.
    pub(crate) copy_groups: [u32; 32],
    /// Groups of bulk operations committed by each lane.
    pub(crate) bulk_groups: [u32; 32],
    /// The use of the cluster barrier in which each lane arrived and for which it did not wait.
    pub(crate) cluster_arrival: [u64; 32],
    /// Lanes that arrived at the cluster barrier and did not wait.
    pub(crate) cluster_arrived: u32,
    /// Registers that asynchronous instructions use.
    pub(crate) watch: RegisterWatch,
    /// `wgmma` that did not happen yet, in order.
    pub(crate) wgmmas: Vec<PendingWgmma>,
    /// Groups of `wgmma` committed.
    pub(crate) wgmma_groups: u32,
    /// Thread index of each lane in its CTA.
    pub(crate) threads: [[u16; 3]; 32],
    /// Instructions of this warp.
    pub(crate) instructions: u64,
}

impl Warp {
    /// Warp `index` of a CTA of shape `block`, at the start of `program`.
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

    /// Makes a warp that is done the warp `index` of another CTA of the same program and shape.
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

    /// Whether all lanes exited.
    pub(crate) fn done(&self) -> bool {
        self.alive == 0
    }

    /// Writes the counter of the active lanes down, so that they can be told apart.
    pub(crate) fn spread(&mut self) {
        for lane in lanes(self.active) {
            self.pcs[lane] = self.pc;
        }
    }

    /// Chooses the lanes that run next: those that are furthest behind, or, when `after` is given,
    /// those behind whom nobody is beyond that place. Returns whether there are any. The active
    /// lanes must have been [spread](Warp::spread).
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

    /// Lets `lanes` of the active ones wait; they go on at `pc`. The others must have been given
    /// their counters. The caller selects.
    pub(crate) fn park(&mut self, lanes_waiting: u32, pc: u32, wait: Wait, since: u64) {
        for lane in lanes(lanes_waiting) {
            self.pcs[lane] = pc;
        }
        self.blocked |= lanes_waiting;
        self.parked.push(Parked { lanes: lanes_waiting, wait, since, pc: self.pc });
    }
}

/// The lanes of a mask, lowest first.
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
