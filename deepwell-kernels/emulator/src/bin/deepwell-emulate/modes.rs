//! Modes in which a launch runs.

use clap::{Args, ValueEnum};
use deepwell_emulator::launch::{Completion, Settings};
use deepwell_emulator::launch_file::PreparedLaunch;
use deepwell_emulator::numerics::ResultMode;
use serde_json::{Value, json};

/// When asynchronous operations end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletionWord {
    /// At once, when they are issued
    Eager,
    /// At moments that `--seed` chooses, which also chooses whose turn it is
    Lazy,
    /// Only when nobody can go on without, and then only what somebody waits for
    Demand,
}

/// What tensor cores compute where the ISA leaves it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResultsWord {
    /// Sums cut as the machine cuts them
    Hw,
    /// Exact sums, rounded once
    Exact,
    /// Sums in another order with other roundings, by `--seed`
    Fuzz,
}

/// Whether hazards are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrackerWord {
    /// Report accesses that nothing orders
    On,
    /// Only run: about three times as quick
    Off,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ModeArgs {
    /// When copies and MMAs end; several words run the launch several times
    #[arg(long, value_name = "WORD", value_delimiter = ',', default_value = "eager")]
    completion: Vec<CompletionWord>,
    /// Of `--completion lazy` and `--results fuzz`; several numbers run the launch several times
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    seed: Vec<u64>,
    /// How tensor cores add; several words run the launch several times
    #[arg(long, value_name = "WORD", value_delimiter = ',', default_value = "hw")]
    results: Vec<ResultsWord>,
    /// Whether accesses that nothing orders are reported
    #[arg(long, value_name = "WORD", default_value = "on")]
    tracker: TrackerWord,
    /// SMs [default: what the launch file says, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) sm_count: Option<u32>,
    /// Give a launch up after so many instructions of warps
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
