//! Moves a model in training to another cluster: changed dimensions, and bytes of states to move.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

use super::page::grouped;
use super::rank_map::RankPlace;
use super::{ClusterPlan, Dimension};
use crate::memory::StageLayers;
use crate::{ModelShape, Strategy};

/// Bytes of training state per parameter: FP32 master weight and two moments.
const STATE_BYTES: f64 = 12.0;

/// A dimension with another value on the new cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The dimension.
    pub dimension: Dimension,
    /// Value before.
    pub from: String,
    /// Value after.
    pub to: String,
}

/// The state to move from a plan to another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moves {
    /// Dimensions with another value.
    pub changes: Vec<Change>,
    /// Master weights and moments held by the ranks of the new plan together, in bytes.
    pub state_bytes: f64,
    /// Bytes of these states to be moved to another GPU.
    pub moved_bytes: f64,
    /// Most bytes received by a single rank.
    pub rank_bytes_max: f64,
    /// Seconds of this transfer, over NVLink within one domain, otherwise over the rank's own NIC;
    /// `None` without a NIC rate.
    pub seconds: Option<f64>,
    /// Seconds of a step before and after.
    pub step_seconds: (f64, f64),
}

/// Computes the state to move from `now` to `then`. The GPUs of the smaller plan are assumed to be
/// the first GPUs of the larger: rank `r` stays in place.
pub fn replan(now: &ClusterPlan, then: &ClusterPlan) -> Moves {
    let changes = Dimension::ALL
        .into_iter()
        .filter(|dimension| dimension.of(&now.strategy) != dimension.of(&then.strategy))
        .map(|dimension| Change {
            dimension,
            from: dimension.text_of(&now.strategy),
            to: dimension.text_of(&then.strategy),
        })
        .collect();
    let (before, after) = (&now.strategy, &then.strategy);
    let shape = &then.model;
    let common = common_parameters(shape, before, after);
    let own = common_parameters(shape, after, after);
    let (mut state_bytes, mut moved_bytes, mut rank_bytes_max) = (0.0, 0.0, 0.0_f64);
    for rank in 0..after.gpus() {
        let place = RankPlace::of(after, rank);
        let need = shared(&own, (after, &place), (after, &place));
        let has = if rank < before.gpus() {
            shared(&common, (before, &RankPlace::of(before, rank)), (after, &place))
        } else {
            0.0
        };
        let missing = STATE_BYTES * (need - has).max(0.0);
        state_bytes += STATE_BYTES * need;
        moved_bytes += missing;
        rank_bytes_max = rank_bytes_max.max(missing);
    }
    let fabric = &then.machines.fabric;
    let gbps = match after.gpus() <= fabric.domain_gpus {
        true => fabric.generation.nvlink_gbps(),
        false => fabric.nic_gbps,
    };
    Moves {
        changes,
        state_bytes,
        moved_bytes,
        rank_bytes_max,
        seconds: (gbps > 0.0).then(|| rank_bytes_max / (gbps * 1e9)),
        step_seconds: (now.step.seconds, then.step.seconds),
    }
}

/// Parameters common to two stages, `[stage of a][stage of b]`: dense parameters, and routed
/// experts.
fn common_parameters(shape: &ModelShape, a: &Strategy, b: &Strategy) -> Vec<Vec<(f64, f64)>> {
    let stages = |at: &Strategy| -> Vec<StageLayers> {
        (0..at.pp).map(|stage| StageLayers::of(shape, at, stage)).collect()
    };
    let (of_a, of_b) = (stages(a), stages(b));
    let table = (shape.vocab * shape.hidden) as f64;
    let overlap = |a: &StageLayers, b: &StageLayers| {
        let (mut dense, mut routed) = (0.0, 0.0);
        for one in &a.chunks {
            for layer in b.chunks.iter().flat_map(|other| meet(one, other)) {
                let parameters = shape.layer_parameters(layer, 1, 1, 1);
                dense += parameters.dense;
                routed += parameters.routed;
            }
        }
        if a.has_embedding && b.has_embedding {
            dense += table + (shape.positions * shape.hidden) as f64;
        }
        if a.has_head && b.has_head && !shape.tied {
            dense += table;
        }
        (dense, routed)
    };
    of_a.iter().map(|a| of_b.iter().map(|b| overlap(a, b)).collect()).collect()
}

fn meet(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Number of parameters whose states are on both ranks.
fn shared(
    common: &[Vec<(f64, f64)>],
    (a, in_a): (&Strategy, &RankPlace),
    (b, in_b): (&Strategy, &RankPlace),
) -> f64 {
    let (dense, routed) = common[in_a.stage][in_b.stage];
    let split = |a: (usize, usize), b: (usize, usize)| {
        let part = |(place, parts): (usize, usize)| {
            (place as f64 / parts as f64, (place + 1) as f64 / parts as f64)
        };
        let (a, b) = (part(a), part(b));
        (a.1.min(b.1) - a.0.max(b.0)).max(0.0)
    };
    // Slice of the optimizer states: everything without ZeRO.
    let slice = |at: &Strategy, place: usize, parts: usize| {
        if at.zero > 0 { (place, parts) } else { (0, 1) }
    };
    let dense_slice =
        |at: &Strategy, p: &RankPlace| slice(at, p.data * at.cp + p.context, at.dp * at.cp);
    let routed_slice = |at: &Strategy, p: &RankPlace| slice(at, p.expert_data, at.expert_dp());
    let dense = dense
        * split((in_a.tensor, a.tp), (in_b.tensor, b.tp))
        * split(dense_slice(a, in_a), dense_slice(b, in_b));
    let routed = routed
        * split((in_a.expert, a.ep), (in_b.expert, b.ep))
        * split((in_a.expert_tensor, a.etp), (in_b.expert_tensor, b.etp))
        * split(routed_slice(a, in_a), routed_slice(b, in_b));
    dense + routed
}

impl fmt::Display for Moves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nwhat moves")?;
        for change in &self.changes {
            writeln!(f, "  {:<12}  {} to {}", change.dimension, change.from, change.to)?;
        }
        if self.changes.is_empty() {
            writeln!(f, "  nothing: the plan stays as it is")?;
        }
        let (before, after) = self.step_seconds;
        let change = 100.0 * (after / before - 1.0);
        writeln!(f, "  step          {before:.3} s to {after:.3} s, {change:+.1} %")?;
        let share = 100.0 * self.moved_bytes / self.state_bytes.max(1.0);
        writeln!(
            f,
            "  states        {} of {} GB of master weights and moments, {share:.1} %",
            grouped(self.moved_bytes / 1e9),
            grouped(self.state_bytes / 1e9)
        )?;
        let rank = self.rank_bytes_max / 1e9;
        match self.seconds {
            Some(seconds) => {
                writeln!(f, "  one rank      receives {rank:.1} GB at most, {seconds:.1} s")
            }
            None => writeln!(f, "  one rank      receives {rank:.1} GB at most"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The states of all ranks together are the states of the model, times the number of replicas
    /// (one with ZeRO).
    #[test]
    fn states_are_held_as_often_as_there_are_replicas() {
        let shape = ModelShape::known("mixtral-8x7b").unwrap();
        let check = |at: Strategy, replicas: f64| {
            let own = common_parameters(&shape, &at, &at);
            let held: f64 = (0..at.gpus())
                .map(|rank| RankPlace::of(&at, rank))
                .map(|place| shared(&own, (&at, &place), (&at, &place)))
                .sum();
            let norms = (shape.hidden * shape.norm_vectors) as f64;
            let expected = replicas * (shape.parameters() - norms);
            assert!((held / expected - 1.0).abs() < 1e-9, "{at}: {held} {expected}");
        };
        let zero = Strategy { zero: 1, ..Strategy::SINGLE };
        check(Strategy::SINGLE, 1.0);
        check(Strategy { dp: 4, ..zero }, 1.0);
        check(Strategy { dp: 4, ..Strategy::SINGLE }, 4.0);
        check(Strategy { dp: 4, ep: 4, tp: 2, etp: 2, pp: 4, vpp: 2, ..zero }, 1.0);
        check(Strategy { dp: 2, cp: 2, ep: 8, tp: 2, ..zero }, 1.0);
    }

    #[test]
    fn shares_that_stay() {
        let shape = ModelShape::known("llama-3-8b").unwrap();
        let moved = |before: Strategy, after: Strategy| {
            let (common, own) = (
                common_parameters(&shape, &before, &after),
                common_parameters(&shape, &after, &after),
            );
            let (mut need, mut has) = (0.0, 0.0);
            for rank in 0..after.gpus() {
                let place = RankPlace::of(&after, rank);
                need += shared(&own, (&after, &place), (&after, &place));
                if rank < before.gpus() {
                    let old = RankPlace::of(&before, rank);
                    has += shared(&common, (&before, &old), (&after, &place));
                }
            }
            1.0 - has / need
        };
        let zero = Strategy { zero: 1, ..Strategy::SINGLE };
        let check = |before: Strategy, after: Strategy, expected: f64| {
            let found = moved(before, after);
            assert!((found - expected).abs() < 1e-9, "{before} to {after}: {found}");
        };
        let dp = |dp: usize| Strategy { dp, ..zero };
        check(dp(8), dp(8), 0.0);
        // Of its half, the first rank already has the first quarter; the second has nothing.
        check(dp(4), dp(2), 0.75);
        // Without ZeRO every rank holds all states.
        check(Strategy { zero: 0, ..dp(4) }, Strategy { zero: 0, ..dp(2) }, 0.0);
        check(Strategy { zero: 0, ..dp(2) }, Strategy { zero: 0, ..dp(4) }, 0.5);
        check(Strategy { tp: 2, ..zero }, Strategy { tp: 1, ..zero }, 0.5);
    }
}
