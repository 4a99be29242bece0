//! A cycle model: how long a launch takes on a GPU, as an interval.
//!
//! # Brief overview
//!
//! A [`Recorder`] observes a launch in [`Completion::Eager`](crate::launch::Completion::Eager) mode
//! and keeps, for each warp, what it asks of which unit, and which phases of mbarriers, barriers
//! and groups it waits for ([`record`]). [`replay()`] runs these lists again on servers with the
//! rates of a [`Machine`]: tensor cores, issue slots, FMA, ALU and MUFU lanes, the port of shared
//! memory, copies, tensor memory. A wait ends when all that counted in its phase in the recorded
//! run is there. Where a rate or a latency is not known, a machine has a lower and an upper bound
//! ([`machine`]); both give a time, and the answer is the interval.
//!
//! # What it leaves out
//!
//! Power and clocks, caches, device memory as a shared bottleneck, bank conflicts, instruction
//! caches, and what ptxas makes of the PTX: scheduling, spills, folded instructions. The order of
//! events is that of the recorded run, so that schedulers that depend on time (atomics, launch
//! control) keep its decisions.

mod cost;
mod dependence;
mod ledger;
pub mod machine;
pub mod record;
pub mod replay;
pub mod summary;
#[cfg(test)]
mod tests;
pub mod timeline;

pub use machine::{Bound, Machine};
pub use record::{Recorder, Recording};
pub use replay::replay;
pub use summary::{Cycles, Unit, Waiting};

use crate::decode::Program;

/// The time of a launch: results with the lower and the upper bound of each rate and latency.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// With the fast bounds.
    pub fast: Cycles,
    /// With the slow bounds.
    pub slow: Cycles,
}

impl Estimate {
    /// Replays a recording on the machine of the program's target. `None` if the target has no
    /// machine.
    pub fn of(recording: &Recording, program: &Program) -> Option<Estimate> {
        let machine = |bound| Machine::of(&program.target, bound);
        Some(Estimate {
            fast: replay(recording, &machine(Bound::Fast)?),
            slow: replay(recording, &machine(Bound::Slow)?),
        })
    }

    /// Clocks from the first instruction to the end of the last warp, fast and slow.
    pub fn clocks(&self) -> [f64; 2] {
        let both = [self.fast.clocks, self.slow.clocks];
        [both[0].min(both[1]), both[0].max(both[1])]
    }

    /// Share of the clocks in which tensor cores at their peak rate would do all multiply-adds of
    /// the launch: slow and fast.
    pub fn mma_fraction(&self) -> [f64; 2] {
        let both = [self.fast.mma_fraction(), self.slow.mma_fraction()];
        [both[0].min(both[1]), both[0].max(both[1])]
    }
}
