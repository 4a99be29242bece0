//! `deepwell train` and `deepwell parity`: arguments and execution.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use deepwell_ir::Recompute;
use deepwell_precision::Fallback;

use crate::console::{Console, print_json};
pub use crate::degrees::Degrees;
use crate::elastic;
use crate::parity::ablation::{self, AblateBy, AblationOptions};
use crate::parity::{GAP_TOLERANCE_REL, ParityOptions, ParityReport, reference};
use crate::plan_file::PlanFile;
use crate::run::{RunOptions, run, run_as, stop_with_parent};
use crate::settings::{PARITY_EVAL_TOKENS, PARITY_INTERIM_PART};
use crate::world::{Launched, Member, library_version, supervise};
use crate::{Device, Devices, Documents, ExitStatus, Progress, Settings, Start, TrainError};

/// Default number of pairs of runs of `deepwell parity`.
const SEEDS: u64 = 4;

/// Arguments of `deepwell train`. What is given here takes the place of what the run file says.
#[derive(Args, Clone, Debug, Default)]
pub struct TrainArgs {
    /// Run file in TOML
    #[arg(long, value_name = "FILE")]
    pub run_file: Option<PathBuf>,
    /// What `deepwell plan MODEL --json` printed: model, ranks, batches and precision are its
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Preset, config.json, model folder or .pt2 archive
    #[arg(long)]
    pub model: Option<String>,
    /// Train the parameters too that a .pt2 archive has with `requires_grad = false`
    #[arg(long)]
    pub train_frozen: bool,
    /// Text, .jsonl, .parquet, folders, globs or token files [default: sources of the locked
    /// dependencies]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// The same to evaluate on [default: a share of --data is held out]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub eval_data: Vec<PathBuf>,
    /// Field of a record that is its text or its messages [default: text, content, messages or
    /// conversations, the first that is there]
    #[arg(long, value_name = "NAME")]
    pub text_field: Option<String>,
    /// Hugging Face tokenizer.json, or what `deepwell tokenizer train` wrote, or `bytes` [default:
    /// that of the model's folder, else bytes]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Documents that a sequence is cut from: joined, as one text, or masked, so that none sees
    /// another [default: joined]
    #[arg(long, value_name = "HOW")]
    pub documents: Option<Documents>,
    /// Folder of the token cache [default: target/deepwell-cache]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// f32, bf16, mxfp8, mxfp8-floor, mxfp8-128, mxfp8-2d, nvfp4, or auto: mxfp8-128 on Hopper,
    /// mxfp8 elsewhere; bf16 for linear layers where a GPU is not predicted faster with it
    /// [default: auto]
    #[arg(long)]
    pub precision: Option<String>,
    /// Policy file in TOML; takes the place of --precision
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Train in BF16 where the device serves nothing of what the precision quantizes, which is an
    /// error otherwise
    #[arg(long)]
    pub allow_fallback: bool,
    /// How guards answer GEMMs that offend: safe computes them in BF16 for a while, strict stops
    /// the run, off only tells [default: as the policy says, else safe]
    #[arg(long, value_name = "ANSWER")]
    pub fallback: Option<Fallback>,
    /// Steps of the run
    #[arg(long)]
    pub steps: Option<u64>,
    /// Tokens per sequence
    #[arg(long)]
    pub seq_len: Option<usize>,
    /// Sequences per step
    #[arg(long)]
    pub batch_size: Option<usize>,
    /// Sequences that run at a time, a divisor of the batch [default: chosen]
    #[arg(long, value_name = "SEQUENCES")]
    pub micro_batch: Option<usize>,
    /// What the backward pass computes again: none, selective or full [default: chosen]
    #[arg(long, value_name = "RULE")]
    pub recompute: Option<Recompute>,
    /// Held-out tokens of an evaluation, at least [default: 131072, or all where there are fewer]
    #[arg(long)]
    pub eval_tokens: Option<u64>,
    /// Largest learning rate [default: by the size of the model, 7e-4 for small ones]
    #[arg(long)]
    pub learning_rate: Option<f64>,
    /// Steps until the largest learning rate is reached [default: a tenth of the run,
    /// or 100, at most a third]
    #[arg(long, value_name = "STEPS")]
    pub warmup_steps: Option<u64>,
    /// Coefficient of the load-balancing loss of each layer of experts [default: 0]
    #[arg(long, value_name = "COEFFICIENT")]
    pub router_balance: Option<f64>,
    /// Coefficient of the z-loss of each router [default: 0]
    #[arg(long, value_name = "COEFFICIENT")]
    pub router_z: Option<f64>,
    /// Most tokens of an expert over its even share; the rest is dropped [default: none are]
    #[arg(long, value_name = "FACTOR")]
    pub capacity_factor: Option<f64>,
    /// Seed of weights and data order
    #[arg(long)]
    pub seed: Option<u64>,
    /// `cpu`, `cuda[:N]`, or `emulated:` and one of sm90, sm100, sm103, sm120: the CUDA path on an
    /// emulator, for small models
    #[arg(long)]
    pub device: Option<Device>,
    /// Where the ranks of one run are: `cpu:N` for N ranks on this processor, `emulated:ARCH:N`,
    /// or GPUs in a row, `cuda:0,cuda:1`, with a process for each
    #[arg(long, conflicts_with = "device")]
    pub devices: Option<Devices>,
    /// This process is one rank of those that torchrun, mpirun or srun has started, on a GPU of
    /// its own, `--device cuda`, or, in a build with the feature `mpi`, on a processor
    #[arg(long)]
    pub launched: bool,
    /// Seconds that a rank waits for another before all of them end with an error [default: 1800]
    #[arg(long, value_name = "SECONDS")]
    pub rank_timeout: Option<u64>,
    /// How those ranks share the model
    #[command(flatten)]
    pub degrees: Degrees,
    /// Steps between two checkpoints [default: a fifth of the run]
    #[arg(long, value_name = "STEPS")]
    pub checkpoint_every: Option<u64>,
    /// Write no checkpoint, as for a run that only measures: it cannot go on
    #[arg(long, conflicts_with_all = ["checkpoint_every", "async_checkpoints"])]
    pub no_checkpoints: bool,
    /// Write checkpoints from a copy while training goes on, on the CPU too: shorter stalls, more
    /// memory
    #[arg(long)]
    pub async_checkpoints: bool,
    /// Output folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on after the newest checkpoint of the run in the output folder, also with other ranks;
    /// settings that change its numbers must be as they were
    #[arg(long)]
    pub resume: bool,
    /// With --resume: go on with other settings; run.json keeps what changed
    #[arg(long, requires = "resume")]
    pub accept_changes: bool,
    /// Delete the results of another run in the output folder: metrics, events, checkpoints,
    /// summary
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// After the last step, measure one more call by call: a table, and profile.json and
    /// trace.json (Chrome, Perfetto) in the output folder
    #[arg(long)]
    pub profile: bool,
    /// Print the summary as JSON on standard output
    #[arg(long)]
    pub json: bool,
    /// Name in front of progress lines
    #[arg(long, hide = true, default_value = "train")]
    pub label: String,
    /// Stop when standard input ends
    #[arg(long, hide = true)]
    pub stop_with_parent: bool,
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

    /// Returns the settings; a launched rank runs with the launcher's number of ranks.
    fn settings(&self, launched: Option<&Launched>) -> Result<Settings, TrainError> {
        let mut settings = match &self.run_file {
            Some(path) => Settings::from_file(path)?,
            None => Settings::default(),
        };
        let args = self.clone();
        settings.plan = args.plan.or(settings.plan);
        let plan = settings.plan.as_deref().map(PlanFile::read).transpose()?;
        if let Some(plan) = &plan {
            plan.apply(&mut settings, &Settings::default())?;
        }
        let planned = settings.clone();
        settings.model = args.model.unwrap_or(settings.model);
        settings.train_frozen |= args.train_frozen;
        settings.tokenizer = args.tokenizer.or(settings.tokenizer);
        settings.text_field = args.text_field.or(settings.text_field);
        settings.documents = args.documents.unwrap_or(settings.documents);
        settings.cache_dir = args.cache_dir.unwrap_or(settings.cache_dir);
        settings.precision = args.precision.unwrap_or(settings.precision);
        settings.policy = args.policy.or(settings.policy);
        settings.allow_fallback |= args.allow_fallback;
        settings.fallback = args.fallback.or(settings.fallback);
        settings.steps = args.steps.unwrap_or(settings.steps);
        settings.seq_len = args.seq_len.unwrap_or(settings.seq_len);
        settings.batch_size = args.batch_size.unwrap_or(settings.batch_size);
        settings.micro_batch = args.micro_batch.or(settings.micro_batch);
        settings.recompute = args.recompute.or(settings.recompute);
        settings.eval_tokens = args.eval_tokens.unwrap_or(settings.eval_tokens);
        settings.needs_eval_tokens |= args.eval_tokens.is_some();
        settings.learning_rate = args.learning_rate.or(settings.learning_rate);
        settings.warmup_steps = args.warmup_steps.or(settings.warmup_steps);
        settings.seed = args.seed.unwrap_or(settings.seed);
        let router = &mut settings.router;
        router.balance = args.router_balance.unwrap_or(router.balance);
        router.z = args.router_z.unwrap_or(router.z);
        router.capacity_factor = args.capacity_factor.or(router.capacity_factor);
        settings.device = args.device.unwrap_or(settings.device);
        if let Some(Devices { device, ranks }) = args.devices {
            (settings.device, settings.ranks) = (device, ranks);
        }
        if let Some(launched) = launched {
            let world_size = launched.world_size as usize;
            if settings.ranks > 1 && settings.ranks != world_size {
                return Err(TrainError::Setting {
                    setting: "devices",
                    expected: format!("the {world_size} ranks that {} started", launched.launcher),
                    got: settings.ranks.to_string(),
                    hint: Some("`--device cuda` takes as many as there are".to_string()),
                });
            }
            settings.ranks = world_size;
        }
        settings.rank_timeout_s = args.rank_timeout.unwrap_or(settings.rank_timeout_s);
        settings.pp_layers = args.degrees.pp_layers.clone().or(settings.pp_layers);
        let (chunks, schedule) = match (&args.degrees.schedule, args.degrees.vpp) {
            (None, None) => (settings.chunks, settings.pipeline_schedule),
            _ => args.degrees.order()?,
        };
        let stages = |layers: &Vec<usize>| layers.len() / chunks.max(1);
        let stages = settings.pp_layers.as_ref().map_or(settings.pipeline, stages);
        let degrees = Degrees {
            dp: args.degrees.dp.or(plan.as_ref().map(|it| it.plan.parallel.batch_ranks())),
            zero: args.degrees.zero.or(Some(settings.zero)),
            tp: args.degrees.tp.or(Some(settings.tensor)),
            cp: args.degrees.cp.or(Some(settings.context)),
            pp: args.degrees.pp.or(Some(stages)),
            vpp: Some(chunks),
            schedule: schedule.defers_weight_gradients().then(|| schedule.to_string()),
            pp_layers: None,
            ep: args.degrees.ep.or(Some(settings.expert)),
            gives_way: args.resume && plan.is_none(),
        };
        let parallel = degrees.of_ranks(settings.ranks)?;
        settings.zero = parallel.zero;
        (settings.tensor, settings.pipeline) = (parallel.tensor, parallel.pipeline);
        settings.context = parallel.context;
        settings.chunks = parallel.chunks;
        settings.pipeline_schedule = parallel.schedule;
        settings.expert = parallel.expert;
        settings.out = args.out.unwrap_or(settings.out);
        settings.checkpoint_every = args.checkpoint_every.or(settings.checkpoint_every);
        settings.async_checkpoints |= args.async_checkpoints;
        settings.no_checkpoints |= args.no_checkpoints;
        if !args.data.is_empty() {
            settings.data = args.data;
        }
        if !args.eval_data.is_empty() {
            settings.eval_data = args.eval_data;
        }
        if let Some(plan) = &plan {
            plan.apply(&mut settings, &planned)?;
        }
        match degrees.gives_way && !elastic::fits(&settings) {
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
pub fn train(args: TrainArgs, stop: Arc<AtomicBool>) -> Result<ExitStatus, TrainError> {
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
        return supervise(&settings, &more[..if args.stop_with_parent { 1 } else { 2 }], &stop);
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
                Err(error) => return Err(error),
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
pub struct ParityArgs {
    /// Steps of each run
    #[arg(long, default_value_t = 1000)]
    pub steps: u64,
    /// Preset, config.json, model folder or .pt2 archive
    #[arg(long, default_value = reference::MODEL)]
    pub model: String,
    /// Train the parameters too that a .pt2 archive has with `requires_grad = false`
    #[arg(long)]
    pub train_frozen: bool,
    /// Text, .jsonl, .parquet, folders, globs or token files [default: sources of the locked
    /// dependencies]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Field of a record that is its text or its messages [default: text, content, messages or
    /// conversations, the first that is there]
    #[arg(long, value_name = "NAME")]
    pub text_field: Option<String>,
    /// Hugging Face tokenizer.json, or what `deepwell tokenizer train` wrote, or `bytes` [default:
    /// that of the model's folder, else bytes]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Folder of the token cache
    #[arg(long, value_name = "DIR", default_value = "target/deepwell-cache")]
    pub cache_dir: PathBuf,
    /// Tokens per sequence
    #[arg(long, default_value_t = 128)]
    pub seq_len: usize,
    /// Sequences per step
    #[arg(long, default_value_t = reference::BATCH_SIZE)]
    pub batch_size: usize,
    /// Sequences that run at a time, a divisor of the batch [default: chosen]
    #[arg(long, value_name = "SEQUENCES")]
    pub micro_batch: Option<usize>,
    /// What the backward pass computes again: none, selective or full [default: chosen]
    #[arg(long, value_name = "RULE")]
    pub recompute: Option<Recompute>,
    /// Held-out tokens of the last evaluation, at least; those before read a
    /// twentieth
    #[arg(long, default_value_t = PARITY_EVAL_TOKENS)]
    pub eval_tokens: u64,
    /// Largest learning rate [default: of the default model 2e-3, the best of BF16; of others by
    /// the size, 7e-4 for small ones]
    #[arg(long)]
    pub learning_rate: Option<f64>,
    /// Steps until the largest learning rate is reached [default: of the default model six
    /// tenths of the run; of others a tenth, or 100, at most a third]
    #[arg(long, value_name = "STEPS")]
    pub warmup_steps: Option<u64>,
    /// Seed of weights and data order of the first pair
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Pairs of runs, each with a seed of its own
    #[arg(long, value_name = "PAIRS", default_value_t = SEEDS)]
    pub seeds: u64,
    /// Train as many pairs again where those of --seeds leave the verdict open. The intervals are
    /// of 97.06 % then: two of them err as seldom as one of 95 %
    #[arg(long)]
    pub again: bool,
    /// Largest mean gap of held-out loss that counts as holding, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * GAP_TOLERANCE_REL)]
    pub tolerance: f64,
    /// `cpu`, `cuda[:N]`, or `emulated:` and one of sm90, sm100, sm103, sm120: the CUDA path on an
    /// emulator, for small models
    #[arg(long, default_value_t = Device::Cpu)]
    pub device: Device,
    /// What is compared with BF16: mxfp8, mxfp8-floor, mxfp8-128, mxfp8-2d, nvfp4, or auto:
    /// mxfp8-128 on Hopper, mxfp8 elsewhere
    #[arg(long, default_value = Settings::AUTO)]
    pub precision: String,
    /// Policy file in TOML; takes the place of --precision
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Train in BF16 where the device serves nothing of what the precision quantizes, which is an
    /// error otherwise
    #[arg(long)]
    pub allow_fallback: bool,
    /// How guards answer GEMMs that offend: off only tells, so that the runs stay in the precision
    /// that is compared; safe computes them in BF16 for a while, as `train` does
    #[arg(long, value_name = "ANSWER", default_value_t = Fallback::Off)]
    pub fallback: Fallback,
    /// Steps between two checkpoints [default: a fifth of the run]
    #[arg(long, value_name = "STEPS")]
    pub checkpoint_every: Option<u64>,
    /// Write checkpoints of the first pair alone, whose routing is compared: those of many large
    /// runs fill a disk. The others cannot go on
    #[arg(long, conflicts_with = "resume")]
    pub no_checkpoints: bool,
    /// Output folder
    #[arg(long, value_name = "DIR", default_value = "target/parity")]
    pub out: PathBuf,
    /// Go on where an earlier call stopped
    #[arg(long)]
    pub resume: bool,
    /// Delete the results of another comparison in the output folder
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// Train BF16 of each seed once more, from weights perturbed in their last bit: what chaos
    /// alone does
    #[arg(long)]
    pub control: bool,
    /// Take the policy apart instead: what does each class of quantized operands cost, alone and
    /// left out? Two runs for each class and seed
    #[arg(long, value_name = "CLASSES", conflicts_with_all = ["control", "tolerance", "again"])]
    pub ablate: Option<AblateBy>,
    /// Take apart what matches this glob over tensor names only, `*.v_proj.*` for example
    #[arg(long, value_name = "GLOB", requires = "ablate")]
    pub ablate_tensors: Option<String>,
    /// Print report.json (or ablation.json) on standard output
    #[arg(long)]
    pub json: bool,
}

/// Trains pairs of runs in BF16 and in low precision, from the same weights on the same batches,
/// and compares them.
///
/// # Errors
/// One of the runs fails.
pub fn parity(args: ParityArgs, stop: Arc<AtomicBool>) -> Result<ExitStatus, TrainError> {
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
    let report: ParityReport = crate::parity::run(&options, &stop)?;
    if args.json {
        print_json(&report)?;
    }
    Ok(report.exit_status())
}
