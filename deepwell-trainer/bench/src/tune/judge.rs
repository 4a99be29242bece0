//! Selects a kernel from times that were sampled in turns.

use deepwell_ir::KernelChoice;
use deepwell_kernels::cuda::tuned::TunedTime;

use super::super::timer::percentile;

/// Times of one kernel in each round, seconds.
pub(super) struct Sampled {
    pub(super) choice: KernelChoice,
    /// As [`TunedTime::source`].
    pub(super) source: String,
    pub(super) samples: Vec<f64>,
}

impl Sampled {
    fn time(&self) -> TunedTime {
        let of = |share| percentile(&self.samples, share);
        let time_s = of(0.5);
        TunedTime {
            kernel: self.choice.kernel.clone(),
            tile: self.choice.tile,
            time_s,
            spread: (of(0.9) - of(0.1)) / (2.0 * time_s),
            source: self.source.clone(),
        }
    }
}

/// Minimum margin of a winner: a smaller gain is not worth another summation order.
const MARGIN_LEAST: f64 = 0.005;

/// Returns the selected kernel, then the others, fastest first. The fastest kernel replaces
/// `incumbent`, the selection by predicted time, if its margin exceeds the spread. Margins are
/// computed round by round, because a slow round slows both kernels: the median margin must exceed
/// [`MARGIN_LEAST`] and the tenth percentile must be positive. Otherwise the incumbent is selected.
pub(super) fn ranked(sampled: &[Sampled], incumbent: Option<usize>) -> Vec<TunedTime> {
    let times: Vec<TunedTime> = sampled.iter().map(Sampled::time).collect();
    let mut order: Vec<usize> = (0..times.len()).collect();
    order.sort_by(|&a, &b| times[a].time_s.total_cmp(&times[b].time_s));
    let (Some(&fastest), Some(incumbent)) = (order.first(), incumbent) else {
        return order.into_iter().map(|index| times[index].clone()).collect();
    };
    let of_rounds = sampled[incumbent].samples.iter().zip(&sampled[fastest].samples);
    let quotients: Vec<f64> = of_rounds.map(|(was, is)| was / is).collect();
    let [low, median] = [0.1, 0.5].map(|share| percentile(&quotients, share) - 1.0);
    if low <= 0.0 || median <= MARGIN_LEAST {
        order.retain(|&index| index != incumbent);
        order.insert(0, incumbent);
    }
    order.into_iter().map(|index| times[index].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(kernel: &str, samples: &[f64]) -> Sampled {
        let kernel = kernel.to_string();
        let choice = KernelChoice { kernel, tile: None, workspace_bytes: 0 };
        Sampled { choice, source: String::new(), samples: samples.to_vec() }
    }

    fn check(sampled: &[Sampled], incumbent: Option<usize>, expected: &[&str]) {
        let ranked = ranked(sampled, incumbent);
        let kernels: Vec<&str> = ranked.iter().map(|time| time.kernel.as_str()).collect();
        assert_eq!(kernels, expected);
    }

    #[test]
    fn a_winner_beats_the_incumbent_by_more_than_the_spread() {
        let library = || sampled("library", &[10.0, 10.0, 10.2, 9.8, 10.0]);
        let clear = || sampled("clear", &[9.0, 9.0, 9.1, 8.9, 9.0]);
        // Faster by one percent in most rounds, slower in every fifth round.
        let close = || sampled("close", &[9.9, 9.9, 10.1, 9.9, 9.9]);
        let slow = || sampled("slow", &[11.0, 11.0, 11.0, 11.0, 11.0]);
        check(&[library(), slow(), clear()], Some(0), &["clear", "library", "slow"]);
        check(&[library(), slow(), close()], Some(0), &["library", "close", "slow"]);
        // The incumbent could not be timed.
        check(&[slow(), close()], None, &["close", "slow"]);
        check(&[], None, &[]);
    }

    #[test]
    fn a_slow_round_is_no_difference() {
        // The library is a tenth slower in each round, at every clock.
        let clock = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0];
        let scaled = |by: f64| clock.map(|slow| by * slow);
        let library = sampled("library", &scaled(1.1));
        let ours = sampled("ours", &scaled(1.0));
        assert_eq!(library.time().spread, 0.25);
        check(&[library, ours], Some(0), &["ours", "library"]);
        // A margin of 0.4 % in each round is too small.
        let library = sampled("library", &scaled(1.004));
        let ours = sampled("ours", &scaled(1.0));
        check(&[library, ours], Some(0), &["library", "ours"]);
    }
}
