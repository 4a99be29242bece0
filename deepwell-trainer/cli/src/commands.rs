//! `deepwell train` and `deepwell parity`: arguments and execution.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use deepwell_ir::ops::{MasterFormat, MomentFormat};
use deepwell_ir::{Recompute, SavedActivations};
use deepwell_precision::Fallback;
use deepwell_trainer::console::Console;
use deepwell_trainer::parity::ablation::{self, AblateBy, AblationOptions};
use deepwell_trainer::parity::{GAP_TOLERANCE_REL, ParityOptions, ParityReport, reference};
use deepwell_trainer::plan_file::PlanLink;
use deepwell_trainer::run::{RunOptions, run, run_as, stop_with_parent};
use deepwell_trainer::{
    Device, Devices, Documents, ExitStatus, Launched, Member, PARITY_EVAL_TOKENS,
    PARITY_INTERIM_PART, Progress, Settings, SettingsLayer, Start, TrainError, library_version,
    supervise,
};
use serde::Serialize;

use crate::bytes;
use crate::degrees::{Degrees, check_ranks};
use crate::optimizer_args::{OptimizerArgs, optimizer_of};
use crate::output::print_json;
use crate::router_args::RouterArgs;

/// Default number of pairs of runs of `deepwell parity`.
const SEEDS: u64 = 4;

/// Arguments of `deepwell train`. Serialized, they are settings of a run file.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub(crate) struct TrainArgs {
    /// Run file in TOML; flags take precedence over its settings
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) run_file: Option<PathBuf>,
    /// Plan file from `deepwell plan MODEL --json`; sets model, device, ranks, batch and precision,
    /// and contradicting settings are an error
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: Option<PathBuf>,
    /// Preset, config.json, model folder or .pt2 archive [default: parity-3m]
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Also train parameters that a .pt2 archive exports with `requires_grad = false`; without this
    /// flag such an archive is an error
    #[arg(long)]
    pub(crate) train_frozen: bool,
    /// Training data: text, .jsonl, .parquet, folders, globs or token files [default: Rust sources
    /// of the locked dependencies]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
    /// Evaluation data, in the same forms as --data [default: a held-out share of --data]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(crate) eval_data: Vec<PathBuf>,
    /// Field of a record that holds its text or messages [default: the first present of text,
    /// content, messages and conversations]
    #[arg(long, value_name = "NAME")]
    pub(crate) text_field: Option<String>,
    /// Hugging Face tokenizer.json (also one from `deepwell tokenizer train`), or `bytes` [default:
    /// the file in the model's folder, else bytes]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Documents packed into a sequence: joined attends across documents, masked keeps them
    /// separate [default: joined]
    #[arg(long, value_name = "HOW")]
    pub(crate) documents: Option<Documents>,
    /// Folder of the token cache [default: target/deepwell-cache]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Precision preset: f32, bf16, mxfp8, mxfp8-floor, mxfp8-128, mxfp8-2d, nvfp4; on a CPU also
    /// mxfp8-hybrid, mxfp8-e5m2, mxfp6, mxfp6-e2m3, mxfp6-e3m2, mxfp4; or auto: on a GPU each
    /// linear layer in the fastest by predicted times of bf16, mxfp8 (on Hopper mxfp8-128)
    /// and, on Blackwell, nvfp4; mxfp8 elsewhere [default: auto]
    #[arg(long)]
    pub(crate) precision: Option<String>,
    /// Policy file in TOML; replaces --precision
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Train in BF16 if the device supports none of the quantized formats of the precision; without
    /// this flag that is an error
    #[arg(long)]
    pub(crate) allow_fallback: bool,
    /// Reaction of the guards to a GEMM over their limits: safe computes it in BF16 for a while,
    /// strict stops the run, off only records an event [default: the policy's, else safe]
    #[arg(long, value_name = "ANSWER")]
    pub(crate) fallback: Option<Fallback>,
    /// Training steps [default: 1000]
    #[arg(long)]
    pub(crate) steps: Option<u64>,
    /// Tokens per sequence [default: 128]
    #[arg(long)]
    pub(crate) seq_len: Option<usize>,
    /// Sequences per step, over all ranks [default: 8]
    #[arg(long)]
    pub(crate) batch_size: Option<usize>,
    /// Sequences per micro-batch; divides the batch of a data-parallel rank [default: chosen by the
    /// planner]
    #[arg(long, value_name = "SEQUENCES")]
    pub(crate) micro_batch: Option<usize>,
    /// Recomputation in the backward pass: none, norms, activations (activation functions),
    /// selective (both), full (whole layers) or full:8 (8 whole layers, the others selective)
    /// [default: chosen by the planner]
    #[arg(long, value_name = "RULE")]
    pub(crate) recompute: Option<Recompute>,
    /// Storage of activations between the forward and the backward pass: exact, once (none both in
    /// BF16 and quantized; the same losses) or mxfp8 (inputs of activation functions too, in half
    /// of the memory) [default: exact]
    #[arg(long, value_name = "STORAGE")]
    pub(crate) saved_activations: Option<SavedActivations>,
    /// Memory of each device that the planner may use, such as 78GiB [default: 98 % of the free
    /// memory]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    #[serde(rename = "memory_limit_bytes")]
    pub(crate) memory_limit: Option<u64>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) optimizer: OptimizerArgs,
    /// Minimum number of held-out tokens of an evaluation [default: 131072, or all held-out tokens
    /// if there are fewer]
    #[arg(long)]
    pub(crate) eval_tokens: Option<u64>,
    /// Peak learning rate [default: by parameter count, 7e-4 below 30 million]
    #[arg(long)]
    pub(crate) learning_rate: Option<f64>,
    /// Steps of linear warmup to the peak learning rate [default: a tenth of the steps, at least
    /// 100, at most a third of the steps]
    #[arg(long, value_name = "STEPS")]
    pub(crate) warmup_steps: Option<u64>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) router: RouterArgs,
    /// Seed of initial weights and data order [default: 0]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// `cpu`, `cuda[:N]`, or `emulated:ARCH` with sm90, sm100, sm103 or sm120: the CUDA path on an
    /// emulator, for small models [default: cpu]
    #[arg(long)]
    pub(crate) device: Option<Device>,
    /// Ranks of the run: `cpu:N` or `emulated:ARCH:N` for N ranks in this process, or consecutive
    /// GPUs such as `cuda:0,cuda:1`, with a process per GPU
    #[arg(long, conflicts_with = "device")]
    #[serde(skip)]
    pub(crate) devices: Option<Devices>,
    /// Run as one rank started by torchrun, mpirun or srun: with `--device cuda` on its own GPU, or
    /// on a CPU in a build with the feature `mpi`
    #[arg(long)]
    #[serde(skip)]
    pub(crate) launched: bool,
    /// Seconds that a rank waits for another rank before the run fails on all ranks [default: 1800]
    #[arg(long, value_name = "SECONDS")]
    #[serde(rename = "rank_timeout_s")]
    pub(crate) rank_timeout: Option<u64>,
    /// How those ranks share the model
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) degrees: Degrees,
    /// Steps between two checkpoints [default: a fifth of the steps]
    #[arg(long, value_name = "STEPS")]
    pub(crate) checkpoint_every: Option<u64>,
    /// Write no checkpoints; the run cannot be resumed
    #[arg(long, conflicts_with_all = ["checkpoint_every", "async_checkpoints"])]
    pub(crate) no_checkpoints: bool,
    /// Write checkpoints from a copy of the state while training continues: shorter stalls, more
    /// memory; GPUs always do
    #[arg(long)]
    pub(crate) async_checkpoints: bool,
    /// Output folder [default: target/deepwell-run]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Resume from the newest checkpoint in the output folder; the ranks may differ, any other
    /// setting that changes the results is an error
    #[arg(long)]
    #[serde(skip)]
    pub(crate) resume: bool,
    /// Resume with changed settings; changes are recorded in run.json
    #[arg(long, requires = "resume")]
    #[serde(skip)]
    pub(crate) accept_changes: bool,
    /// Delete the results of another run in the output folder: metrics, events, checkpoints,
    /// summary
    #[arg(long, conflicts_with = "resume")]
    #[serde(skip)]
    pub(crate) overwrite: bool,
    /// Profile one more step after the last, call by call: print a table, and write profile.json
    /// and trace.json (Chrome, Perfetto) to the output folder
    #[arg(long)]
    #[serde(skip)]
    pub(crate) profile: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    #[serde(skip)]
    pub(crate) json: bool,
    /// Name in front of progress lines
    #[arg(long, hide = true, default_value = "train")]
    #[serde(skip)]
    pub(crate) label: String,
    /// Stop the run when stdin is closed
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub(crate) stop_with_parent: bool,
}

impl TrainArgs {
    /// Returns the launched rank. If the launcher's environment is missing and the ranks are on
    /// CPUs, a build without MPI reports that first, because no launcher would help.
    fn launched_by(&self) -> Result<Launched, TrainError> {
        let of_file = || match &self.run_file {
            Some(path) => Settings::from_file(path).map(|settings| settings.device),
            None => Ok(Settings::default().device),
        };
        Launched::from_environment().or_else(|error| {
            let device = match (self.device, &self.devices) {
                (Some(device), _) => device,
                (None, Some(devices)) => devices.device,
                (None, None) => of_file()?,
            };
            if matches!(device, Device::Cpu | Device::Emulated(_)) {
                library_version(device)?;
            }
            Err(error)
        })
    }

    /// Returns the settings: defaults, the plan, the run file and the flags, each over the ones
    /// before. A launched rank runs with the launcher's number of ranks.
    fn settings(&self, launched: Option<&Launched>) -> Result<Settings, TrainError> {
        let file = match &self.run_file {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
                SettingsLayer::of_file(&text, &path.display().to_string())?
            }
            None => SettingsLayer::default(),
        };
        let mut given = self.flags()?.over(file);
        if let Some(launched) = launched {
            let world_size = launched.world_size as usize;
            let ranks = Settings::of_layers(given.clone())?.ranks;
            if ranks > 1 && ranks != world_size {
                return Err(TrainError::Setting {
                    setting: "devices",
                    expected: format!("the {world_size} ranks that {} started", launched.launcher),
                    got: ranks.to_string(),
                    hint: Some("`--device cuda` takes as many as there are".to_string()),
                });
            }
            given.set("ranks", &world_size);
        }
        let settings = Settings::of_layers(given)?;
        self.with_degrees(settings)
    }

    /// Returns the flags that are settings.
    fn flags(&self) -> Result<SettingsLayer, TrainError> {
        self.check_numbers()?;
        let mut flags = SettingsLayer::of_flags(self);
        if self.eval_tokens.is_some() {
            flags.set("needs_eval_tokens", &true);
        }
        if let Some(Devices { device, ranks }) = &self.devices {
            flags.set("device", device);
            flags.set("ranks", ranks);
        }
        for (name, value) in self.optimizer.given() {
            flags.set(name, &value);
        }
        for (name, value) in self.router.given() {
            flags.set(name, &value);
        }
        if self.degrees.schedule.is_some() || self.degrees.vpp.is_some() {
            let (chunks, schedule) = self.degrees.order()?;
            flags.set("chunks", &chunks);
            flags.set("pipeline_schedule", &schedule);
        }
        Ok(flags)
    }

    /// Checks the flags that could be infinite or NaN: a layer of settings has no such number.
    fn check_numbers(&self) -> Result<(), TrainError> {
        let mut settings = Settings { learning_rate: self.learning_rate, ..Settings::default() };
        self.router.set_in(&mut settings.router);
        settings.check_values()
    }

    /// Returns checked settings, with the stages that `pp_layers` has.
    fn with_degrees(&self, settings: Settings) -> Result<Settings, TrainError> {
        let plan = settings.plan.as_ref().map(PlanLink::file).transpose()?;
        let dp = self.degrees.dp.or(plan.map(|it| it.plan.parallel.batch_ranks()));
        let gives_way = self.resume && plan.is_none();
        let stages = |layers: &Vec<usize>| layers.len() / settings.chunks.max(1);
        let pipeline = self
            .degrees
            .pp
            .unwrap_or_else(|| settings.pp_layers.as_ref().map_or(settings.pipeline, stages));
        let settings = Settings { pipeline, ..settings };
        if !gives_way {
            check_ranks(settings.parallel(), dp, settings.ranks)?;
        }
        match gives_way && !settings.degrees_fit_ranks() {
            true => settings.check_values()?,
            false => settings.check()?,
        }
        Ok(settings)
    }
}

/// Trains one model.
///
/// # Errors
/// The run fails.
pub(crate) fn train(args: TrainArgs, stop: Arc<AtomicBool>) -> Result<ExitStatus> {
    let launched = args.launched.then(|| args.launched_by()).transpose()?;
    if launched.is_none() {
        Launched::expect_none()?;
    }
    let settings = args.settings(launched.as_ref())?;
    if args.stop_with_parent {
        stop_with_parent(Arc::clone(&stop));
    }
    if launched.is_none() && settings.ranks > 1 && matches!(settings.device, Device::Cuda(_)) {
        let more = ["--launched", "--stop-with-parent"];
        let more = &more[..if args.stop_with_parent { 1 } else { 2 }];
        return Ok(supervise(&settings, more, &stop)?);
    }
    let start = match (args.resume, args.accept_changes, args.overwrite) {
        (true, false, _) => Start::Resume,
        (true, true, _) => Start::ResumeChanged,
        (false, _, true) => Start::Overwrite,
        (false, _, false) => Start::New,
    };
    let options = RunOptions { start, profile: args.profile, ends_stuck_process: true };
    let patience = Duration::from_secs(settings.rank_timeout_s);
    let find = |launched| Member::find(launched, settings.device, patience);
    let member = launched.map(find).transpose()?.map(Arc::new);
    let mut console = Console::new(&args.label, settings.steps);
    let is_first = member.as_ref().is_none_or(|member| member.is_first());
    let progress: &mut dyn Progress = if is_first { &mut console } else { &mut () };
    let summary = match &member {
        None => run(&settings, options, stop, progress)?,
        Some(member) => {
            let done = run_as(Some(member), &settings, options, stop, progress);
            let done = member.told(done).and_then(|summary| {
                member.finish()?;
                Ok(summary)
            });
            match done {
                Ok(summary) => summary,
                Err(_) if member.is_reported_by_first() => return Ok(ExitStatus::Reported(1)),
                Err(error) => return Err(error.into()),
            }
        }
    };
    if args.json && is_first {
        print_json(&summary)?;
    }
    Ok(if summary.fit.interrupted { ExitStatus::Interrupted } else { ExitStatus::Success })
}

/// Arguments of `deepwell parity`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ParityArgs {
    /// Training steps of each run
    #[arg(long, default_value_t = 1000)]
    pub(crate) steps: u64,
    /// Preset, config.json, model folder or .pt2 archive
    #[arg(long, default_value = reference::MODEL)]
    pub(crate) model: String,
    /// Also train parameters that a .pt2 archive exports with `requires_grad = false`; without this
    /// flag such an archive is an error
    #[arg(long)]
    pub(crate) train_frozen: bool,
    /// Training data: text, .jsonl, .parquet, folders, globs or token files [default: Rust sources
    /// of the locked dependencies]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
    /// Field of a record that holds its text or messages [default: the first present of text,
    /// content, messages and conversations]
    #[arg(long, value_name = "NAME")]
    pub(crate) text_field: Option<String>,
    /// Hugging Face tokenizer.json (also one from `deepwell tokenizer train`), or `bytes` [default:
    /// the file in the model's folder, else bytes]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Folder of the token cache
    #[arg(long, value_name = "DIR", default_value = "target/deepwell-cache")]
    pub(crate) cache_dir: PathBuf,
    /// Tokens per sequence
    #[arg(long, default_value_t = 128)]
    pub(crate) seq_len: usize,
    /// Sequences per step
    #[arg(long, default_value_t = reference::BATCH_SIZE)]
    pub(crate) batch_size: usize,
    /// Sequences per micro-batch; divides the batch of a data-parallel rank [default: chosen by the
    /// planner]
    #[arg(long, value_name = "SEQUENCES")]
    pub(crate) micro_batch: Option<usize>,
    /// Recomputation in the backward pass: none, norms, activations (activation functions),
    /// selective (both), full (whole layers) or full:8 (8 whole layers, the others selective)
    /// [default: chosen by the planner]
    #[arg(long, value_name = "RULE")]
    pub(crate) recompute: Option<Recompute>,
    /// Storage of activations between the forward and the backward pass in the runs in low
    /// precision: exact, once or mxfp8; BF16 runs have exact
    #[arg(long, value_name = "STORAGE", default_value_t = SavedActivations::Exact)]
    pub(crate) saved_activations: SavedActivations,
    /// Storage of AdamW's moments in the runs in low precision: fp32, or fp8, a quarter of the
    /// memory; BF16 runs have fp32. With `--precision bf16` the moments are all that differs
    #[arg(long, value_name = "FORMAT", default_value_t = MomentFormat::Fp32)]
    pub(crate) moments: MomentFormat,
    /// Storage of master weights in the runs in low precision: fp32 or bf16; BF16 runs have fp32
    #[arg(long, value_name = "FORMAT", default_value_t = MasterFormat::Fp32)]
    pub(crate) masters: MasterFormat,
    /// Update parameters in the backward pass in the runs in low precision
    #[arg(long)]
    pub(crate) optimizer_in_backward: bool,
    /// Minimum number of held-out tokens of the last evaluation; earlier evaluations read a
    /// twentieth of it
    #[arg(long, default_value_t = PARITY_EVAL_TOKENS)]
    pub(crate) eval_tokens: u64,
    /// Peak learning rate [default: 2e-3 for the default model, where it is BF16's best; for others
    /// by parameter count, 7e-4 below 30 million]
    #[arg(long)]
    pub(crate) learning_rate: Option<f64>,
    /// Steps of linear warmup to the peak learning rate [default: six tenths of the steps for the
    /// default model; for others a tenth, at least 100, at most a third of the steps]
    #[arg(long, value_name = "STEPS")]
    pub(crate) warmup_steps: Option<u64>,
    /// Seed of initial weights and data order of the first pair
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Pairs of runs, each with its own seed
    #[arg(long, value_name = "PAIRS", default_value_t = SEEDS)]
    pub(crate) seeds: u64,
    /// If the verdict is open after --seeds pairs, train as many pairs again; intervals are then
    /// 97.06 %, so that two looks at the data err as rarely as one 95 % interval
    #[arg(long)]
    pub(crate) again: bool,
    /// Largest relative gap of held-out loss that counts as parity, as a mean over pairs, in
    /// percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * GAP_TOLERANCE_REL)]
    pub(crate) tolerance: f64,
    /// `cpu`, `cuda[:N]`, or `emulated:ARCH` with sm90, sm100, sm103 or sm120: the CUDA path on an
    /// emulator, for small models
    #[arg(long, default_value_t = Device::Cpu)]
    pub(crate) device: Device,
    /// Precision preset to compare with BF16: mxfp8, mxfp8-floor, mxfp8-128, mxfp8-2d, nvfp4; on a
    /// CPU also mxfp8-hybrid, mxfp8-e5m2, mxfp6, mxfp6-e2m3, mxfp6-e3m2, mxfp4; or auto: mxfp8-128
    /// on Hopper, mxfp8 elsewhere
    #[arg(long, default_value = Settings::AUTO)]
    pub(crate) precision: String,
    /// Policy file in TOML; replaces --precision
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Train in BF16 if the device supports none of the quantized formats of the precision; without
    /// this flag that is an error
    #[arg(long)]
    pub(crate) allow_fallback: bool,
    /// Reaction of the guards to a GEMM over their limits: off only records an event, so that runs
    /// stay in the compared precision; safe computes it in BF16 for a while; strict stops the run
    #[arg(long, value_name = "ANSWER", default_value_t = Fallback::Off)]
    pub(crate) fallback: Fallback,
    /// Steps between two checkpoints [default: a fifth of the steps]
    #[arg(long, value_name = "STEPS")]
    pub(crate) checkpoint_every: Option<u64>,
    /// Write checkpoints of the first pair only, for the comparison of expert routing, to save disk
    /// space; other pairs cannot be resumed
    #[arg(long, conflicts_with = "resume")]
    pub(crate) no_checkpoints: bool,
    /// Output folder
    #[arg(long, value_name = "DIR", default_value = "target/parity")]
    pub(crate) out: PathBuf,
    /// Resume the comparison in the output folder
    #[arg(long)]
    pub(crate) resume: bool,
    /// Delete the results of another comparison in the output folder
    #[arg(long, conflicts_with = "resume")]
    pub(crate) overwrite: bool,
    /// Train BF16 of each seed once more, from weights with randomly flipped last bits, to measure
    /// the gap due to chaos alone
    #[arg(long)]
    pub(crate) control: bool,
    /// Ablate the policy: measure the loss gap of each class of quantized operands, quantized alone
    /// and left out, with two runs per class and seed
    #[arg(long, value_name = "CLASSES", conflicts_with_all = ["control", "tolerance", "again"])]
    pub(crate) ablate: Option<AblateBy>,
    /// Restrict the ablation to tensors whose names match this glob, such as `*.v_proj.*`
    #[arg(long, value_name = "GLOB", requires = "ablate")]
    pub(crate) ablate_tensors: Option<String>,
    /// Print report.json (with --ablate ablation.json) on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// Trains pairs of runs in BF16 and in low precision, from the same weights on the same batches,
/// and compares them.
///
/// # Errors
/// One of the runs fails.
pub(crate) fn parity(args: ParityArgs, stop: Arc<AtomicBool>) -> Result<ExitStatus> {
    let defaults = Settings::default();
    let mut settings = Settings {
        model: args.model,
        train_frozen: args.train_frozen,
        data: args.data,
        text_field: args.text_field,
        tokenizer: args.tokenizer,
        cache_dir: args.cache_dir,
        device: args.device,
        precision: args.precision,
        policy: args.policy,
        allow_fallback: args.allow_fallback,
        fallback: Some(args.fallback),
        steps: args.steps,
        seq_len: args.seq_len,
        batch_size: args.batch_size,
        micro_batch: args.micro_batch,
        recompute: args.recompute,
        saved_activations: args.saved_activations,
        optimizer: optimizer_of(args.masters, args.moments, args.optimizer_in_backward),
        eval_tokens: args.eval_tokens,
        interim_eval_tokens: Some((args.eval_tokens / PARITY_INTERIM_PART).max(1)),
        checkpoint_every: args.checkpoint_every,
        no_checkpoints: args.no_checkpoints,
        seed: args.seed,
        learning_rate: args.learning_rate,
        warmup_steps: args.warmup_steps,
        ..defaults
    };
    reference::complete(&mut settings);
    let start = match (args.resume, args.overwrite) {
        (true, _) => Start::Resume,
        (false, true) => Start::Overwrite,
        (false, false) => Start::New,
    };
    if let Some(by) = args.ablate {
        let options = AblationOptions {
            settings,
            out: args.out,
            start,
            seeds: args.seeds,
            by,
            tensors: args.ablate_tensors,
        };
        let (report, status) = ablation::run(&options, &stop)?;
        if args.json {
            print_json(&report)?;
        }
        return Ok(status);
    }
    let options = ParityOptions {
        settings,
        out: args.out,
        start,
        seeds: args.seeds,
        again: args.again,
        control: args.control,
        tolerance_rel: args.tolerance / 100.0,
    };
    let report: ParityReport = deepwell_trainer::parity::run(&options, &stop)?;
    if args.json {
        print_json(&report)?;
    }
    Ok(report.exit_status())
}
