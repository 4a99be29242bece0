//! Chooses micro-batch size and recomputation: every candidate is lowered and dry-run.

use deepwell_ir::{Binding, Graph, KernelCatalog, Program, Target, differentiate};
use deepwell_probe::Hardware;

use crate::candidates::{Attempt, Best, Candidates, name_of};
use crate::gpu::gpu_of;
use crate::lower::{
    SharedGraph, arena_bytes_with_fallbacks, expand_experts, fallback_plan, mxfp8_plan,
};
use crate::request::base_plan;
use crate::{
    KernelPlan, Parallel, Plan, PlanError, PlanRequest, Planned, balanced_stages, dryrun_stages,
    format_bytes, linear_flops, lower, lower_fallback, memory_limit_bytes,
};

impl Planned {
    /// Returns the same plan with the programs of another rank, lowered anew if the rank's class
    /// ([`Parallel::class`]) differs.
    ///
    /// # Errors
    /// As [`lower`].
    pub fn of_rank(
        &self,
        rank: usize,
        graph: &Graph,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<Planned, PlanError> {
        let parallel = self.plan.parallel;
        let ranks = parallel.ranks(rank);
        if parallel.class(rank) == parallel.class(self.program.rank as usize) {
            let of_rank = |program: &Program| program.for_rank(ranks.clone());
            let program = of_rank(&self.program);
            let [fallback, in_mxfp8, repaired] =
                [&self.fallback, &self.in_mxfp8, &self.repaired].map(|it| it.as_ref().map(of_rank));
            return Ok(Planned { program, fallback, in_mxfp8, repaired, ..self.clone() });
        }
        let target = target.clone().as_rank(ranks);
        let program = lower(graph, &self.plan, catalog, &target)?;
        let fallback = lower_fallback(graph, &self.plan, &program, catalog, &target)?;
        let repaired = self.plan.repaired();
        let lower = |plan: Plan| lower(graph, &plan, catalog, &target);
        let repaired = repaired.map(lower).transpose()?;
        let measured = self.plan.measured().map(lower).transpose()?;
        let measuring_bytes = measuring_bytes(&program, measured.as_ref());
        let in_mxfp8 = mxfp8_plan(&self.plan, &program).map(lower).transpose()?;
        Ok(Planned { program, fallback, in_mxfp8, repaired, measuring_bytes, ..self.clone() })
    }
}

/// Further bytes in the arena of the steps that measure GEMMs.
fn measuring_bytes(program: &Program, measured: Option<&Program>) -> usize {
    measured.map_or(0, |measured| measured.arena.bytes.saturating_sub(program.arena.bytes))
}

/// Plans for the device of `target`. See [`autoplan_ranks`].
///
/// # Errors
/// As [`autoplan_ranks`].
pub fn autoplan(
    graph: &Graph,
    hardware: &Hardware,
    request: &PlanRequest,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Planned, PlanError> {
    autoplan_ranks(graph, hardware, request, Parallel::default(), catalog, target)
}

/// Plans for ranks that each have a device like `target`; the program is for rank 0. Pipeline
/// stages are balanced by FLOPs. See [`autoplan_stages`].
///
/// # Errors
/// As [`autoplan_stages`].
pub fn autoplan_ranks(
    graph: &Graph,
    hardware: &Hardware,
    request: &PlanRequest,
    parallel: Parallel,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Planned, PlanError> {
    autoplan_stages(graph, hardware, request, (parallel, None), catalog, target)
}

/// [`autoplan_ranks`] with the number of layers of each pipeline stage, if given.
///
/// Recomputation only adds work, and smaller micro-batches only read weights more often. So
/// candidates are tried in order of predicted time: least recomputation first, then largest
/// micro-batch first. The first candidate that fits into memory is taken, or a larger micro-batch
/// that fits with one stream, if it takes less time. In a pipeline, smaller micro-batches reduce
/// the bubble, so the fastest of all fitting candidates is taken. If only recomputation of whole
/// layers fits, as few layers as possible are recomputed.
///
/// # Errors
/// An invalid request, a GPU missing in `hardware`, a model without kernels on `target`, or no
/// fitting candidate.
pub fn autoplan_stages(
    graph: &Graph,
    hardware: &Hardware,
    request: &PlanRequest,
    (parallel, layers): (Parallel, Option<&[usize]>),
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Planned, PlanError> {
    for (what, size) in [("sequence length", request.seq), ("batch size", request.global_batch)] {
        if size == 0 {
            let expected = "at least 1".to_string();
            return Err(PlanError::Request { what, expected, got: "0".to_string() });
        }
    }
    check_gpu(hardware, target)?;
    let rows = parallel.rows_of_rank(request.global_batch)?;
    parallel.check()?;
    let micro_batches = micro_batch_candidates(request, rows)?;
    let target = &target.clone().as_rank(parallel.ranks(0));
    let limit_bytes = request
        .memory_limit_bytes
        .unwrap_or_else(|| memory_limit_bytes(hardware, target, parallel.world_size()));
    let stages = stages_of(graph, request, parallel, layers)?;
    let base = Plan { parallel, stages, ..base_plan(graph, request, target) };
    let attempt = |candidate: Plan| {
        let attempted = attempt(graph, candidate, hardware, catalog, target, limit_bytes);
        // A graph that cannot be trained has an error of its own, whatever the plan.
        attempted.map_err(|error| trainable(graph, request).err().unwrap_or(error))
    };
    let candidates = Candidates { base: &base, rows, micro_batches, attempt: &attempt };
    let mut best = Best::default();
    match request.recompute {
        Some(rule) => {
            candidates.try_rule(rule, &mut best)?;
        }
        None => candidates.least_recompute(graph.layer_count(), &mut best)?,
    }
    let Best { planned, rejected } = best;
    let Some(mut best) = planned else {
        return Err(PlanError::NothingFits { limit_bytes, rejected });
    };
    best.plan.precision = best.program.precision.clone();
    best.plan.kernels = kernels_of(&best.program);
    best.plan.tuned = catalog.tables(target);
    best.rejected = rejected;
    Ok(best)
}

/// Whether the graph of the whole model can be trained.
fn trainable(graph: &Graph, request: &PlanRequest) -> Result<(), PlanError> {
    differentiate(&expand_experts(graph, &request.policy)?)?;
    Ok(())
}

/// Lowers a candidate and predicts it.
fn attempt(
    graph: &Graph,
    candidate: Plan,
    hardware: &Hardware,
    catalog: &dyn KernelCatalog,
    target: &Target,
    limit_bytes: u64,
) -> Result<Attempt, PlanError> {
    let parallel = candidate.parallel;
    let too_large = |needed: String| {
        let (name, limit) = (name_of(&candidate), format_bytes(limit_bytes));
        Ok(Attempt::TooLarge(format!("{name}: needs {needed}, {limit} may be used")))
    };
    let shared = SharedGraph::of(graph, &candidate, catalog, target)?;
    let mut programs = match lower_stages(&shared, parallel, catalog, target, limit_bytes)? {
        Stages::Within(programs) => programs,
        Stages::Beyond(peak_bytes) => {
            return too_large(format!("{} or more", format_bytes(peak_bytes)));
        }
    };
    let mut prediction = dryrun_stages(&programs, parallel, hardware);
    let in_precision = |other: Option<Plan>| -> Result<Vec<Program>, PlanError> {
        let Some(other) = other else { return Ok(Vec::new()) };
        let base = shared.differentiated();
        let shared = SharedGraph::in_precision(&base, graph, &other, catalog, target)?;
        let of_stage = |program: &Program| shared.lower_stage(catalog, &program.target);
        programs.iter().map(of_stage).collect()
    };
    let fallbacks = in_precision(fallback_plan(&candidate, &programs[0]))?;
    let in_mxfp8 = in_precision(mxfp8_plan(&candidate, &programs[0]))?;
    let repaired = in_precision(candidate.repaired())?;
    let measured = in_precision(candidate.measured())?;
    let moves = candidate.moves_gemms();
    for (index, program) in programs.iter().enumerate() {
        let others = [&fallbacks, &in_mxfp8].into_iter().filter_map(|it| it.get(index));
        let others = others.filter(|_| moves);
        let others: Vec<&Program> = others.collect();
        let bytes = |program| arena_bytes_with_fallbacks(program, &others);
        let of_repair = repaired.get(index).map_or(0, bytes);
        let further = measuring_bytes(program, measured.get(index));
        prediction.reserve(bytes(program).max(of_repair) + further, &program.target);
    }
    let peak_bytes = prediction.peak_bytes();
    if peak_bytes > limit_bytes {
        return too_large(format_bytes(peak_bytes));
    }
    let in_bf16 = match fallbacks.as_slice() {
        [] => None,
        fallbacks => Some(dryrun_stages(fallbacks, parallel, hardware)),
    };
    prediction.expected_speedup_over_bf16 =
        in_bf16.as_ref().map(|in_bf16| in_bf16.time_s / prediction.time_s);
    let linear_flops = programs.iter().map(linear_flops).sum();
    let precision = programs.iter().flat_map(|it| it.precision.clone()).collect();
    Ok(Attempt::Fits(Box::new(Planned {
        plan: candidate,
        measuring_bytes: measuring_bytes(&programs[0], measured.first()),
        program: programs.swap_remove(0),
        fallback: fallbacks.into_iter().next().filter(|_| moves),
        in_mxfp8: in_mxfp8.into_iter().next().filter(|_| moves),
        repaired: repaired.into_iter().next(),
        prediction,
        linear_flops,
        precision,
        in_bf16,
        rejected: Vec::new(),
    })))
}

/// Layers of each pipeline stage, as requested or balanced; empty for one stage.
fn stages_of(
    graph: &Graph,
    request: &PlanRequest,
    parallel: Parallel,
    layers: Option<&[usize]>,
) -> Result<Vec<usize>, PlanError> {
    let stages = parallel.stages();
    match layers {
        None if stages == 1 => Ok(Vec::new()),
        None => balanced_stages(graph, stages, &Binding { batch: 1, seq: request.seq }),
        Some(layers) => {
            let (count, sum) = (graph.layer_count(), layers.iter().sum::<usize>());
            if layers.len() == stages && sum == count && !layers.contains(&0) {
                return Ok(if stages == 1 { Vec::new() } else { layers.to_vec() });
            }
            Err(PlanError::Request {
                what: "layers of the pipeline's stages",
                expected: format!("{stages} numbers of at least 1, {count} together"),
                got: format!("{layers:?}"),
            })
        }
    }
}

/// Programs of a pipeline's stages.
enum Stages {
    Within(Vec<Program>),
    /// Peak bytes of the first stage found above the limit.
    Beyond(u64),
}

/// Lowers the program of the first rank of each pipeline stage. Stops at the first stage above
/// `limit_bytes`: a search tries many plans, and the first stage holds the most micro-batches.
fn lower_stages(
    shared: &SharedGraph<'_>,
    parallel: Parallel,
    catalog: &dyn KernelCatalog,
    target: &Target,
    limit_bytes: u64,
) -> Result<Stages, PlanError> {
    let ranks = parallel.world_size() / parallel.pipeline;
    let mut programs = Vec::with_capacity(parallel.pipeline);
    for stage in 0..parallel.pipeline {
        let target = target.clone().as_rank(parallel.ranks(stage * ranks));
        let program = shared.lower_stage(catalog, &target)?;
        let peak_bytes = (program.device_bytes() + program.fixed_overhead_bytes) as u64;
        if parallel.pipeline > 1 && peak_bytes > limit_bytes {
            return Ok(Stages::Beyond(peak_bytes));
        }
        programs.push(program);
    }
    Ok(Stages::Within(programs))
}

/// Micro-batch sizes for a rank with `rows` sequences per step.
fn micro_batch_candidates(request: &PlanRequest, rows: usize) -> Result<Vec<usize>, PlanError> {
    let of_rank = match rows == request.global_batch {
        true => String::new(),
        false => " that each rank has".to_string(),
    };
    match request.micro_batch {
        Some(size) if rows.is_multiple_of(size) => Ok(vec![size]),
        Some(size) => Err(PlanError::Request {
            what: "micro-batch",
            expected: format!("a divisor of the batch of {rows}{of_rank}"),
            got: size.to_string(),
        }),
        None if request.optimizer.in_backward => Ok(vec![rows]),
        None => Ok((1..=rows).rev().filter(|size| rows.is_multiple_of(*size)).collect()),
    }
}

fn check_gpu(hardware: &Hardware, target: &Target) -> Result<(), PlanError> {
    let Some(index) = target.gpu.filter(|_| gpu_of(hardware, target).is_none()) else {
        return Ok(());
    };
    let there: Vec<String> =
        hardware.gpus.iter().enumerate().map(|(at, gpu)| format!("{at} ({})", gpu.name)).collect();
    let expected = match there.as_slice() {
        [] => "no GPU, as the machine has none".to_string(),
        there => format!("one of {}", there.join(", ")),
    };
    Err(PlanError::Request { what: "GPU", expected, got: index.to_string() })
}

fn kernels_of(program: &Program) -> Vec<KernelPlan> {
    let mut kernels: Vec<KernelPlan> = Vec::new();
    for (call, runs) in program.calls_with_runs() {
        let op = call.op.name();
        match kernels.iter_mut().find(|k| k.op == op && k.kernel == call.choice.kernel) {
            Some(known) => known.calls += runs,
            None => kernels.push(KernelPlan {
                op: op.to_string(),
                kernel: call.choice.kernel.clone(),
                tile: call.choice.tile,
                calls: runs,
            }),
        }
    }
    kernels
}
