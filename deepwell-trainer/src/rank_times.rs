//! Times of the ranks of a run, and detection of a straggler.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Times of one rank in a step, or in the median step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankTime {
    /// Index of the rank.
    pub rank: u32,
    /// Seconds of work.
    pub busy_s: f64,
    /// Seconds in communication with other ranks, mostly waiting.
    pub waited_s: f64,
}

/// Number of steps evaluated together.
const WINDOW: usize = 32;
/// Steps before a rank is called slow: the first steps warm up caches and pages.
const STEPS_MIN: usize = 10;
/// A rank that works this much longer than the others is a straggler; ranks that share a CPU's
/// cores differ by less.
const RATIO: f64 = 1.5;

/// The times of the last steps of all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankTimes {
    /// Times of each rank in at most [`WINDOW`] steps.
    last: Vec<VecDeque<[f64; 2]>>,
    steps: usize,
    /// Ranks already reported as slow.
    told: Vec<u32>,
}

impl RankTimes {
    /// Adds each rank's times in a step; returns a sentence if a rank has become a straggler. Ranks
    /// with equal `class` have the same work.
    pub(crate) fn add<C: PartialEq>(
        &mut self,
        step: &[RankTime],
        class: impl Fn(usize) -> C,
    ) -> Option<String> {
        self.last.resize(step.len(), VecDeque::new());
        for (last, time) in self.last.iter_mut().zip(step) {
            if last.len() == WINDOW {
                last.pop_front();
            }
            last.push_back([time.busy_s, time.waited_s]);
        }
        self.steps += 1;
        if self.steps < STEPS_MIN {
            return None;
        }
        let medians = self.medians();
        let (slow, others_s) = straggler(&medians, class)?;
        if self.told.contains(&slow.rank) {
            return None;
        }
        self.told.push(slow.rank);
        Some(format!(
            "rank {} is slow: it works {:.3} s a step, and the others, which wait, {others_s:.3} s",
            slow.rank, slow.busy_s
        ))
    }

    /// For each rank, the median of its last steps.
    pub(crate) fn medians(&self) -> Vec<RankTime> {
        let of = |last: &VecDeque<[f64; 2]>, which: usize| {
            let mut all: Vec<f64> = last.iter().map(|times| times[which]).collect();
            median(&mut all)
        };
        let rank = |(rank, last): (usize, &VecDeque<[f64; 2]>)| RankTime {
            rank: rank as u32,
            busy_s: of(last, 0),
            waited_s: of(last, 1),
        };
        self.last.iter().enumerate().map(rank).collect()
    }
}

fn median(all: &mut [f64]) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// Returns the rank that works longest, if its time is far above the median of the other ranks with
/// the same work; for a rank alone in its class, of all other ranks.
pub(crate) fn straggler<C: PartialEq>(
    times: &[RankTime],
    class: impl Fn(usize) -> C,
) -> Option<(RankTime, f64)> {
    let slowest = times.iter().max_by(|a, b| a.busy_s.total_cmp(&b.busy_s))?;
    let others = || times.iter().filter(|time| time.rank != slowest.rank);
    let is_alike = |time: &&RankTime| class(time.rank as usize) == class(slowest.rank as usize);
    let mut alike: Vec<f64> = others().filter(is_alike).map(|time| time.busy_s).collect();
    if alike.is_empty() {
        alike = others().map(|time| time.busy_s).collect();
    }
    let others_s = median(&mut alike);
    (others_s > 0.0 && slowest.busy_s > RATIO * others_s).then_some((*slowest, others_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(busy_s: &[f64]) -> Vec<RankTime> {
        let time = |(rank, &busy_s): (usize, &f64)| RankTime {
            rank: rank as u32,
            busy_s,
            waited_s: 2.0 - busy_s,
        };
        busy_s.iter().enumerate().map(time).collect()
    }

    #[test]
    fn stragglers() {
        let check = |busy_s: &[f64], stages: &[usize], expected: Option<(u32, f64)>| {
            let got = straggler(&step(busy_s), |rank| stages[rank]);
            assert_eq!(got.map(|(slow, others_s)| (slow.rank, others_s)), expected, "{busy_s:?}");
        };
        check(&[1.0, 1.0, 1.6, 1.0], &[0; 4], Some((2, 1.0)));
        check(&[1.0, 1.0, 1.4, 1.0], &[0; 4], None);
        // A stage with more layers is no straggler compared with ranks with fewer layers; a rank
        // slower than others of its class is.
        check(&[1.0, 1.0, 1.6, 1.6], &[0, 0, 1, 1], None);
        check(&[1.0, 1.0, 1.6, 2.6], &[0, 0, 1, 1], Some((3, 1.6)));
        check(&[1.0, 2.0], &[0, 1], Some((1, 1.0)));
        check(&[1.0], &[0], None);
        check(&[0.0, 0.0], &[0, 0], None);
    }

    #[test]
    fn a_straggler_is_named_once() {
        let mut times = RankTimes::default();
        let mut notes = Vec::new();
        for at in 0..60 {
            // One slow step of another rank is ignored.
            let second = if at == 20 { 9.0 } else { 0.5 };
            notes.extend(times.add(&step(&[0.5, second, 1.0]), |_| ()).map(|note| (at, note)));
        }
        let expected =
            "rank 2 is slow: it works 1.000 s a step, and the others, which wait, 0.500 s";
        assert_eq!(notes, [(STEPS_MIN - 1, expected.to_string())]);
        assert_eq!(times.medians()[1], RankTime { rank: 1, busy_s: 0.5, waited_s: 1.5 });
    }
}
