//! Results of a replay.

use std::collections::BTreeMap;

use super::timeline::Span;

/// Units of an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Unit {
    TensorCores,
    IssueSlots,
    Fma,
    Alu,
    Mufu,
    SharedMemory,
    Copies,
    TensorMemory,
}

impl Unit {
    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Unit::TensorCores => "tensor cores",
            Unit::IssueSlots => "issue slots",
            Unit::Fma => "FMA",
            Unit::Alu => "ALU",
            Unit::Mufu => "MUFU",
            Unit::SharedMemory => "shared memory",
            Unit::Copies => "copies",
            Unit::TensorMemory => "tensor memory",
        }
    }
}

/// Waits of one warp of a CTA at one instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waiting {
    /// Number of waits.
    pub times: u64,
    /// Clocks, over all CTAs.
    pub clocks: f64,
}

/// A replayed launch.
#[derive(Clone, Debug, Default)]
pub struct Cycles {
    /// Clocks until the last warp ended.
    pub clocks: f64,
    /// SMs in use.
    pub sms: u32,
    /// Clocks in which tensor cores at the peak rate would do all multiply-adds, over all SMs.
    pub mma_clocks: f64,
    /// Share of the time in which each unit is busy, on the SM and the quarter with most work.
    pub busy: BTreeMap<Unit, f64>,
    /// Waits by warp and position.
    pub waits: BTreeMap<(u32, u32), Waiting>,
    /// Spans for a timeline.
    pub spans: Vec<Span>,
    /// Warps whose waits never ended; not 0 only for a recording that is cut.
    pub stuck: usize,
}

impl Cycles {
    /// Share of the peak rate of the tensor cores.
    pub fn mma_fraction(&self) -> f64 {
        if self.clocks > 0.0 { self.mma_clocks / (self.clocks * f64::from(self.sms)) } else { 0.0 }
    }

    /// The unit that is busy for the largest share of the time.
    pub fn bound(&self) -> Option<(Unit, f64)> {
        let most = self.busy.iter().max_by(|a, b| a.1.total_cmp(b.1));
        most.map(|(unit, share)| (*unit, *share))
    }
}
