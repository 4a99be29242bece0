//! A run as read from its folder.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::facts::Facts;

/// Points (step, value) with steps rising.
pub type Points = Vec<(f64, f64)>;

/// A run as read from its folder. What the folder lacks is empty or `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Name, unique among the runs that were read together.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    /// State of the run.
    pub state: RunState,
    /// Machine, sizes, memory and precision.
    pub facts: Facts,
    /// Settings by their keys in a run file.
    pub settings: BTreeMap<String, String>,
    /// Curves by metric.
    pub curves: BTreeMap<Metric, Points>,
    /// Points (step, seconds since the start), rising.
    pub times: Points,
    /// Whether `times` are of a clock; otherwise they are sums of the times of steps.
    pub has_clock: bool,
    /// Last step in the log.
    pub step_last: u64,
    /// Number of steps whose update was skipped.
    pub skipped_steps: u64,
    /// Seconds of all steps whose update counted.
    pub step_time_s: f64,
    /// Guard events.
    pub events: Vec<Event>,
    /// Load of experts by layer: points (step, largest load over mean).
    pub loads: BTreeMap<u32, Points>,
    /// Time of the start, seconds since 1970.
    pub start_unix_s: Option<f64>,
    /// Time of the last line, seconds since 1970.
    pub end_unix_s: Option<f64>,
    /// What could not be read, and why.
    pub notes: Vec<String>,
}

/// State of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RunState {
    /// All steps are done.
    Finished,
    /// Stopped on request before the last step.
    Interrupted,
    /// A process of this machine writes the folder.
    Running,
    /// The log ends before the last step, and no process of this machine writes it.
    Ended,
    /// The number of steps is unknown.
    #[default]
    Unknown,
}

impl RunState {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            RunState::Finished => "finished",
            RunState::Interrupted => "interrupted",
            RunState::Running => "running",
            RunState::Ended => "ended early",
            RunState::Unknown => "unknown",
        }
    }
}

/// A value that a run logs over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// Training loss, nats per token.
    Loss,
    /// Held-out loss, nats per token.
    ValLoss,
    /// Gradient norm before clipping.
    GradNorm,
    /// Learning rate.
    LearningRate,
    /// Tokens per second.
    TokensPerS,
    /// Predicted time of a step over its measured time.
    SpeedOfLight,
    /// Time of counted steps over the time since the start, 0 to 1.
    Goodput,
    /// Entropy of the load of experts, of the layer with the lowest.
    Entropy,
    /// Largest load of an expert over the mean, of the layer with the highest.
    LargestLoad,
    /// Experts without tokens, all layers.
    DeadExperts,
    /// Pairs of token and expert that were dropped, all layers.
    Dropped,
    /// Lowest signal-to-error ratio of a quantized GEMM, dB.
    SignalToError,
}

impl Metric {
    /// All metrics, in the order of the page.
    pub const ALL: [Metric; 12] = [
        Metric::Loss,
        Metric::ValLoss,
        Metric::GradNorm,
        Metric::LearningRate,
        Metric::TokensPerS,
        Metric::SpeedOfLight,
        Metric::Goodput,
        Metric::Entropy,
        Metric::LargestLoad,
        Metric::DeadExperts,
        Metric::Dropped,
        Metric::SignalToError,
    ];

    /// Name for machines, with a slash between its parts: `train/loss`.
    pub const fn name(self) -> &'static str {
        match self {
            Metric::Loss => "train/loss",
            Metric::ValLoss => "val/loss",
            Metric::GradNorm => "train/grad_norm",
            Metric::LearningRate => "train/learning_rate",
            Metric::TokensPerS => "train/tokens_per_s",
            Metric::SpeedOfLight => "train/speed_of_light",
            Metric::Goodput => "train/goodput",
            Metric::Entropy => "experts/entropy_lowest",
            Metric::LargestLoad => "experts/largest_over_mean_highest",
            Metric::DeadExperts => "experts/dead",
            Metric::Dropped => "experts/dropped",
            Metric::SignalToError => "gemms/signal_to_error_db_lowest",
        }
    }
}

/// A guard event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Step after which the event happened.
    pub step: u64,
    /// The weight; empty for the whole run.
    pub gemm: String,
    /// Kind of event, in words.
    pub kind: String,
    /// Reason, in words.
    pub reason: String,
}

impl Run {
    /// The curve of a metric; empty if the run lacks it.
    pub fn curve(&self, metric: Metric) -> &[(f64, f64)] {
        self.curves.get(&metric).map_or(&[], Vec::as_slice)
    }

    /// The last finite value of a metric, with its step.
    pub fn last(&self, metric: Metric) -> Option<(f64, f64)> {
        self.curve(metric).iter().copied().rev().find(|point| point.1.is_finite())
    }

    /// The median of the finite values of a metric.
    pub fn median(&self, metric: Metric) -> Option<f64> {
        let values = self.curve(metric).iter().map(|point| point.1);
        let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }

    /// FLOPs of a token over the peak FLOP/s of the run's devices: times tokens per second it is
    /// the utilization.
    pub fn utilization_per_token(&self) -> Option<f64> {
        let facts = &self.facts;
        let flops_per_token = facts.flops_per_step? / facts.tokens_per_step?;
        Some(flops_per_token / facts.peak_bf16_flops.filter(|peak| *peak > 0.0)?)
    }

    /// Median utilization of the BF16 peak, 0 to 1. Recomputed FLOPs count.
    pub fn utilization(&self) -> Option<f64> {
        Some(self.median(Metric::TokensPerS)? * self.utilization_per_token()?)
    }

    /// Time of counted steps over the time from start to last line, 0 to 1.
    pub fn goodput(&self) -> Option<f64> {
        let wall_s = match (self.start_unix_s, self.end_unix_s) {
            (Some(start), Some(end)) if self.has_clock => end - start,
            _ => self.facts.wall_s?,
        };
        (wall_s > 0.0 && self.step_time_s > 0.0).then(|| (self.step_time_s / wall_s).min(1.0))
    }

    /// Seconds from start to last line, or of the process that wrote the summary.
    pub fn wall_s(&self) -> Option<f64> {
        match (self.start_unix_s, self.end_unix_s) {
            (Some(start), Some(end)) if self.has_clock => Some(end - start),
            _ => self.facts.wall_s,
        }
    }

    /// Mean of the last losses of training, at most 20.
    pub fn loss(&self) -> Option<f64> {
        let curve = self.curve(Metric::Loss);
        let last = &curve[curve.len().saturating_sub(20)..];
        let finite: Vec<f64> =
            last.iter().map(|point| point.1).filter(|loss| loss.is_finite()).collect();
        (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / finite.len() as f64)
    }

    /// Tokens that the run has trained on.
    pub fn tokens(&self) -> Option<f64> {
        Some(self.facts.tokens_per_step? * self.step_last as f64)
    }
}
