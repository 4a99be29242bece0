//! Execution of prepared launches.

use std::time::{Duration, Instant};

use super::compare::{Comparison, compare};
use super::prepare::PreparedLaunch;
use crate::cycles::{Recorder, Recording};
use crate::decode::Program;
use crate::error::EmulatorError;
use crate::launch::{Completion, Emulator, Report, Settings};
use crate::numerics::ResultMode;
use crate::observe::Observer;

/// Outcome of a launch.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Report of the launch, or its error.
    pub result: Result<Report, EmulatorError>,
    /// Comparisons with the expectations, if the launch ended.
    pub comparisons: Vec<Comparison>,
    /// Run time of the emulator.
    pub took: Duration,
}

/// Summary of an [`Outcome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplayStatus {
    /// All results are as expected, and there are no errors.
    Right,
    /// All results are as expected, but there is a data race or a read of unwritten memory.
    Hazard,
    /// Some results differ from the expectations.
    Wrong,
    /// The launch did not end normally: undefined behavior, a deadlock, too many instructions.
    Failed,
}

impl ReplayStatus {
    /// Name of the status.
    pub fn name(self) -> &'static str {
        match self {
            ReplayStatus::Right => "right",
            ReplayStatus::Hazard => "hazard",
            ReplayStatus::Wrong => "wrong",
            ReplayStatus::Failed => "failed",
        }
    }
}

impl Outcome {
    /// Returns the status.
    pub fn status(&self) -> ReplayStatus {
        match &self.result {
            Err(_) => ReplayStatus::Failed,
            Ok(_) if self.comparisons.iter().any(|comparison| comparison.wrong > 0) => {
                ReplayStatus::Wrong
            }
            Ok(report) if !report.is_clean() => ReplayStatus::Hazard,
            Ok(_) => ReplayStatus::Right,
        }
    }

    /// Whether the status is [`ReplayStatus::Right`].
    pub fn is_right(&self) -> bool {
        self.status() == ReplayStatus::Right
    }
}

impl PreparedLaunch {
    /// Runs the launch on fresh memory and compares the results.
    pub fn run(&self, settings: &Settings) -> Outcome {
        self.run_program(settings, None, None).0
    }

    /// Runs the launch eagerly and records what the cycle model needs.
    pub fn run_recorded(&self, settings: &Settings) -> (Outcome, Recording) {
        let settings = Settings { completion: Completion::Eager, ..settings.clone() };
        let mut recorder = Recorder::default();
        let (outcome, _) = self.run_program(&settings, None, Some(&mut recorder));
        (outcome, recorder.finish())
    }

    /// Runs the launch, optionally with another program as the kernel. Also returns the device.
    pub(super) fn run_program(
        &self,
        settings: &Settings,
        program: Option<Program>,
        observer: Option<&mut dyn Observer>,
    ) -> (Outcome, Emulator) {
        let mut device = self.device.clone();
        device.settings = settings.clone();
        if let Some(program) = program {
            device.replace_program(self.module, program);
        }
        let begun = Instant::now();
        let result = device.launch_observed(self.module, &self.spec, observer);
        let took = begun.elapsed();
        let comparisons = match &result {
            Ok(_) => self.compare(&device, settings.results),
            Err(_) => Vec::new(),
        };
        (Outcome { result, comparisons, took }, device)
    }

    fn compare(&self, device: &Emulator, results: ResultMode) -> Vec<Comparison> {
        self.expectations
            .iter()
            .map(|expected| {
                // Preparation has checked that the range is inside the buffer.
                let got = device.read(expected.address, expected.bytes.len()).unwrap_or_default();
                let tolerance = match results {
                    ResultMode::Hardware => expected.tolerance,
                    ResultMode::Exact | ResultMode::Fuzz(_) => expected.tolerance_other_results,
                };
                compare(&expected.name, expected.dtype, got, &expected.bytes, tolerance)
            })
            .collect()
    }
}
