//! The best plan of a search, lowered to the programs of its ranks and simulated.

use std::fmt::Write;

use anyhow::Result;
use deepwell_ir::Recompute;
use deepwell_plan::memory::StageLayers;
use deepwell_plan::search::{ClusterPlan, Found, SearchRequest};
use deepwell_plan::{
    ActivationRecompute, DryRun, OptimizerSpec, PlanError, PlanRequest, Planned, Strategy,
    autoplan_stages,
};
use deepwell_probe::Hardware;
use deepwell_trainer::{Device, ModelSource};

use crate::planning::PlanningArgs;

/// What lowering came to.
#[derive(Debug, Default)]
pub(crate) struct Lowered {
    /// Programs with their prediction; none where the trainer does not run the plan.
    pub(crate) planned: Option<Planned>,
    /// Why it does not.
    pub(crate) not_run_yet: Option<String>,
    /// Plans that are predicted faster and did not lower, with the reason of the first.
    pub(crate) refused: Option<String>,
}

/// Lowers the best plan of a search, where the trainer runs it. If its programs need more memory
/// than there is, or only plans are asked for that the trainer runs, the next of those takes its
/// place.
///
/// # Errors
/// A schedule that the degrees of the next plan do not allow.
pub(crate) fn best(
    planning: &PlanningArgs,
    request: &SearchRequest,
    found: &mut Found,
    node: &Hardware,
) -> Result<Lowered> {
    let mut lowered = Lowered::default();
    if found.best.at.parallel().is_err() {
        return Ok(lowered);
    }
    let mut refused: Option<(usize, String)> = None;
    for candidate in found.runnable.clone() {
        match programs(planning, request, &candidate.at, node) {
            Ok(planned) => {
                if candidate.at != found.best.at {
                    found.take(request, &candidate)?;
                }
                lowered.planned = Some(planned);
                lowered.not_run_yet = None;
                lowered.refused = refused.map(|(count, first)| {
                    format!("{count} that are predicted faster do not lower, {first}")
                });
                return Ok(lowered);
            }
            Err(error) => {
                let is_too_large =
                    matches!(error.downcast_ref(), Some(PlanError::NothingFits { .. }));
                let why = match is_too_large {
                    true => "its programs need more memory than a GPU has".to_string(),
                    false => error.root_cause().to_string(),
                };
                let first = || (0, format!("such as {}: {why}", candidate.at));
                refused.get_or_insert_with(first).0 += 1;
                lowered.not_run_yet.get_or_insert(why);
                if !is_too_large && !request.runnable_only {
                    break;
                }
            }
        }
    }
    // None of them: the best one stays, and its own reason is said with it.
    Ok(lowered)
}

/// The programs of a strategy's ranks: its micro-batch, recomputation and layers of each stage.
fn programs(
    planning: &PlanningArgs,
    request: &SearchRequest,
    at: &Strategy,
    node: &Hardware,
) -> Result<Planned> {
    let parallel = at.parallel()?;
    let graph = ModelSource::open(&planning.model)?.capture(Some(request.seq))?;
    let device = Device::Cuda(0);
    let target = device.target(node)?;
    let target = if parallel.is_single() { target } else { device.among_ranks(target) };
    let recompute = match at.recompute {
        ActivationRecompute::Full => Recompute::Full,
        ActivationRecompute::Selective => Recompute::Selective,
        _ => Recompute::None,
    };
    let asked = PlanRequest {
        seq: request.seq,
        global_batch: request.global_batch,
        policy: planning.policy()?,
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: Some(request.memory_limit_bytes() as u64),
        micro_batch: Some(at.micro_batch),
        recompute: Some(recompute),
    };
    // The first chunk of all stages, then the second.
    let stages: Vec<StageLayers> =
        (0..at.pp).map(|stage| StageLayers::of(&request.shape, at, stage)).collect();
    let chunk_layers = |chunk: usize| stages.iter().map(move |stage| stage.chunks[chunk].len());
    let layers: Vec<usize> = (0..at.vpp).flat_map(chunk_layers).collect();
    let layers = (at.pp > 1).then_some(layers.as_slice());
    let catalog = device.catalog();
    let split = (parallel, layers);
    Ok(autoplan_stages(&graph, node, &asked, split, catalog.as_ref(), &target)?)
}

/// Each class of ranks: memory of its program beside that of the search, bytes to others, and the
/// least time of a step.
pub(crate) fn page(run: &DryRun, plan: &ClusterPlan) -> String {
    let mut text = "\nlowered, a program for each class of ranks; times are bounds by roofline\n\
                    ranks           GB at the peak  by the search  GB to others  at least\n"
        .to_string();
    for (index, rank) in run.ranks.iter().enumerate() {
        let searched = plan.stages.get(index).map_or(0.0, |stage| stage.memory.device());
        let last = rank.alike.iter().copied().chain([rank.rank]).max().unwrap_or(rank.rank);
        let first = rank.alike.iter().copied().chain([rank.rank]).min().unwrap_or(rank.rank);
        let ranks = if first == last { first.to_string() } else { format!("{first}-{last}") };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "  {ranks:<13} {:>14.1}  {:>13.1}  {:>12.2}  {:.3} s",
            rank.peak_bytes as f64 / 1e9,
            searched / 1e9,
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
