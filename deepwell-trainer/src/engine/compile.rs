//! From a graph to an engine.

use std::time::Duration;

use deepwell_ir::{
    Graph, KernelCatalog, Op, PrecisionPolicy, Program, Recompute, SavedActivations, Target,
    ValueId,
};
use deepwell_kernels::Executor;
use deepwell_plan::{
    OptimizerSpec, Parallel, PlanRequest, Planned, autoplan_stages, lower_evaluation,
    precision_fallbacks,
};
use deepwell_probe::Hardware;

use super::gemms::{gemms_of, statistics_of};
use super::products::Products;
use super::routing::load_counters;
use super::steps::Steps;
use super::{Engine, RunCounts};
use crate::device::{Device, OpenDevice};
use crate::peers::Peers;
use crate::{ModelSource, Settings, TrainError};

/// Options of a compilation.
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Precision of each tensor.
    pub policy: PrecisionPolicy,
    /// Whether to continue if the device supports no quantization of the policy.
    pub allow_fallback: bool,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// Memory limit; the default is [`deepwell_plan::memory_limit_bytes`].
    pub memory_limit_bytes: Option<u64>,
    /// Fixes the micro-batch.
    pub micro_batch: Option<usize>,
    /// Fixes the recomputation of the backward pass.
    pub recompute: Option<Recompute>,
    /// Storage of activations between the forward and the backward pass.
    pub saved_activations: SavedActivations,
    /// Device of the engine; for several ranks, of each rank.
    pub device: Device,
    /// Parallelism over ranks, see [`World`](crate::World).
    pub parallel: Parallel,
    /// Layers of each pipeline stage; none balances the stages by FLOPs.
    pub stage_layers: Option<Vec<usize>>,
    /// Timeout for waiting on another rank.
    pub rank_timeout: Duration,
    /// The token that ends a document, for a graph with masked documents
    /// ([`deepwell_ir::mask_documents`]): targets after this token do not count.
    pub document_end: Option<i32>,
}

impl CompileOptions {
    /// Options with the default optimizer, everything else left to the planner.
    pub fn new(policy: PrecisionPolicy, seq: usize, global_batch: usize) -> CompileOptions {
        CompileOptions {
            seq,
            global_batch,
            policy,
            allow_fallback: false,
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: None,
            micro_batch: None,
            recompute: None,
            saved_activations: SavedActivations::Exact,
            device: Device::Cpu,
            parallel: Parallel::default(),
            stage_layers: None,
            rank_timeout: Duration::from_secs(Settings::RANK_TIMEOUT_S),
            document_end: None,
        }
    }
}

/// Plans, lowers and loads a model on a device of this machine. Weights are zero until initialized
/// or loaded.
///
/// # Errors
/// Planning fails, or memory is insufficient.
pub fn compile(
    graph: Graph,
    hardware: Hardware,
    options: &CompileOptions,
) -> Result<Engine, TrainError> {
    let device = options.device.open(&hardware)?;
    compile_on(device, graph, hardware, options)
}

/// [`compile`] on an open device, with any driver.
///
/// # Errors
/// As [`compile`].
pub fn compile_on(
    device: OpenDevice,
    graph: Graph,
    hardware: Hardware,
    options: &CompileOptions,
) -> Result<Engine, TrainError> {
    if !options.parallel.is_single() {
        return Err(TrainError::Setting {
            setting: "ranks",
            expected: "one rank in one engine".to_string(),
            got: options.parallel.to_string(),
            hint: Some("`World::compile` makes an engine for each rank".to_string()),
        });
    }
    let (kernels, target) = (device.catalog.as_ref(), &device.target);
    let planned = planned(&graph, &hardware, options, kernels, target)?;
    let evaluation = lower_evaluation(&graph, &planned.plan, &planned.program, kernels, target)?;
    let peers = Peers::none();
    load(device, Compiled { graph, hardware, planned, evaluation, peers }, options)
}

/// The plan for a model on devices like `target`, with the program of rank 0.
pub(crate) fn planned(
    graph: &Graph,
    hardware: &Hardware,
    options: &CompileOptions,
    kernels: &dyn KernelCatalog,
    target: &Target,
) -> Result<Planned, TrainError> {
    let request = PlanRequest {
        seq: options.seq,
        global_batch: options.global_batch,
        policy: options.policy.clone(),
        optimizer: options.optimizer.clone(),
        memory_limit_bytes: options.memory_limit_bytes,
        micro_batch: options.micro_batch,
        recompute: options.recompute,
        saved_activations: options.saved_activations,
    };
    let split = (options.parallel, options.stage_layers.as_deref());
    let planned = autoplan_stages(graph, hardware, &request, split, kernels, target)?;
    planned.fallbacks(options.allow_fallback)?;
    Ok(planned)
}

/// Programs and data to load on the device of a rank.
pub(crate) struct Compiled {
    pub(crate) graph: Graph,
    pub(crate) hardware: Hardware,
    /// With the program of this rank.
    pub(crate) planned: Planned,
    pub(crate) evaluation: Program,
    pub(crate) peers: Peers,
}

/// Loads programs on an open device.
pub(crate) fn load(
    device: OpenDevice,
    compiled: Compiled,
    options: &CompileOptions,
) -> Result<Engine, TrainError> {
    let OpenDevice { backend, catalog, target } = device;
    let Compiled { graph, hardware, planned, evaluation, peers } = compiled;
    let planned_bytes = planned.arena_bytes();
    let Planned { plan, program, repaired, mut prediction, precision, .. } = planned;
    let target = target.as_rank(program.target.ranks.clone());
    check_document_end(&program, options.document_end)?;
    // A program with other GEMMs in BF16 is loaded into the same arena.
    let arena_bytes = planned_bytes.max(evaluation.arena.bytes);
    prediction.reserve(arena_bytes, &target);
    let mut executor = Executor::with_host(backend, arena_bytes, program.arena.host_bytes)?;
    let gemms = gemms_of(&graph);
    let statistics = statistics_of(&program, &gemms);
    let loads = load_counters(&program);
    let (inputs, mut outputs) = host_copy_bytes(&program);
    if plan.measured().is_some() {
        // Two sums of each of the three GEMMs of a weight, in steps that measure.
        outputs += 3 * gemms.len() * HOST_COPY_ALIGNMENT;
    }
    executor.backend_mut().reserve_host_copies(inputs, outputs)?;
    let per_step = RunCounts::of_step(&program);
    let per_evaluation = RunCounts::of_evaluation(&evaluation);
    let flop_share_planned = share_with_repair(&plan.policy, per_step, repaired.as_ref());
    let products = vec![Products::default(); program.bodies.len()];
    let training = executor.load(program)?;
    let evaluation = executor.load(evaluation)?;
    let mut engine = Engine {
        graph,
        gemms,
        hardware,
        target,
        policy: options.policy.clone(),
        precision_fallbacks: precision_fallbacks(&precision),
        plan,
        prediction,
        device: options.device,
        catalog,
        executor,
        training,
        evaluation,
        peers,
        statistics,
        loads,
        steps: Steps::default(),
        skipped_steps: 0,
        steps_begun: 0,
        rounding_seed: 0,
        document_end: options.document_end,
        per_step,
        per_evaluation,
        counts: RunCounts::default(),
        flop_share_planned,
        is_repaired: false,
        observer: None,
        measuring: None,
        products,
    };
    engine.load_measuring()?;
    Ok(engine)
}

/// Quantized share of the FLOPs of a run that ends with a repair: of the blocks, and of the blocks
/// and the head.
fn share_with_repair(
    policy: &PrecisionPolicy,
    per_step: RunCounts,
    repaired: Option<&Program>,
) -> (f64, f64) {
    let planned = per_step.quantized_flop_share();
    let (Some(repair), Some(repaired)) = (policy.repair(), repaired) else { return planned };
    let at_end = RunCounts::of_step(repaired).quantized_flop_share();
    let end = f64::from(repair.percent) / 100.0;
    let mean = |planned: f64, at_end: f64| (1.0 - end) * planned + end * at_end;
    (mean(planned.0, at_end.0), mean(planned.1, at_end.1))
}

/// Requires a document-end token if and only if the graph masks documents.
fn check_document_end(program: &Program, end: Option<i32>) -> Result<(), TrainError> {
    let has_attention = program.calls.iter().any(|call| matches!(call.op, Op::Attention(_)));
    let is_masked = program.host.documents.is_some();
    if is_masked == end.is_some() || !is_masked && !has_attention {
        return Ok(());
    }
    Err(TrainError::Setting {
        setting: "documents",
        expected: match is_masked {
            true => "the token that ends a document, as the graph tells documents apart",
            false => "a graph that tells documents apart, as there is a token that ends one",
        }
        .to_string(),
        got: end.map_or("none".to_string(), |end| format!("token {end} and another graph")),
        hint: None,
    })
}

/// Alignment of a value that is copied between host and device, in bytes.
const HOST_COPY_ALIGNMENT: usize = 64;

/// Maximum bytes that the host writes before a micro-batch and reads after a body, each value
/// aligned.
fn host_copy_bytes(program: &Program) -> (usize, usize) {
    let host = &program.host;
    let sum = |ids: &mut dyn Iterator<Item = ValueId>| {
        ids.map(|id| program.value(id).range.bytes.next_multiple_of(HOST_COPY_ALIGNMENT)).sum()
    };
    let of_step = [host.loss_scale, host.schedule, host.rounding_key];
    let inputs = [host.tokens, host.targets, host.documents, host.positions];
    let inputs = sum(&mut inputs.into_iter().chain(of_step).flatten());
    let outputs = [host.loss, host.grad_norm, host.counters].into_iter().flatten();
    let loads = load_counters(program);
    let loads = loads.iter().flat_map(|body| body.iter().map(|load| load.id));
    let counters = host.statistics.iter().map(|(_, id)| *id).chain(loads);
    (inputs, sum(&mut outputs.chain(counters)))
}

/// From a model to an engine on a device in one call: probe, capture, plan, compile, initialize.
/// The model is a preset, a `config.json`, a model folder or a `.pt2` archive; weights in folders
/// and archives are loaded, otherwise weights are initialized. The precision is a preset, or
/// [`Settings::AUTO`] to let the device decide.
///
/// ```
/// use deepwell_trainer::{Device, optimize};
///
/// // 2 sequences of 16 tokens a step; `Device::Cuda(0)` is the first GPU.
/// let mut engine = optimize("llama-micro", "auto", 16, 2, Device::Cpu)?;
/// println!("{}", engine.prediction());
/// let tokens: Vec<i32> = (0..33).map(|i| i % 7).collect();
/// let step = engine.step(&tokens[..32], &tokens[1..], 5e-4, 1.0)?;
/// assert!(step.loss.is_finite());
/// # Ok::<(), deepwell_trainer::TrainError>(())
/// ```
///
/// # Errors
/// A step of the above fails.
pub fn optimize(
    model: impl AsRef<std::path::Path>,
    precision: &str,
    seq_len: usize,
    batch_size: usize,
    device: Device,
) -> Result<Engine, TrainError> {
    let mut model = ModelSource::open(&model.as_ref().to_string_lossy())?;
    model.check_trainable(false)?;
    let graph = model.capture(Some(seq_len))?;
    let hardware = deepwell_probe::probe();
    let mut settings = Settings { precision: precision.to_string(), device, ..Settings::default() };
    (settings.seq_len, settings.batch_size) = (seq_len, batch_size);
    let (policy, _) = settings.resolve_policy(&graph, &hardware)?;
    let options = CompileOptions { device, ..CompileOptions::new(policy, seq_len, batch_size) };
    let mut engine = compile(graph, hardware, &options)?;
    engine.initialize(0)?;
    model.load_weights(&mut engine)?;
    Ok(engine)
}
