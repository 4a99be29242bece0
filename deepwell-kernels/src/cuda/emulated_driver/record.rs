//! Outcomes of launches: kept in memory, and written as lines of JSON.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::launch::{Completion, Report, Settings};
use deepwell_emulator::numerics::ResultMode;
use serde::Serialize;

use super::launch::findings;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{DriverError, DriverResult, Launch};

/// Environment variable with a file to which every launch of an emulated device is appended, as a
/// line of JSON ([`EmulatedLaunch`]).
pub const LOG_VARIABLE: &str = "DEEPWELL_EMULATOR_LOG";

/// Outcome of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchOutcome {
    /// The launch ran to its end without findings.
    Clean,
    /// The launch ran to its end with a data race or a read of unwritten memory.
    Findings,
    /// The launch was rejected, had undefined behaviour, or could not continue.
    Failed,
}

/// A launch of an emulated device and its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EmulatedLaunch {
    /// Name of the kernel.
    pub kernel: String,
    /// Name of the architecture, `sm_90a` for example.
    pub architecture: &'static str,
    /// CTAs along each axis.
    pub grid: [u32; 3],
    /// Threads per CTA along each axis.
    pub block: [u32; 3],
    /// CTAs per cluster along each axis.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// Requested completion of asynchronous operations.
    pub completion: String,
    /// Requested numerics of tensor cores.
    pub results: String,
    /// Whether the hazard tracker was on.
    pub tracker: bool,
    /// The outcome.
    pub verdict: LaunchOutcome,
    /// The findings, or the reason of the failure.
    pub findings: Vec<String>,
    /// Warp instructions.
    pub instructions: u64,
    /// Bytes read from device memory by loads.
    pub global_bytes_read: u64,
    /// Bytes written to device memory by stores.
    pub global_bytes_written: u64,
    /// Bytes of asynchronous copies to shared memory.
    pub bytes_copied_to_shared: u64,
    /// Bytes of asynchronous copies from shared memory.
    pub bytes_copied_from_shared: u64,
    /// Bytes of shared memory that threads read and wrote.
    pub shared_bytes_moved: u64,
    /// Bytes of tensor memory that threads read and wrote.
    pub tensor_bytes_moved: u64,
    /// Bytes of local memory.
    pub local_bytes_moved: u64,
    /// Matrix instructions.
    pub tensor_instructions: u64,
    /// Multiply-adds of matrix instructions.
    pub multiply_adds: u64,
    /// Bulk and tensor copies.
    pub bulk_copies: u64,
    /// Atomic operations of threads.
    pub atomics: u64,
    /// Tests of mbarrier phases.
    pub mbarrier_tests: u64,
    /// Time on the host.
    pub time_s: f64,
}

impl EmulatedLaunch {
    /// A launch before it runs.
    pub(super) fn new(
        launch: &Launch,
        kernel: &str,
        architecture: Architecture,
        settings: &Settings,
    ) -> EmulatedLaunch {
        EmulatedLaunch {
            kernel: kernel.to_string(),
            architecture: architecture.name(),
            grid: launch.grid,
            block: launch.block,
            cluster: launch.cluster,
            shared_bytes: launch.shared_bytes,
            completion: match settings.completion {
                Completion::Eager => "eager".to_string(),
                Completion::Lazy { seed } => format!("lazy:{seed}"),
                Completion::Demand => "demand".to_string(),
                Completion::LateCopies => "late-copies".to_string(),
            },
            results: match settings.results {
                ResultMode::Hardware => "hw".to_string(),
                ResultMode::Exact => "exact".to_string(),
                ResultMode::Fuzz(seed) => format!("fuzz:{seed}"),
            },
            tracker: settings.tracker,
            verdict: LaunchOutcome::Failed,
            findings: Vec::new(),
            instructions: 0,
            global_bytes_read: 0,
            global_bytes_written: 0,
            bytes_copied_to_shared: 0,
            bytes_copied_from_shared: 0,
            shared_bytes_moved: 0,
            tensor_bytes_moved: 0,
            local_bytes_moved: 0,
            tensor_instructions: 0,
            multiply_adds: 0,
            bulk_copies: 0,
            atomics: 0,
            mbarrier_tests: 0,
            time_s: 0.0,
        }
    }

    /// Adds the outcome.
    pub(super) fn ended(self, result: &Result<Report, EmulatorError>) -> EmulatedLaunch {
        let report = match result {
            Ok(report) => report,
            Err(error) => return EmulatedLaunch { findings: vec![error.to_string()], ..self },
        };
        let (counts, bytes) = (&report.counts, &report.counts.bytes);
        EmulatedLaunch {
            verdict: if report.is_clean() { LaunchOutcome::Clean } else { LaunchOutcome::Findings },
            findings: findings(report),
            instructions: counts.instructions,
            global_bytes_read: bytes.global_read,
            global_bytes_written: bytes.global_written,
            bytes_copied_to_shared: bytes.copied_to_shared,
            bytes_copied_from_shared: bytes.copied_from_shared,
            shared_bytes_moved: bytes.shared_read + bytes.shared_written,
            tensor_bytes_moved: bytes.tensor_read + bytes.tensor_written,
            local_bytes_moved: bytes.local_read + bytes.local_written,
            tensor_instructions: counts.mmas,
            multiply_adds: counts.multiply_adds,
            bulk_copies: counts.bulk_copies,
            atomics: counts.atomics,
            mbarrier_tests: counts.mbarrier_tests,
            ..self
        }
    }
}

/// A handle to the launches of an emulated device since the first handle was created.
#[derive(Clone, Debug, Default)]
pub struct EmulatedLaunches(Arc<Mutex<Vec<EmulatedLaunch>>>);

impl EmulatedLaunches {
    /// The launches, in order.
    pub fn read(&self) -> Vec<EmulatedLaunch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push(&self, launch: EmulatedLaunch) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(launch);
    }
}

/// Destinations of launch records.
#[derive(Debug, Default)]
pub(super) struct Records {
    kept: Option<EmulatedLaunches>,
    log: Option<PathBuf>,
}

impl Records {
    /// Keeps later launches.
    pub(super) fn keep(&mut self) -> EmulatedLaunches {
        self.kept.get_or_insert_default().clone()
    }

    /// Appends later launches to a file.
    pub(super) fn log_to(&mut self, path: &Path) {
        self.log = Some(path.to_path_buf());
    }

    /// Records a launch.
    pub(super) fn add(&self, launch: impl FnOnce() -> EmulatedLaunch) -> DriverResult<()> {
        if self.kept.is_none() && self.log.is_none() {
            return Ok(());
        }
        let launch = launch();
        if let Some(path) = &self.log {
            let refused =
                |reason: String| DriverError::new("log", format!("{}: {reason}", path.display()));
            let mut line =
                serde_json::to_string(&launch).map_err(|error| refused(error.to_string()))?;
            line.push('\n');
            // A single write, so that lines of concurrent tests are not interleaved.
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .and_then(|mut file| file.write_all(line.as_bytes()))
                .map_err(|error| refused(error.to_string()))?;
        }
        if let Some(kept) = &self.kept {
            kept.push(launch);
        }
        Ok(())
    }
}
