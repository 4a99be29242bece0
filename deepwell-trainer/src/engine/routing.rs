//! Distribution of a step's tokens over the experts of each layer, as counted by dispatches.

use std::sync::Arc;

use deepwell_ir::ops::RowsOf;
use deepwell_ir::{Op, Program, ValueId};
use serde::{Deserialize, Serialize};

/// The load of a layer's experts in one step. A pair is a token and one of its experts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The layer, counted from 0.
    pub layer: u32,
    /// Pairs that chose each expert, before drops: of this rank's tokens, or with gathered tokens
    /// of all expert-parallel ranks' tokens.
    pub chosen: Vec<u64>,
    /// Pairs dropped because their expert was full.
    pub dropped: u64,
    /// Rows of this rank's grouped GEMMs in the fullest micro-batch, including the padding of
    /// groups.
    #[serde(default)]
    pub rows_used: u64,
    /// Rows of the buffer.
    #[serde(default)]
    pub rows_planned: u64,
}

impl ExpertLoad {
    /// Number of experts that no token chose.
    pub fn dead(&self) -> usize {
        self.chosen.iter().filter(|&&count| count == 0).count()
    }

    /// The largest load over the mean; 1 where all are equal, 0 without tokens.
    pub fn largest_over_mean(&self) -> f64 {
        let total: u64 = self.chosen.iter().sum();
        let largest = self.chosen.iter().copied().max().unwrap_or(0);
        if total == 0 { 0.0 } else { (largest * self.chosen.len() as u64) as f64 / total as f64 }
    }

    /// Entropy of the load over the entropy of a uniform load: 1 if all loads are equal, 0 if one
    /// expert has all pairs or the layer has a single expert.
    pub fn entropy(&self) -> f64 {
        let total: u64 = self.chosen.iter().sum();
        if total == 0 || self.chosen.len() < 2 {
            return 0.0;
        }
        let parts = self.chosen.iter().filter(|&&count| count > 0);
        let sum: f64 =
            parts.map(|&count| count as f64 / total as f64).map(|part| -part * part.ln()).sum();
        sum / (self.chosen.len() as f64).ln()
    }

    /// Adds the counts of another micro-batch: pairs that chose each expert, then pairs with a row.
    fn add(&mut self, load: &[i32], counters: &LoadCounters) {
        let (chosen, kept) = load.split_at(load.len() / 2);
        if let Some(Rows { align, planned }) = counters.rows {
            let of_group = |&pairs: &i32| u64::try_from(pairs).unwrap_or(0).next_multiple_of(align);
            self.rows_used = self.rows_used.max(kept.iter().map(of_group).sum());
            self.rows_planned = planned;
        }
        if !counters.counts_choices {
            return;
        }
        self.chosen.resize(chosen.len(), 0);
        for ((sum, &chosen), &kept) in self.chosen.iter_mut().zip(chosen).zip(kept) {
            *sum += u64::try_from(chosen).unwrap_or(0);
            if counters.drops {
                self.dropped += u64::try_from(chosen - kept).unwrap_or(0);
            }
        }
    }
}

/// Adds the load of a micro-batch to the load of its step.
pub(super) fn add_load(loads: &mut Vec<ExpertLoad>, counters: &LoadCounters, load: &[i32]) {
    let layer = counters.layer;
    let at = loads.iter().position(|known| known.layer == layer).unwrap_or_else(|| {
        loads.push(ExpertLoad { layer, ..ExpertLoad::default() });
        loads.len() - 1
    });
    loads[at].add(load, counters);
}

/// Location of a dispatch's counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadCounters {
    pub(super) id: ValueId,
    pub(super) layer: u32,
    pub(super) experts: usize,
    /// Whether the counts are new choices; the sending ranks have already counted received pairs.
    counts_choices: bool,
    /// Whether a pair without a row was dropped; otherwise its expert is on another rank.
    drops: bool,
    /// Row buffer of a dispatch that sorts rows for grouped GEMMs.
    rows: Option<Rows>,
}

/// The buffers of a dispatch.
#[derive(Clone, Copy, Debug)]
struct Rows {
    /// The rows of each group are a multiple of this number.
    align: u64,
    planned: u64,
}

/// Load counters of each body.
pub(super) fn load_counters(program: &Program) -> Vec<Arc<[LoadCounters]>> {
    let of_body = |calls: std::ops::Range<usize>| -> Arc<[LoadCounters]> {
        let calls = program.calls[calls].iter().filter(|call| !call.recomputes);
        let counters = calls.filter_map(|call| {
            let (experts, rows_of, rows) = match &call.op {
                Op::Dispatch(op) => {
                    let pairs = program.value(call.outputs().get(3)?.value);
                    let align = op.grouped.align as u64;
                    let rows = Rows { align, planned: pairs.elements() as u64 };
                    (op.experts(), op.rows_of, Some(rows))
                }
                Op::DispatchToRanks(op) => (op.experts, RowsOf::All, None),
                _ => return None,
            };
            let (id, layer) = (call.outputs().get(1)?.value, call.layer?);
            let counts_choices = !matches!(rows_of, RowsOf::Sent { .. });
            let drops = rows_of == RowsOf::All;
            Some(LoadCounters { id, layer, experts, counts_choices, drops, rows })
        });
        counters.collect()
    };
    program.bodies.iter().map(|body| of_body(body.calls.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_by_hand() {
        let mut loads = Vec::new();
        let of = |layer, experts| LoadCounters {
            id: ValueId(0),
            layer,
            experts,
            counts_choices: true,
            drops: true,
            rows: Some(Rows { align: 4, planned: 24 }),
        };
        add_load(&mut loads, &of(1, 4), &[4, 0, 0, 4, 3, 0, 0, 4]);
        add_load(&mut loads, &of(0, 2), &[1, 1, 1, 1]);
        add_load(&mut loads, &of(1, 4), &[4, 0, 0, 4, 4, 0, 0, 2]);
        // Pairs from other ranks have rows here, but were counted by the senders.
        let sent = LoadCounters { counts_choices: false, ..of(1, 2) };
        add_load(&mut loads, &sent, &[7, 5, 7, 5]);
        assert_eq!(loads.len(), 2);
        let ExpertLoad { layer, chosen, dropped, rows_used, rows_planned } = &loads[0];
        assert_eq!((*layer, chosen.as_slice(), *dropped), (1, &[8, 0, 0, 8][..], 3));
        assert_eq!((*rows_used, *rows_planned), (16, 24));
        assert_eq!(loads[1].rows_used, 8);
        // Gathered tokens of all ranks; this rank has the second half of the experts.
        let gathered = LoadCounters { drops: false, ..of(2, 4) };
        add_load(&mut loads, &gathered, &[9, 0, 5, 2, 0, 0, 5, 2]);
        assert_eq!((loads[2].chosen.as_slice(), loads[2].dropped), (&[9, 0, 5, 2][..], 0));
        assert_eq!(loads[2].rows_used, 12);
        assert_eq!(loads[0].dead(), 2);
        // Half of the experts have all: 2 of 4, and ln 2 / ln 4.
        assert_eq!(loads[0].largest_over_mean(), 2.0);
        assert!((loads[0].entropy() - 0.5).abs() < 1e-15);
        assert!((loads[1].entropy() - 1.0).abs() < 1e-15);
        let none = ExpertLoad { chosen: vec![0; 3], ..ExpertLoad::default() };
        assert_eq!((none.entropy(), none.largest_over_mean(), none.dead()), (0.0, 0.0, 3));
    }
}
