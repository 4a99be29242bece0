//! Records of executed instructions.

use std::fmt;

/// An executed instruction of a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Position of the CTA in the grid.
    pub cta: [u32; 3],
    /// Warp of the CTA.
    pub warp: u32,
    /// Active lanes, one bit per lane.
    pub lanes: u32,
    /// Line of the PTX text.
    pub ptx_line: u32,
}

impl fmt::Display for TraceRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.cta;
        write!(
            f,
            "CTA {x},{y},{z} warp {:2} lanes {:08x} line {}",
            self.warp, self.lanes, self.ptx_line
        )
    }
}

/// Executed instructions, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The first instructions, up to [`crate::launch::Settings::trace_limit`].
    pub records: Vec<TraceRecord>,
    /// Whether instructions beyond the limit were dropped.
    pub is_cut: bool,
}

impl Trace {
    /// Keeps a record if the trace holds fewer than `limit`.
    pub(crate) fn push(&mut self, limit: usize, record: TraceRecord) {
        if self.records.len() < limit {
            self.records.push(record);
        } else {
            self.is_cut = true;
        }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for record in &self.records {
            writeln!(f, "{record}")?;
        }
        if self.is_cut { writeln!(f, "and so on") } else { Ok(()) }
    }
}
