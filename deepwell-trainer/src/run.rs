//! One training run from settings to summary: data, model, compile, fit.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytemuck::cast_slice;
use deepwell_ir::{Ranks, TensorPrecision};
use deepwell_plan::{PrecisionFallback, format_bytes};
use serde::{Deserialize, Serialize};

use crate::atomic_write::write_atomically;
use crate::checkpoint;
use crate::data::{DataOptions, Dataset, DatasetSummary, TokenCache};
use crate::export::{self, ModelFiles, TokensOf};
use crate::fingerprint::{Fingerprint, HashedWeights, Sources, WeightsHash};
use crate::fit::{Batches, Fit};
use crate::formats::quantized_formats;
use crate::memory_sampler::{self, MemorySampler};
use crate::profile::RankProfiles;
use crate::run_folder::{Opened, RunFolder, Start};
use crate::run_report::{self, RankCoordinates, rank_map};
use crate::settings_unused::{self, RunFacts};
use crate::trainer::{FitReport, Progress};
use crate::world::Member;
use crate::{
    AutoPrecision, CompileOptions, Engine, GemmCounts, ModelSource, Settings, TrainError, World,
    open_tokenizer,
};

mod prepare;

use self::prepare::Prepared;

/// Contents of `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The settings.
    pub settings: Settings,
    /// Result of the training.
    pub fit: FitReport,
    /// Origin of the initial weights.
    #[serde(default)]
    pub weights: String,
    /// Training data.
    #[serde(default)]
    pub data: DataFacts,
    /// Trained values.
    pub params: u64,
    /// Tokens per step.
    pub tokens_per_step: u64,
    /// `cpu`, or the GPU.
    pub device: String,
    /// Number of ranks; values of a single rank are those of rank 0.
    #[serde(default = "one_rank")]
    pub ranks: usize,
    /// Each rank's share of the plan, for several ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rank_map: Vec<RankCoordinates>,
    /// Predicted peak memory, the sum over ranks that share it.
    pub peak_bytes_predicted: u64,
    /// Highest anonymous resident memory, or GPU memory as counted by the driver, less its value
    /// before compilation.
    pub peak_bytes_measured: Option<u64>,
    /// Host memory for checkpoint copies of the ranks in this process, pinned for GPUs; 0 if
    /// checkpoints are written without a copy.
    #[serde(default)]
    pub pinned_bytes_predicted: u64,
    /// Arena size and its lower bound.
    pub arena_bytes: [u64; 2],
    /// Predicted bytes by kind at the peak.
    pub bytes_at_peak: BTreeMap<String, u64>,
    /// FLOPs of a step.
    pub flops_per_step: u64,
    /// Least predicted time of a step.
    pub predicted_step_s: f64,
    /// Predicted speedup over BF16.
    pub expected_speedup_over_bf16: Option<f64>,
    /// Quantized share of the FLOPs of the blocks' linear layers, over all steps of the run.
    #[serde(alias = "mxfp8_flop_share")]
    pub quantized_flop_share: f64,
    /// Quantized share over all steps if the output head counts as a linear layer.
    #[serde(alias = "mxfp8_flop_share_with_head")]
    pub quantized_flop_share_with_head: f64,
    /// The planned share of the blocks, without any fallback.
    #[serde(default, alias = "mxfp8_flop_share_planned")]
    pub quantized_flop_share_planned: f64,
    /// Quantized GEMMs that ran, including those before a resumption and in evaluations.
    #[serde(alias = "mxfp8_gemms_run")]
    pub quantized_gemms_run: GemmCounts,
    /// Bytes of quantized operands read by these GEMMs.
    pub quantized_bytes: GemmCounts,
    /// Format of each tensor, with the reason.
    pub precision: Vec<TensorPrecision>,
    /// The choice of `--precision auto` for each linear layer; none without a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_precision: Option<AutoPrecision>,
    /// Parts of the requested precision that the device does not support, by reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub precision_fallbacks: Vec<PrecisionFallback>,
    /// Wall time of this process's part of the run.
    pub wall_s: f64,
}

/// Data of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFacts {
    /// The inputs.
    pub source: String,
    /// The tokenizer.
    pub tokenizer: String,
    /// Every token is below this.
    pub vocab_size: u64,
    /// Tokens of the training part.
    pub tokens_train: u64,
    /// Tokens of the held-out part.
    pub tokens_heldout: u64,
    /// All skipped files, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped_files: BTreeMap<String, Vec<String>>,
}

impl DataFacts {
    fn of(data: &DatasetSummary) -> DataFacts {
        let DatasetSummary { vocab_size, tokens_train, tokens_heldout, .. } = *data;
        let source = data.source.clone();
        let tokenizer = data.tokenizer.clone();
        let skipped_files = data.skipped_files.clone();
        DataFacts { source, tokenizer, vocab_size, tokens_train, tokens_heldout, skipped_files }
    }
}

/// Opens the data of a run.
///
/// # Errors
/// The data cannot be used.
pub fn open_data(settings: &Settings, progress: &mut dyn Progress) -> Result<Dataset, TrainError> {
    let options = DataOptions {
        inputs: settings.data.clone(),
        heldout_inputs: settings.eval_data.clone(),
        text_field: settings.text_field.clone(),
        tokenizer: open_tokenizer(settings.tokenizer.as_deref())?,
        cache_dir: settings.cache_dir.clone(),
        heldout_tokens_min: {
            let largest = settings.eval_tokens.max(settings.interim_eval_tokens());
            largest + largest / 2
        },
        ..DataOptions::default()
    };
    let mut told = false;
    let dataset = Dataset::prepare(&options, &mut |_| {
        if !std::mem::replace(&mut told, true) {
            progress.note("reading the data");
        }
    })?;
    Ok(dataset)
}

/// Options of a run that are not settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Treatment of an output folder with results.
    pub start: Start,
    /// Whether to profile an additional step after the last one.
    pub profile: bool,
    /// Whether this process may exit, with the error on standard error, if one rank fails and
    /// another is stuck: ranks that are threads cannot be stopped from outside.
    pub ends_stuck_process: bool,
}

/// Executes a training run. Writes metrics, events, checkpoints and `summary.json` to the output
/// folder.
///
/// # Errors
/// The run fails.
pub fn run(
    settings: &Settings,
    options: RunOptions,
    stop: Arc<AtomicBool>,
    progress: &mut dyn Progress,
) -> Result<RunSummary, TrainError> {
    run_as(None, settings, options, stop, progress)
}

/// [`run`] as one rank of several processes, if `member` is given: only rank 0 writes, and creates
/// the files that other ranks read later.
///
/// # Errors
/// The run fails, here or on another rank.
pub fn run_as(
    member: Option<&Arc<Member>>,
    settings: &Settings,
    options: RunOptions,
    stop: Arc<AtomicBool>,
    progress: &mut dyn Progress,
) -> Result<RunSummary, TrainError> {
    let goes_on = matches!(options.start, Start::Resume | Start::ResumeChanged);
    let has_other_ranks = goes_on && settings.plan.is_none() && !settings.degrees_fit_ranks();
    match has_other_ranks {
        true => settings.check_values()?,
        false => settings.check()?,
    }
    let is_first = member.is_none_or(|member| member.is_first());
    let started = Instant::now();
    // An existing folder is claimed before any long work; a new folder is created only once
    // settings and data are known to be valid.
    let (out, start) = (settings.out.clone(), options.start);
    let claim = || RunFolder::claim(&out, start);
    let claimed = if is_first && out.exists() { Some(claim()?) } else { None };
    let hardware = deepwell_probe::probe();
    let given = settings;
    let mut settings = settings.clone();
    if let Some(member) = member {
        member.take_device(&mut settings, &hardware);
        member.wait_for_first()?;
    }
    let mut model = settings.model_source()?;
    model.check_trainable(settings.train_frozen)?;
    for remark in &model.notes().remarks {
        progress.note(&format!("note: {remark}"));
    }
    if let Some(note) = settings.resolve_tokenizer(&model)? {
        progress.note(&format!("note: {note}"));
    }
    // Report errors of the model, its ranks, the batch or memory before reading data.
    let held_before = memory_sampler::held_bytes(settings.device);
    let Prepared { settings, graph, compile_options, auto_precision, rows } =
        Prepared::of(settings, &model, &hardware, claimed.as_ref(), goes_on, progress)?;
    let held_after = memory_sampler::held_bytes(settings.device);
    let planning_bytes = held_after.unwrap_or(0).saturating_sub(held_before.unwrap_or(0));
    let settings = &settings;
    let weights_origin = model.weights_origin(settings.seed);
    progress.note(&format!("weights  {weights_origin}"));
    let dataset = open_data(settings, progress)?;
    dataset.tokens().check_vocab(model.vocab_size() as u64)?;
    if let Some(note) = model.note_on_vocabulary(dataset.vocab_size()) {
        progress.note(&format!("note: {note}"));
    }
    let summary = dataset.summary();
    let tokens_per_step = (settings.batch_size * settings.seq_len) as u64;
    let epochs = summary.epochs(settings.steps, tokens_per_step);
    progress.note(&format!("{summary}  {:<10}{epochs}", "run"));
    let document_end = settings.documents.end(settings, &dataset)?;
    let compile_options = CompileOptions { document_end, ..compile_options };
    // Ranks of several processes may yet have less memory, and smaller micro-batches.
    let rows = if member.is_some() { 1 } else { rows };
    Batches::new(settings, dataset.tokens(), rows, document_end)?;
    let folder = if is_first { Some(claimed.map_or_else(claim, Ok)?) } else { None };
    // Start the pool's threads before taking the baseline.
    rayon::broadcast(|_| ());
    // Memory left over from planning counts as memory of compilation.
    let sampler = MemorySampler::start(settings.device).map(|it| it.with_bytes(planning_bytes));
    if member.is_some_and(|member| member.world_size() > 1)
        && matches!(settings.device, crate::Device::Cuda(_))
        && std::env::var_os("NCCL_ALGO").is_none()
    {
        progress.note(
            "note: switches of NVLink add in any order; `NCCL_ALGO=^NVLS` on all ranks gives two \
             runs the same bits",
        );
    }
    let mut world = match member {
        None => World::compile(graph, hardware, &compile_options)?,
        Some(member) => World::join(member, graph, hardware, &compile_options)?,
    };
    if options.ends_stuck_process {
        world.end_process_when_stuck();
    }
    let weights = write_masters(&mut world, &mut model, settings)?;
    let sources = Sources { tokenizer: Some(dataset.tokenizer_hash()), weights };
    let copies = checkpoint_bytes(&mut world, settings)?;
    progress.note(&memory_table(&world, &copies));
    for fallback in world.first().precision_fallbacks() {
        progress.note(&format!("warning: {fallback}"));
    }
    let tensors = &world.first().program().precision;
    let facts = RunFacts {
        quantizes: tensors.iter().any(|tensor| tensor.format.is_quantized()),
        has_frozen: model.has_frozen(),
        has_records: dataset.has_records(),
    };
    for unused in settings_unused::without_effect(given, facts) {
        progress.note(&format!("warning: {unused}"));
    }
    let fingerprint = Fingerprint::of(world.first(), settings, dataset.tokens(), &sources);
    let opened = match &folder {
        Some(folder) => {
            let tokens = TokensOf::run(settings.tokenizer.as_deref(), dataset.has_token_files());
            let kept = settings.out.join(export::KEPT);
            // A resumed run has these files; nothing is changed before the folder is known to hold
            // this run.
            if !goes_on || !kept.exists() {
                folder.puts(&kept);
                ModelFiles::of(&model, tokens)?.keep(&kept)?;
            }
            Some(folder.begin(&fingerprint, progress)?)
        }
        None => None,
    };
    let opened = agree(&mut world, opened, &fingerprint, settings)?;
    let tokens = dataset.tokens();
    let fit = match &folder {
        None => fit(&mut world, settings, tokens, &opened, &stop, progress)?,
        Some(folder) => {
            let progress = &mut folder.watching(progress);
            let fit = fit(&mut world, settings, tokens, &opened, &stop, progress)?;
            folder.has_trained();
            fit
        }
    };
    if options.profile && !fit.interrupted {
        let profiles = world.on_all(RankProfiles::of)?;
        if let Some(profile) = profiles.first().filter(|_| is_first) {
            profile.write(&settings.out)?;
            let out = settings.out.display();
            progress.note(&format!("profile, also in {out}\n{profile}"));
        }
    }
    let measured = sampler.as_ref().map(MemorySampler::peak_over_baseline_bytes);
    let path = settings.out.join("summary.json");
    if fit.resumed_after == Some(settings.steps)
        && let Some(summary) = summary_of_ended(&path, settings.steps)
    {
        progress.note("the run has ended already; its summary stays");
        return Ok(summary);
    }
    let summary = RunSummary {
        weights: weights_origin,
        data: DataFacts::of(dataset.summary()),
        auto_precision,
        ..summarize(&world, settings, fit, &copies, measured, started)
    };
    if is_first {
        let text = serde_json::to_string_pretty(&summary).expect("a summary is plain data");
        write_atomically(&path, &text)?;
        run_report::write(&summary)?;
    }
    Ok(summary)
}

/// Writes the initial weights of every rank, without their copies. Returns the hash of loaded
/// weights.
fn write_masters(
    world: &mut World,
    model: &mut ModelSource,
    settings: &Settings,
) -> Result<Option<String>, TrainError> {
    let (mut hash, mut any_loaded) = (WeightsHash::default(), false);
    for engine in world.engines_mut() {
        engine.initialize_masters(settings.seed)?;
        let mut hashed = HashedWeights::new(engine).without_copies().behind(hash);
        any_loaded |= model.load_weights(&mut hashed)?;
        hash = hashed.into_hash();
        if let Some(seed) = settings.perturb_weights_seed {
            engine.perturb_masters(seed)?;
        }
    }
    if any_loaded && world.local_size() < world.size() {
        let parameters = world.first().graph().parameters();
        let names: Vec<String> = parameters.map(|(_, tensor)| tensor.name.clone()).collect();
        let rank_hash = hash.words(&names);
        let of_ranks = world.on_all(|engine| engine.peers.gather(&rank_hash))?;
        of_ranks.iter().flatten().for_each(|words| hash.add_words(&names, words));
    }
    Ok(any_loaded.then(|| hash.hash()))
}

/// Returns the start of the run on every rank, as opened by rank 0. Ranks in separate processes
/// have computed their fingerprints separately; the fingerprints must be equal.
fn agree(
    world: &mut World,
    opened: Option<Opened>,
    fingerprint: &Fingerprint,
    settings: &Settings,
) -> Result<Opened, TrainError> {
    if world.local_size() == world.size()
        && let Some(opened) = opened
    {
        return Ok(opened);
    }
    let from = opened.as_ref().and_then(|opened| opened.from.as_ref()).map(|entry| entry.step);
    let value = fingerprint.to_value();
    let hash = blake3::hash(value.to_string().as_bytes());
    let agreed = world.on_all(|engine| {
        engine.peers.expect_equal("run", cast_slice(hash.as_bytes()), |_| ())?;
        let all = engine.peers.gather(&[from.map_or(0, |step| step + 1)])?;
        Ok(all[0][0].checked_sub(1))
    })?;
    match opened {
        Some(opened) => Ok(opened),
        None => Opened::following(&settings.out, agreed.into_iter().flatten().next(), value),
    }
}

/// Trains on all ranks; rank 0 writes files and reports progress.
fn fit(
    world: &mut World,
    settings: &Settings,
    tokens: &Arc<TokenCache>,
    opened: &Opened,
    stop: &AtomicBool,
    progress: &mut dyn Progress,
) -> Result<FitReport, TrainError> {
    let train = |engine: &mut Engine, progress: &mut dyn Progress| {
        // Within a class, only the rank and its GPU may differ.
        let mut program = engine.program().for_rank(Ranks::default());
        program.target.gpu = None;
        let program = blake3::hash(program.to_json().as_bytes());
        let parallel = engine.plan().parallel;
        let words = cast_slice(program.as_bytes());
        engine.peers.expect_equal("program", words, |rank| parallel.class(rank))?;
        engine.refresh_weight_copies()?;
        Fit::begin(engine, settings, tokens, opened.clone(), progress)?.run_to_end(stop)
    };
    let reports =
        world.with_first(|engine| train(engine, progress), |engine| train(engine, &mut ()))?;
    Ok(reports.into_iter().next().expect("a world has a rank 0"))
}

/// Returns the summary of a run that has completed all steps: its speed and memory were measured by
/// the process that ran the steps, not by one that found nothing to do.
fn summary_of_ended(path: &Path, steps: u64) -> Option<RunSummary> {
    let text = std::fs::read_to_string(path).ok()?;
    let summary: RunSummary = serde_json::from_str(&text).ok()?;
    (summary.fit.step == steps).then_some(summary)
}

fn summarize(
    world: &World,
    settings: &Settings,
    fit: FitReport,
    copies: &[u64],
    peak_bytes_measured: Option<u64>,
    started: Instant,
) -> RunSummary {
    let engine = world.first();
    let program = engine.program();
    let rank = &engine.prediction().ranks[0];
    let counts = engine.counts();
    let (share, share_with_head) = counts.quantized_flop_share();
    RunSummary {
        settings: settings.clone(),
        fit,
        weights: String::new(),
        data: DataFacts::default(),
        params: engine.graph().parameter_count(),
        tokens_per_step: engine.tokens_per_step() as u64,
        ranks: world.size(),
        rank_map: match world.size() {
            1 => Vec::new(),
            _ => rank_map(engine.plan(), engine.prediction(), engine.graph().layer_count()),
        },
        device: settings.device.to_string(),
        peak_bytes_predicted: predicted_peak_bytes(world),
        peak_bytes_measured,
        pinned_bytes_predicted: copies.iter().sum(),
        arena_bytes: [rank.arena_bytes, rank.arena_lower_bound_bytes],
        bytes_at_peak: rank.bytes_at_peak.clone(),
        flops_per_step: program.flops(),
        predicted_step_s: engine.prediction().time_s,
        expected_speedup_over_bf16: engine.prediction().expected_speedup_over_bf16,
        quantized_flop_share: share,
        quantized_flop_share_with_head: share_with_head,
        quantized_flop_share_planned: engine.quantized_flop_share_planned().0,
        quantized_gemms_run: counts.quantized_gemms,
        quantized_bytes: counts.quantized_bytes,
        precision: program.precision.clone(),
        auto_precision: None,
        precision_fallbacks: engine.precision_fallbacks().to_vec(),
        wall_s: started.elapsed().as_secs_f64(),
    }
}

fn one_rank() -> usize {
    1
}

/// Ranks on a CPU or on emulated GPUs share its memory and threads.
fn predicted_peak_bytes(world: &World) -> u64 {
    let of_rank = |engine: &Engine| {
        engine.predicted_peak_bytes() - engine.program().fixed_overhead_bytes as u64
    };
    let all: u64 = world.engines().iter().map(of_rank).sum();
    all + world.first().program().fixed_overhead_bytes as u64
}

/// Host bytes of each rank in this process for its copy of a checkpoint share.
fn checkpoint_bytes(world: &mut World, settings: &Settings) -> Result<Vec<u64>, TrainError> {
    world.on_all(|engine| {
        let bytes = checkpoint::host_bytes(engine)? as u64;
        let is_copied = engine.is_asynchronous() || settings.async_checkpoints;
        let is_copied = is_copied && !settings.no_checkpoints;
        Ok(if is_copied { bytes } else { 0 })
    })
}

/// Layers of the stages of a pipeline.
fn stages(engine: &Engine) -> String {
    let layers: Vec<String> = engine.plan().stages.iter().map(usize::to_string).collect();
    if layers.is_empty() { String::new() } else { format!(" of {} layers", layers.join(", ")) }
}

fn memory_table(world: &World, copies: &[u64]) -> String {
    let engine = world.first();
    let program = engine.program();
    let rank = &engine.prediction().ranks[0];
    let quantized = program.precision.iter().filter(|t| t.format.is_quantized()).count();
    let formats = quantized_formats(&program.precision).map_or_else(
        || "quantized".to_string(),
        |formats| format!("in {}", formats.to_uppercase()),
    );
    let mut text = format!(
        "model {}: {} parameters, {} of {} tensors {formats}\n\
         plan: {}{} micro-batches of {} x {} tokens, recompute {}\nmemory\n",
        program.name,
        engine.graph().parameter_count(),
        quantized,
        program.precision.len(),
        match world.size() {
            1 => String::new(),
            ranks => format!("{ranks} ranks ({}{}), each ", engine.plan().parallel, stages(engine)),
        },
        program.micro_batches,
        program.batch,
        program.seq,
        engine.plan().recompute
    );
    for (kind, bytes) in &rank.bytes_at_peak {
        text.push_str(&format!("  {kind:<12} {:>12}\n", format_bytes(*bytes)));
    }
    text.push_str(&format!(
        "  {:<12} {:>12} (arena {}, lower bound {})",
        "peak",
        format_bytes(engine.predicted_peak_bytes()),
        format_bytes(rank.arena_bytes),
        format_bytes(rank.arena_lower_bound_bytes)
    ));
    if world.local_size() > 1 {
        text.push_str(&format!(
            "\n  {:<12} {:>12} of {} ranks, which exchange {} a step",
            "together",
            format_bytes(predicted_peak_bytes(world)),
            world.local_size(),
            format_bytes(rank.bytes_on_link)
        ));
    }
    if copies.iter().any(|&bytes| bytes > 0) {
        let bytes = format_bytes(copies.iter().sum());
        text.push_str(&format!("\n  pinned       {bytes:>12} of host memory, for checkpoints"));
    }
    text
}

/// Sets `stop` when standard input ends, so that a run stops with its parent process.
pub fn stop_with_parent(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let mut byte = [0u8; 1];
        // The parent sends no data; a read error counts as the end.
        while matches!(std::io::stdin().read(&mut byte), Ok(count) if count > 0) {}
        stop.store(true, Ordering::Relaxed);
    });
}
