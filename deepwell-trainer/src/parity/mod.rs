//! Does MXFP8 hold BF16's loss? One model, trained twice from the same weights on the same
//! batches, each in a process of its own so that memory is measured cleanly.

mod page;
mod verdict;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use verdict::judge;
pub use verdict::{Check, Curve, GAP_TOLERANCE_REL};

use crate::commands::ExitStatus;
use crate::console::{Console, say};
use crate::data::HeldoutWindows;
use crate::reference::reference_entropies;
use crate::run::{RunSummary, open_data};
use crate::trainer::{Progress, Record, Trainer};
use crate::{ProductCounts, Settings, TrainError};

/// Steps of more floating-point operations are not audited: some 50 times the default run's.
const AUDITED_FLOPS_MAX: u64 = 1_000_000_000_000;

/// What to compare.
#[derive(Clone, Debug)]
pub struct ParityOptions {
    /// Settings of the MXFP8 run; the BF16 run differs in the precision alone.
    pub settings: Settings,
    /// Where the report and the runs go.
    pub out: PathBuf,
    /// Go on where an earlier call stopped.
    pub resume: bool,
    /// Train BF16 again with another data order.
    pub control: bool,
}

/// One run in the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// Mean training loss over the last tenth of the steps, nats per token.
    pub train_loss: f64,
    /// Mean of the last three evaluations.
    pub val_loss: f64,
    /// `exp(val_loss)`.
    pub val_ppl: f64,
    /// Median over steps.
    pub tokens_per_s: f64,
    /// Steps done.
    pub steps: u64,
    /// Step after which it was resumed, if it was.
    pub resumed_after: Option<u64>,
    /// Predicted peak memory.
    pub peak_bytes_predicted: u64,
    /// Measured peak memory.
    pub peak_bytes_measured: Option<u64>,
    /// Wall time.
    pub wall_s: f64,
}

/// `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParityReport {
    /// Steps asked for.
    pub steps: u64,
    /// Tokens per run.
    pub tokens: u64,
    /// Trained values.
    pub params: u64,
    /// Where it ran.
    pub device: String,
    /// The BF16 run.
    pub bf16: RunReport,
    /// The MXFP8 run; none if the comparison was stopped before it began.
    pub mxfp8: Option<RunReport>,
    /// BF16 with another data order.
    pub control: Option<RunReport>,
    /// Mean over the last three evaluations of `(mxfp8 - bf16) / bf16`.
    pub val_gap_rel: Option<f64>,
    /// Largest magnitude of that after step 200, or after a fifth of a shorter run.
    pub val_gap_rel_max_after_warmup: Option<f64>,
    /// Largest magnitude of `(control - bf16) / bf16` over the same evaluations.
    pub control_gap_rel: Option<f64>,
    /// Held-out cross-entropy of a unigram model, nats per token.
    pub unigram_entropy: f64,
    /// Held-out cross-entropy of an add-one bigram model, nats per token.
    pub bigram_entropy: f64,
    /// MXFP8 share of the FLOPs of the blocks' linear layers.
    pub mxfp8_flop_share: f64,
    /// The same with the output head counted as a linear layer.
    pub mxfp8_flop_share_with_head: f64,
    /// MXFP8 products run, by product.
    pub mxfp8_gemms_run: ProductCounts,
    /// Bytes of quantized operands that they read, by product.
    pub mxfp8_quantized_bytes: ProductCounts,
    /// Predicted peak of the MXFP8 run.
    pub peak_bytes_predicted: u64,
    /// Measured peak of the MXFP8 run.
    pub peak_bytes_measured: Option<u64>,
    /// `pass`, `fail` or `interrupted`.
    pub verdict: String,
    /// Each check with its figures.
    pub checks: Vec<Check>,
}

impl ParityReport {
    /// The exit status that the verdict stands for.
    pub fn exit_status(&self) -> ExitStatus {
        match self.verdict.as_str() {
            "pass" => ExitStatus::Success,
            "interrupted" => ExitStatus::Interrupted,
            _ => ExitStatus::Failed,
        }
    }
}

/// A finished or stopped run with its curves.
pub(crate) struct FinishedRun {
    pub(crate) summary: RunSummary,
    pub(crate) records: Vec<Record>,
}

impl FinishedRun {
    fn read(out: &Path) -> Result<FinishedRun, TrainError> {
        let path = out.join("summary.json");
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        let unreadable = |path: &Path, error: serde_json::Error| {
            TrainError::io(path)(std::io::Error::new(std::io::ErrorKind::InvalidData, error))
        };
        let summary = serde_json::from_str(&text).map_err(|error| unreadable(&path, error))?;
        let path = Trainer::metrics_path(out);
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        let records = text
            .lines()
            .map(|line| serde_json::from_str(line).map_err(|error| unreadable(&path, error)))
            .collect::<Result<_, _>>()?;
        Ok(FinishedRun { summary, records })
    }

    /// Held-out losses by step.
    pub(crate) fn evaluations(&self) -> Curve {
        self.records.iter().filter_map(|r| Some((r.step, r.val_loss?))).collect()
    }

    /// Training losses by step.
    pub(crate) fn losses(&self) -> Curve {
        self.records.iter().filter_map(|r| Some((r.step, r.loss?))).collect()
    }

    fn report(&self) -> RunReport {
        let losses = self.losses();
        let tail = &losses[losses.len() - (losses.len() / 10).max(1).min(losses.len())..];
        let evaluations = self.evaluations();
        let last = &evaluations[evaluations.len().saturating_sub(3)..];
        let mean = |curve: &[(u64, f64)]| {
            curve.iter().map(|&(_, loss)| loss).sum::<f64>() / curve.len().max(1) as f64
        };
        let val_loss = mean(last);
        RunReport {
            train_loss: mean(tail),
            val_loss,
            val_ppl: val_loss.exp(),
            tokens_per_s: self.summary.fit.tokens_per_s,
            steps: self.summary.fit.step,
            resumed_after: self.summary.fit.resumed_after,
            peak_bytes_predicted: self.summary.peak_bytes_predicted,
            peak_bytes_measured: self.summary.peak_bytes_measured,
            wall_s: self.summary.wall_s,
        }
    }
}

/// Runs both trainings and writes `report.json`, `report.html` and `metrics.jsonl`.
///
/// # Errors
/// Whatever stops one of the runs; its own words go to standard error.
pub fn run(options: &ParityOptions, stop: &Arc<AtomicBool>) -> Result<ParityReport, TrainError> {
    let mut options = options.clone();
    options.settings.check()?;
    options.settings.resolve_precision(&deepwell_probe::probe())?;
    let settings = &mut options.settings;
    // Everything that a run would refuse is refused before the first one starts.
    let model = settings.model_source()?;
    model.check_trainable(settings.train_frozen)?;
    let graph = model.capture(Some(settings.seq_len))?;
    deepwell_ir::apply_precision(&graph, &settings.precision_policy()?)?;
    settings.resolve_learning_rate(graph.parameter_count());
    let options = &options;
    let settings = &options.settings;
    let mut console = Console::new("parity", settings.steps);
    let dataset = open_data(settings, &mut console)?;
    let tokens = dataset.tokens();
    tokens.check_vocab(model.vocab_size() as u64)?;
    let rows = settings.batch_size;
    let windows = HeldoutWindows::new(
        Arc::clone(tokens),
        rows,
        settings.seq_len,
        Some(settings.eval_tokens),
    )?;
    let entropies = reference_entropies(tokens, model.vocab_size() as u64, Some(&windows))?;
    std::fs::create_dir_all(&options.out).map_err(TrainError::io(&options.out))?;

    let bf16 = Settings { precision: "bf16".to_string(), policy: None, ..settings.clone() };
    let control = Settings { data_seed: Some(settings.seed ^ 0x5EED), ..bf16.clone() };
    // The audit makes the step's products again on the processor.
    let tokens_per_step = (settings.seq_len * settings.batch_size) as u64;
    let flops = 6 * graph.parameter_count() * tokens_per_step;
    let audit = flops <= AUDITED_FLOPS_MAX;
    if !audit {
        let text = "no audit of the first step: the processor would take long over one so large";
        Progress::note(&mut console, text);
    }
    let mxfp8 = Settings { audit, ..settings.clone() };
    let mut runs = vec![("bf16", bf16), ("mxfp8", mxfp8)];
    if options.control {
        runs.push(("control", control));
    }
    let mut finished = Vec::with_capacity(runs.len());
    for (name, settings) in runs {
        let out = options.out.join(name);
        let settings = Settings { out: out.clone(), ..settings };
        train_in_child(name, &settings, options.resume)?;
        let run = FinishedRun::read(&out)?;
        let interrupted = run.summary.fit.interrupted;
        finished.push(run);
        if interrupted || stop.load(Ordering::Relaxed) {
            break;
        }
    }
    let report = report(options, &finished, entropies);
    write_outputs(options, &report, &finished)?;
    Ok(report)
}

/// The running program, also when its file has been replaced meanwhile by a new build.
fn this_program() -> Result<PathBuf, TrainError> {
    let running = PathBuf::from("/proc/self/exe");
    if running.exists() {
        return Ok(running);
    }
    std::env::current_exe().map_err(TrainError::io("this program"))
}

/// Starts this program again for one run and waits for it. A finished run is not run again.
fn train_in_child(name: &str, settings: &Settings, resume: bool) -> Result<(), TrainError> {
    let out = &settings.out;
    if resume && let Ok(run) = FinishedRun::read(out) {
        let is_done = run.summary.fit.step == settings.steps && run.summary.settings == *settings;
        if is_done {
            say(format_args!("{name:>8} is done already"));
            return Ok(());
        }
    }
    if !resume && out.exists() {
        std::fs::remove_dir_all(out).map_err(TrainError::io(out))?;
    }
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
    command.arg("train").arg("--run-file").arg(&run_file).args(["--label", name]);
    command.arg("--stop-with-parent").stdin(Stdio::piped()).stdout(Stdio::null());
    if resume {
        command.arg("--resume");
    }
    let mut child = command.spawn().map_err(TrainError::io(&program))?;
    // Held open until the child has ended: when this process dies, the child sees the end.
    let held_open = child.stdin.take();
    let status = child.wait().map_err(TrainError::io(&program))?;
    drop(held_open);
    if status.success() || status.code() == Some(130) {
        return Ok(());
    }
    Err(TrainError::Setting {
        setting: "run",
        expected: format!("the {name} run to end well"),
        got: status.to_string(),
        hint: Some("its own words are above; `--resume` goes on from its checkpoint".to_string()),
    })
}

fn report(
    options: &ParityOptions,
    runs: &[FinishedRun],
    entropies: crate::reference::ReferenceEntropies,
) -> ParityReport {
    let bf16 = &runs[0];
    let (mxfp8, control) = (runs.get(1), runs.get(2));
    let verdict = mxfp8.map(|mxfp8| judge(bf16, mxfp8, control, entropies.bigram));
    let interrupted = mxfp8.is_none() || runs.iter().any(|run| run.summary.fit.interrupted);
    let checks = verdict.as_ref().map_or_else(Vec::new, |verdict| verdict.checks.clone());
    let is_pass = checks.iter().all(|check| check.passed);
    let summary = &mxfp8.unwrap_or(bf16).summary;
    ParityReport {
        steps: options.settings.steps,
        tokens: summary.fit.step * summary.tokens_per_step,
        params: summary.params,
        device: summary.device.clone(),
        bf16: bf16.report(),
        mxfp8: mxfp8.map(FinishedRun::report),
        control: control.map(FinishedRun::report),
        val_gap_rel: verdict.as_ref().map(|verdict| verdict.val_gap_rel),
        val_gap_rel_max_after_warmup: verdict.as_ref().map(|v| v.val_gap_rel_max_after_warmup),
        control_gap_rel: verdict.as_ref().and_then(|verdict| verdict.control_gap_rel),
        unigram_entropy: entropies.unigram,
        bigram_entropy: entropies.bigram,
        mxfp8_flop_share: summary.mxfp8_flop_share,
        mxfp8_flop_share_with_head: summary.mxfp8_flop_share_with_head,
        mxfp8_gemms_run: summary.mxfp8_gemms_run,
        mxfp8_quantized_bytes: summary.quantized_bytes,
        peak_bytes_predicted: summary.peak_bytes_predicted,
        peak_bytes_measured: summary.peak_bytes_measured,
        verdict: match (interrupted, is_pass) {
            (true, _) => "interrupted",
            (false, true) => "pass",
            (false, false) => "fail",
        }
        .to_string(),
        checks,
    }
}

fn write_outputs(
    options: &ParityOptions,
    report: &ParityReport,
    runs: &[FinishedRun],
) -> Result<(), TrainError> {
    let write = |name: &str, text: String| {
        let path = options.out.join(name);
        std::fs::write(&path, text).map_err(TrainError::io(&path))
    };
    let json = serde_json::to_string_pretty(report).expect("a report is plain data");
    write("report.json", json)?;
    write("report.html", page::html(options, report, runs))?;
    let mut lines = String::new();
    for (name, run) in ["bf16", "mxfp8", "control"].iter().zip(runs) {
        for record in &run.records {
            let mut value = serde_json::to_value(record).expect("a record is plain data");
            value["run"] = serde_json::Value::from(*name);
            lines.push_str(&value.to_string());
            lines.push('\n');
        }
    }
    write("metrics.jsonl", lines)?;
    say(page::text(report));
    say(format_args!("report: {}", options.out.join("report.html").display()));
    Ok(())
}
