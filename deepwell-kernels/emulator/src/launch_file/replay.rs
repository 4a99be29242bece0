//! Running a prepared launch, and what came of it.

use std::time::{Duration, Instant};

use super::compare::{Comparison, compare};
use super::prepare::PreparedLaunch;
use crate::decode::Program;
use crate::error::EmulatorError;
use crate::launch::{Emulator, Report, Settings};
use crate::numerics::ResultMode;

/// What came of a launch.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What the launch did, or why it did not end.
    pub result: Result<Report, EmulatorError>,
    /// Each expectation, if the launch ended.
    pub comparisons: Vec<Comparison>,
    /// How long the emulator took.
    pub took: Duration,
}

/// [`Outcome`] in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplayStatus {
    /// All is as expected and no hazard is an error.
    Right,
    /// All values are as expected, and something is not ordered, or read before it was written.
    Hazard,
    /// Values are not as expected.
    Wrong,
    /// The launch did not end: undefined behavior, a deadlock, too many instructions.
    Failed,
}

impl ReplayStatus {
    /// In a word.
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
    /// In a word.
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

    /// Whether nothing is wrong.
    pub fn is_right(&self) -> bool {
        self.status() == ReplayStatus::Right
    }
}

impl PreparedLaunch {
    /// Runs the launch on fresh memory and compares what came.
    pub fn run(&self, settings: &Settings) -> Outcome {
        self.run_program(settings, None).0
    }

    /// The same with another program in the kernel's place; also gives the device afterwards.
    pub(super) fn run_program(
        &self,
        settings: &Settings,
        program: Option<Program>,
    ) -> (Outcome, Emulator) {
        let mut device = self.device.clone();
        device.settings = settings.clone();
        if let Some(program) = program {
            device.replace_program(self.module, program);
        }
        let begun = Instant::now();
        let result = device.launch(self.module, &self.spec);
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
                // That it lies in the buffer was checked when it was prepared.
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
