//! The runs of a comparison: each in a separate process, so that memory is measured cleanly and
//! runs cannot affect each other.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use deepwell_precision::GuardEventKind;
use serde_json::Value;

use super::options::Curve;
use super::report::RunReport;
use super::verdict::{RunFacts, at_end};
use crate::record::Record;
use crate::run::RunSummary;
use crate::run_folder::RunRecord;
use crate::run_paths;
use crate::{Settings, Start, TrainError};

/// A finished or stopped run with its curves.
#[derive(Clone, Debug)]
pub(crate) struct FinishedRun {
    pub(crate) summary: RunSummary,
    /// Fingerprint of the run.
    fingerprint: Value,
    pub(crate) records: Vec<Record>,
}

impl FinishedRun {
    pub(super) fn read(out: &Path) -> Result<FinishedRun, TrainError> {
        let unreadable = |path: &Path, error: serde_json::Error| {
            TrainError::io(path)(std::io::Error::new(std::io::ErrorKind::InvalidData, error))
        };
        let path = out.join("summary.json");
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        let summary = serde_json::from_str(&text).map_err(|error| unreadable(&path, error))?;
        let path = out.join("run.json");
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        let record: RunRecord =
            serde_json::from_str(&text).map_err(|error| unreadable(&path, error))?;
        let path = run_paths::metrics(out);
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        let records = text
            .lines()
            .map(|line| serde_json::from_str(line).map_err(|error| unreadable(&path, error)))
            .collect::<Result<_, _>>()?;
        Ok(FinishedRun { summary, fingerprint: record.fingerprint, records })
    }

    /// Held-out losses by step.
    pub(crate) fn evaluations(&self) -> Curve {
        self.records.iter().filter_map(|r| Some((r.step, r.val_loss?))).collect()
    }

    /// Numbers of tokens predicted by an earlier evaluation and by the last one.
    pub(super) fn eval_tokens(&self) -> [u64; 2] {
        let tokens = || self.records.iter().filter_map(|record| record.val_tokens);
        [tokens().next().unwrap_or(0), tokens().next_back().unwrap_or(0)]
    }

    /// Training losses by step.
    pub(crate) fn losses(&self) -> Curve {
        self.records.iter().filter_map(|r| Some((r.step, r.loss?))).collect()
    }

    /// Number of guard offences after which the GEMMs stayed in low precision.
    fn guard_offences(&self) -> usize {
        let guards = self.records.iter().filter_map(|record| record.guard.as_ref());
        guards.filter(|event| matches!(event.kind, GuardEventKind::Offence)).count()
    }

    /// The facts that the verdict needs.
    pub(super) fn facts(&self) -> RunFacts {
        let summary = &self.summary;
        RunFacts {
            settings: summary.settings.clone(),
            fingerprint: self.fingerprint.clone(),
            steps: summary.fit.step,
            losses: self.losses(),
            evaluations: self.evaluations(),
            heldout_losses: summary.fit.heldout_losses.clone(),
            quantized_gemms: summary.quantized_gemms_run.total(),
            quantized_share_planned: summary.quantized_flop_share_planned,
            quantized_share_run: summary.quantized_flop_share,
            guard_offences: self.guard_offences(),
            audit: summary.fit.audit.clone(),
        }
    }

    pub(super) fn report(&self) -> RunReport {
        let losses = self.losses();
        let tail = &losses[losses.len() - (losses.len() / 10).max(1).min(losses.len())..];
        let val_loss = at_end(&self.evaluations());
        RunReport {
            train_loss: mean(tail),
            val_loss,
            val_ppl: val_loss.exp(),
            tokens_per_s: self.summary.fit.tokens_per_s,
            steps: self.summary.fit.step,
            resumed_after: self.summary.fit.resumed_after,
            peak_bytes_predicted: self.summary.peak_bytes_predicted,
            peak_bytes_measured: self.summary.peak_bytes_measured,
            expert_rows: self.summary.fit.expert_rows.clone(),
            wall_s: self.summary.wall_s,
        }
    }
}

fn mean(curve: &[(u64, f64)]) -> f64 {
    curve.iter().map(|&(_, value)| value).sum::<f64>() / curve.len() as f64
}

/// Path of the running program, even if a new build has replaced its file.
fn this_program() -> Result<PathBuf, TrainError> {
    let running = PathBuf::from("/proc/self/exe");
    if running.exists() {
        return Ok(running);
    }
    std::env::current_exe().map_err(TrainError::io("this program"))
}

/// Starts this program again for one run, waits for it and reads its results. Progress lines start
/// with `label`.
///
/// # Errors
/// The run fails; its own message went to standard error.
pub(super) fn train_in_child(
    label: &str,
    settings: &Settings,
    start: Start,
) -> Result<FinishedRun, TrainError> {
    let out = &settings.out;
    std::fs::create_dir_all(out).map_err(TrainError::io(out))?;
    let run_file = out.join("run.toml");
    let text = toml::to_string(settings).map_err(|error| TrainError::Setting {
        setting: "run file",
        expected: "settings that TOML can hold".to_string(),
        got: error.to_string(),
        hint: None,
    })?;
    std::fs::write(&run_file, text).map_err(TrainError::io(&run_file))?;
    let program = this_program()?;
    let mut command = Command::new(&program);
    command.arg("train").arg("--run-file").arg(&run_file).args(["--label", label]);
    command.arg("--stop-with-parent").stdin(Stdio::piped()).stdout(Stdio::null());
    if matches!(start, Start::Resume | Start::ResumeChanged) {
        // A completed run compares its fingerprint and keeps its summary.
        command.arg("--resume");
    }
    let mut child = command.spawn().map_err(TrainError::io(&program))?;
    // Held open until the child has ended: when this process dies, the child sees the end.
    let held_open = child.stdin.take();
    let status = child.wait().map_err(TrainError::io(&program))?;
    drop(held_open);
    if status.success() || status.code() == Some(130) {
        return FinishedRun::read(out);
    }
    if !out.join("run.json").exists() {
        // The run has not begun: leave the folder free for a corrected command.
        let _ = std::fs::remove_file(&run_file);
        let seed = out.parent().into_iter();
        std::iter::once(out.as_path()).chain(seed).try_for_each(std::fs::remove_dir).ok();
    }
    Err(TrainError::Setting {
        setting: "run",
        expected: format!("the run `{label}` to end well"),
        got: status.to_string(),
        hint: Some("its own words are above; `--resume` goes on from its checkpoint".to_string()),
    })
}
