//! Modes in which a launch runs.

use clap::{Args, ValueEnum};
use deepwell_emulator::hazard::Rules;
use deepwell_emulator::launch::{Completion, Settings};
use deepwell_emulator::launch_file::PreparedLaunch;
use deepwell_emulator::numerics::ResultMode;
use serde_json::{Value, json};

/// When asynchronous operations end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletionWord {
    /// Immediately, when issued
    Eager,
    /// At random moments drawn from `--seed`, which also selects the warp that runs next
    Lazy,
    /// As late as possible: only when no warp can continue, and only an operation that a warp waits
    /// for
    Demand,
    /// MMAs immediately, copies as late as possible
    LateCopies,
}

/// What tensor cores compute where the ISA leaves it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResultsWord {
    /// Sums truncated as by the hardware
    Hw,
    /// Exact sums, rounded once
    Exact,
    /// Sums with another order and rounding, drawn from `--seed`
    Fuzz,
}

/// Whether hazards are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrackerWord {
    /// Report unordered memory accesses
    On,
    /// No hazard checks, about three times as fast
    Off,
}

/// Which MMAs of a thread are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MmaOrderWord {
    /// All, in order of issue, as current hardware runs them
    Issue,
    /// Only those with the same accumulator and shape, as the ISA says
    Strict,
}

/// What warnings do to a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WarningsWord {
    /// They are reported
    Report,
    /// They fail the launch, like errors
    Fail,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ModeArgs {
    /// When asynchronous copies and MMAs complete; the launch runs once per value
    #[arg(long, value_name = "WORD", value_delimiter = ',', default_value = "eager")]
    completion: Vec<CompletionWord>,
    /// Seeds of `--completion lazy` and `--results fuzz`; the launch runs once per seed
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    seed: Vec<u64>,
    /// How tensor cores sum; the launch runs once per value
    #[arg(long, value_name = "WORD", value_delimiter = ',', default_value = "hw")]
    results: Vec<ResultsWord>,
    /// Hazard tracker
    #[arg(long, value_name = "WORD", default_value = "on")]
    tracker: TrackerWord,
    /// Order of the `tcgen05.mma`s of a thread
    #[arg(long, value_name = "WORD", default_value = "issue")]
    mma_order: MmaOrderWord,
    /// Whether warnings fail a launch
    #[arg(long, value_name = "WORD", default_value = "report")]
    warnings: WarningsWord,
    /// Number of SMs [default: from the launch file, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) sm_count: Option<u32>,
    /// Maximum number of warp instructions; a longer launch is aborted
    #[arg(long, value_name = "N", default_value_t = Settings::default().step_limit)]
    step_limit: u64,
}

/// A mode in which a launch runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mode {
    pub(crate) completion: Completion,
    pub(crate) results: ResultMode,
}

impl ModeArgs {
    /// Returns all modes requested by the arguments.
    pub(crate) fn modes(&self) -> Vec<Mode> {
        let mut modes = Vec::new();
        for completion in &self.completion {
            for results in &self.results {
                for &seed in &self.seed {
                    let completion = match completion {
                        CompletionWord::Eager => Completion::Eager,
                        CompletionWord::Lazy => Completion::Lazy { seed },
                        CompletionWord::Demand => Completion::Demand,
                        CompletionWord::LateCopies => Completion::LateCopies,
                    };
                    let results = match results {
                        ResultsWord::Hw => ResultMode::Hardware,
                        ResultsWord::Exact => ResultMode::Exact,
                        ResultsWord::Fuzz => ResultMode::Fuzz(seed),
                    };
                    let mode = Mode { completion, results };
                    if !modes.contains(&mode) {
                        modes.push(mode);
                    }
                }
            }
        }
        modes
    }

    /// Returns the settings of a launch in a mode.
    pub(crate) fn settings(&self, mode: Mode, launch: &PreparedLaunch, trace: usize) -> Settings {
        let settings = launch.settings(Settings {
            completion: mode.completion,
            results: mode.results,
            tracker: self.tracker == TrackerWord::On,
            step_limit: self.step_limit,
            trace_limit: trace,
            rules: Rules {
                strict_mma_order: self.mma_order == MmaOrderWord::Strict,
                warnings_fail: self.warnings == WarningsWord::Fail,
                ..Rules::default()
            },
            ..Settings::default()
        });
        Settings { sm_count: self.sm_count.unwrap_or(settings.sm_count), ..settings }
    }
}

/// Name of a completion mode.
pub(crate) fn completion_name(completion: Completion) -> String {
    match completion {
        Completion::Eager => "eager".to_owned(),
        Completion::Lazy { seed } => format!("lazy seed {seed}"),
        Completion::Demand => "demand".to_owned(),
        Completion::LateCopies => "late-copies".to_owned(),
    }
}

/// Name of a result mode.
pub(crate) fn results_name(results: ResultMode) -> String {
    match results {
        ResultMode::Hardware => "hw".to_owned(),
        ResultMode::Exact => "exact".to_owned(),
        ResultMode::Fuzz(seed) => format!("fuzz seed {seed}"),
    }
}

/// Settings as JSON.
pub(crate) fn settings_json(settings: &Settings) -> Value {
    json!({
        "completion": completion_name(settings.completion),
        "results": results_name(settings.results),
        "tracker": settings.tracker,
        "sm_count": settings.sm_count,
    })
}
