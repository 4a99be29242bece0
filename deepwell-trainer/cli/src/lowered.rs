//! The best plan of a search, lowered to the programs of its ranks and simulated.

use std::fmt::Write;

use anyhow::{Context, Result};
use deepwell_ir::{Graph, PrecisionPolicy, Target};
use deepwell_plan::search::{
    ByTrainer, ClusterPlan, Found, PROGRAMS_TOO_LARGE, Programs, SearchAids, SearchRequest,
    search_with,
};
use deepwell_plan::{
    DryRun, KnownKernels, OptimizerSpec, PlanError, PlanRequest, Planned, ProgramBytes,
    ProgramMemory, Strategy, autoplan_stages,
};
use deepwell_probe::Hardware;
use deepwell_trainer::{Device, ModelSource, Settings};

use crate::planning::PlanningArgs;

/// Largest number of plans lowered as whole programs. Programs of few layers predict the fit, so
/// the first plan nearly always lowers.
const LOWERED_MAX: usize = 8;

/// Result of lowering the best plan.
#[derive(Debug, Default)]
pub(crate) struct Lowered {
    /// Programs with prediction; `None` for a plan unsupported by the trainer.
    pub(crate) planned: Option<Planned>,
    /// Why a plan within the trainer's rules was not lowered.
    pub(crate) not_run_yet: Option<String>,
    /// Number of faster plans that failed to lower, with the reason of the first.
    pub(crate) refused: Option<String>,
}

/// Inputs for lowering the programs of a search.
pub(crate) struct Source<'a> {
    graph: Graph,
    asked: PlanRequest,
    catalog: KnownKernels,
    /// The device of a single rank, and of a rank in a group.
    targets: [Target; 2],
    node: &'a Hardware,
    allow_fallback: bool,
}

impl<'a> Source<'a> {
    /// Captures the model for GPUs of `node`.
    ///
    /// # Errors
    /// A model that cannot be captured, or a policy that cannot be read.
    pub(crate) fn new(
        planning: &PlanningArgs,
        request: &SearchRequest,
        node: &'a Hardware,
    ) -> Result<Source<'a>> {
        let model = ModelSource::open(&planning.model).with_context(|| {
            format!(
                "only the sizes of `{}` are known: the `config.json` of the model in its place \
                 has programs",
                planning.model
            )
        })?;
        let graph = planning.graph(&model, request.seq)?;
        let device = Device::Cuda(0);
        let alone = device.target(node)?;
        let in_bf16 = planning.is_auto() && !request.fp8;
        let presets = Settings::auto_presets(&alone.arch);
        let presets = if request.nvfp4 { presets } else { &presets[..1] };
        // For micro-batches of one sequence: the faster precision of a layer depends little on
        // their size.
        let policy = match in_bf16 {
            true => PrecisionPolicy::bf16(),
            false => planning.policy(&graph, (device, &alone), (1, request.seq), presets)?.0,
        };
        let asked = PlanRequest {
            seq: request.seq,
            global_batch: request.global_batch,
            policy,
            optimizer: planning.optimizer.spec(),
            memory_limit_bytes: Some(request.memory_limit_bytes() as u64),
            micro_batch: None,
            recompute: None,
            saved_activations: Default::default(),
        };
        let targets = [alone.clone(), device.among_ranks(alone)];
        let catalog = KnownKernels::new(device.catalog());
        let allow_fallback = planning.allow_fallback;
        Ok(Source { graph, asked, catalog, targets, node, allow_fallback })
    }

    /// [`Source::new`] for a search. If only the sizes of a model are known, returns the reason
    /// instead of programs, and plans unsupported by the trainer are searched too.
    ///
    /// # Errors
    /// As [`Source::new`], if only plans supported by the trainer are requested.
    pub(crate) fn of_search(
        planning: &PlanningArgs,
        request: &mut SearchRequest,
        node: &'a Hardware,
    ) -> Result<Result<Source<'a>>> {
        let source = Source::new(planning, request, node);
        if source.is_err() && request.by_trainer != ByTrainer::Only {
            request.by_trainer = ByTrainer::Whatever;
            return Ok(source);
        }
        let source = source?;
        // Kernels may be predicted slower than the closed form assumes.
        request.nvfp4 &= source.asked.policy.format().has_tensor_scale();
        Ok(Ok(source))
    }

    /// The programs of plans, as input of a search.
    pub(crate) fn programs(&self) -> Programs<'_> {
        let (graph, asked, catalog) = (&self.graph, &self.asked, &self.catalog);
        Programs::new(ProgramMemory::new(graph, asked, catalog, self.targets.clone()))
    }

    /// Lowers the programs of a strategy's ranks: its micro-batch, recomputation and layers of each
    /// stage.
    fn lower(&self, request: &SearchRequest, at: &Strategy) -> Result<Planned> {
        let parallel = at.parallel()?;
        let [alone, among_ranks] = &self.targets;
        let target = if parallel.is_single() { alone } else { among_ranks };
        let asked = PlanRequest {
            global_batch: at.global_batch(),
            memory_limit_bytes: Some(request.memory_limit_bytes() as u64),
            micro_batch: Some(at.micro_batch),
            recompute: Some(at.recompute.of_trainer()),
            optimizer: OptimizerSpec { on_host: at.offload, ..self.asked.optimizer.clone() },
            ..self.asked.clone()
        };
        let layers = at.layers_of_stages(&request.shape);
        let layers = (at.pp > 1).then_some(layers.as_slice());
        let (graph, catalog) = (&self.graph, &self.catalog);
        let planned =
            autoplan_stages(graph, self.node, &asked, (parallel, layers), catalog, target)?;
        planned.fallbacks(self.allow_fallback)?;
        Ok(planned)
    }
}

/// Searches for the best plan, and lowers the plan if it is within the trainer's rules. If lowering
/// fails, the next best plan is tried.
///
/// # Errors
/// As [`search_with`]; with [`ByTrainer::Only`], also if no plan lowers.
pub(crate) fn best(
    request: &SearchRequest,
    source: Option<&Source<'_>>,
    aids: &SearchAids<'_>,
) -> Result<(Found, Lowered)> {
    let lower = |at: &Strategy| source.map(|source| source.lower(request, at));
    best_by(request, aids, &lower)
}

/// [`best`] with a function that lowers a strategy.
fn best_by(
    request: &SearchRequest,
    aids: &SearchAids<'_>,
    lower: &dyn Fn(&Strategy) -> Option<Result<Planned>>,
) -> Result<(Found, Lowered)> {
    let mut refused: Vec<(Strategy, String)> = Vec::new();
    loop {
        let mut found = search_with(request, aids)?;
        let at = found.best.at;
        let outcome = if at.parallel().is_ok() { lower(&at) } else { None };
        let Some(Err(error)) = outcome else {
            let planned = outcome.transpose()?;
            if let Some(planned) = &planned {
                // The whole programs are available now.
                found.best.memory_bytes = planned.prediction.peak_bytes() as f64;
            }
            let said = refused.first().map(|(at, why)| {
                let count = refused.len();
                format!("{count} that are predicted faster do not lower, such as {at}: {why}")
            });
            return Ok((found, Lowered { planned, not_run_yet: None, refused: said }));
        };
        let why = match error.downcast_ref() {
            Some(PlanError::NothingFits { .. }) => PROGRAMS_TOO_LARGE.to_string(),
            _ => error.root_cause().to_string(),
        };
        refused.push((at, why.clone()));
        match aids.programs {
            Some(programs) if refused.len() < LOWERED_MAX => programs.refuse(at, why),
            _ if request.by_trainer == ByTrainer::Only => {
                let rows = refused.iter().map(|(at, why)| format!("{at}: {why}"));
                return Err(PlanError::NoPlan {
                    what: format!("the trainer runs none of the {} best plans", refused.len()),
                    rejected: rows.collect(),
                    hint: "without `--runnable` the best of other plans is printed".to_string(),
                }
                .into());
            }
            _ => return Ok((found, Lowered { not_run_yet: Some(why), ..Lowered::default() })),
        }
    }
}

/// Replaces the plan's memory by the memory of whole programs. Returns the search's estimate from
/// programs of few layers, by stage.
pub(crate) fn take_programs(
    plan: &mut ClusterPlan,
    lowered: &Lowered,
    request: &SearchRequest,
    programs: Option<&Programs<'_>>,
) -> Vec<u64> {
    let Some(planned) = &lowered.planned else { return Vec::new() };
    let whole: Vec<_> = planned.prediction.ranks.iter().map(ProgramBytes::of_report).collect();
    plan.take_programs(&whole);
    let counted = programs.and_then(|it| it.needed(request, &plan.strategy).ok());
    counted.into_iter().flatten().map(|stage| stage.peak()).collect()
}

/// Text with a line for each class of ranks: memory of the program and the search's estimate, bytes
/// to other ranks, and least time per step.
pub(crate) fn page(run: &DryRun, searched: &[u64], plan: &ClusterPlan) -> String {
    let mut text = "\nlowered, a program for each class of ranks; times are bounds by roofline\n\
                    ranks           GB at the peak  by the search  GB to others  at least\n"
        .to_string();
    for (index, rank) in run.ranks.iter().enumerate() {
        let searched = searched.get(index).copied().unwrap_or(0);
        let last = rank.alike.iter().copied().chain([rank.rank]).max().unwrap_or(rank.rank);
        let first = rank.alike.iter().copied().chain([rank.rank]).min().unwrap_or(rank.rank);
        let ranks = if first == last { first.to_string() } else { format!("{first}-{last}") };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "  {ranks:<13} {:>14.1}  {:>13.1}  {:>12.2}  {:.3} s",
            rank.peak_bytes as f64 / 1e9,
            searched as f64 / 1e9,
            rank.bytes_on_link as f64 / 1e9,
            rank.time_s
        );
    }
    let _ =
        write!(text, "  step at least {:.3} s, {:.3} s predicted", run.time_s, plan.step.seconds);
    if let Some(bubble) = run.bubble {
        let _ = write!(text, "; bubble {:.1} %", 100.0 * bubble);
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use deepwell_ir::capture::ModelConfig;
    use deepwell_plan::ModelShape;
    use deepwell_plan::gpu_model::GpuModel;
    use deepwell_plan::search::Machines;
    use deepwell_precision::PrecisionPolicy;

    use super::*;

    /// A model of two layers on two or four GPUs, and the source of its programs.
    fn source(node: &Hardware, by_trainer: ByTrainer) -> (SearchRequest, Source<'_>) {
        let config = ModelConfig::preset("llama-micro").expect("a preset");
        let shape = ModelShape::of("llama-micro", &config).expect("a shape");
        let machines = Machines::of_gpus(GpuModel::h200(), 4);
        let request = SearchRequest {
            by_trainer,
            gpus: vec![4, 2],
            pins: vec!["tp=1".parse().expect("a pin"), "mbs=1".parse().expect("a pin")],
            ..SearchRequest::new(shape, 128, 4, machines)
        };
        let device = Device::Cuda(0);
        let alone = device.target(node).expect("a GPU");
        let asked = PlanRequest {
            seq: 128,
            global_batch: 4,
            policy: PrecisionPolicy::bf16(),
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: None,
            micro_batch: None,
            recompute: None,
            saved_activations: Default::default(),
        };
        let graph = config.capture(Some(128)).expect("a graph");
        let catalog = KnownKernels::new(device.catalog());
        let targets = [alone.clone(), device.among_ranks(alone)];
        (request, Source { graph, asked, catalog, targets, node, allow_fallback: false })
    }

    /// Regression: `--runnable` printed plans that do not lower, with exit code 0.
    #[test]
    fn plans_that_do_not_lower_make_place_for_others() {
        let node = Hardware::preset("h200-x4").expect("a preset");
        let check = |by_trainer: ByTrainer, failing: usize, expected: &str| {
            let (request, source) = source(&node, by_trainer);
            let programs = source.programs();
            let aids = SearchAids { programs: Some(&programs), ..SearchAids::default() };
            let tried = std::cell::Cell::new(0);
            let lower = |at: &Strategy| {
                tried.set(tried.get() + 1);
                Some(match tried.get() <= failing {
                    true => Err(anyhow!("op `rms_norm` is split by columns")),
                    false => source.lower(&request, at),
                })
            };
            match best_by(&request, &aids, &lower) {
                Ok((found, lowered)) => {
                    assert!(found.best.at.parallel().is_ok() || lowered.planned.is_none());
                    let said = lowered.refused.or(lowered.not_run_yet).unwrap_or_default();
                    assert!(said.starts_with(expected), "{said}");
                    if let Some(planned) = lowered.planned {
                        let bytes = planned.prediction.peak_bytes() as f64;
                        assert_eq!(found.best.memory_bytes, bytes);
                    }
                }
                Err(error) => {
                    assert!(error.downcast_ref().is_some_and(PlanError::is_no_plan), "{error}");
                    assert!(error.to_string().starts_with(expected), "{error}");
                    assert!(error.to_string().contains("op `rms_norm` is split by columns"));
                }
            }
        };
        check(ByTrainer::Only, 0, "");
        check(ByTrainer::Only, 1, "1 that are predicted faster do not lower, such as TP1 ");
        check(ByTrainer::First, 1, "1 that are predicted faster do not lower, such as TP1 ");
        check(ByTrainer::Only, LOWERED_MAX, "the trainer runs none of the 8 best plans");
        check(ByTrainer::First, LOWERED_MAX, "op `rms_norm` is split by columns");
    }
}
