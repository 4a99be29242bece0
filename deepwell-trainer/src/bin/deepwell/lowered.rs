//! The best plan of a search, lowered to the programs of its ranks and simulated.

use std::fmt::Write;

use anyhow::Result;
use deepwell_ir::{PrecisionPolicy, Recompute};
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

/// Lowers the best plan of a search, where it is within the trainer's rules. If its programs need
/// more memory than there is, or only plans are asked for that the trainer runs, the next of those
/// takes its place. `progress` gets the number of each, from 0, and how many there are.
///
/// # Errors
/// A schedule that the degrees of the next plan do not allow; with
/// [`SearchRequest::runnable_only`], that none of them lowers and fits.
pub(crate) fn best(
    planning: &PlanningArgs,
    request: &SearchRequest,
    found: &mut Found,
    node: &Hardware,
    progress: &dyn Fn(usize, usize),
) -> Result<Lowered> {
    let lower = |at: &Strategy| programs(planning, request, at, node);
    best_by(request, found, progress, &lower)
}

/// [`best`] with what makes the programs of a strategy.
fn best_by(
    request: &SearchRequest,
    found: &mut Found,
    progress: &dyn Fn(usize, usize),
    lower: &dyn Fn(&Strategy) -> Result<Planned>,
) -> Result<Lowered> {
    if found.best.at.parallel().is_err() {
        return Ok(Lowered::default());
    }
    let mut refused: Vec<String> = Vec::new();
    let mut why_not_best = None;
    let candidates = found.runnable.clone();
    for (index, candidate) in candidates.iter().enumerate() {
        progress(index, candidates.len());
        match lower(&candidate.at) {
            Ok(planned) => {
                if candidate.at != found.best.at {
                    found.take(request, candidate)?;
                }
                let refused = refused.first().map(|first| {
                    let count = refused.len();
                    format!("{count} that are predicted faster do not lower, such as {first}")
                });
                return Ok(Lowered { planned: Some(planned), not_run_yet: None, refused });
            }
            Err(error) => {
                let is_too_large =
                    matches!(error.downcast_ref(), Some(PlanError::NothingFits { .. }));
                let why = match is_too_large {
                    true => "its programs need more memory than a GPU has".to_string(),
                    false => error.root_cause().to_string(),
                };
                refused.push(format!("{}: {why}", candidate.at));
                why_not_best.get_or_insert(why);
                if !is_too_large && !request.runnable_only {
                    break;
                }
            }
        }
    }
    if request.runnable_only {
        return Err(PlanError::NoPlan {
            what: format!(
                "the trainer runs none of the {} best plans within its rules",
                refused.len()
            ),
            rejected: refused,
            hint: "without `--runnable` the best plan of the search is shown; more GPUs, or a \
                   `--pin` such as `recompute=full` or `mbs=1`, need less memory of each",
        }
        .into());
    }
    // None of them: the best one stays, and its own reason is said with it.
    let others = refused.len().saturating_sub(1);
    let not_run_yet = why_not_best.map(|why| match others {
        0 => why,
        _ => format!("{why}, and so do those of the next {others} plans within the rules"),
    });
    Ok(Lowered { planned: None, not_run_yet, refused: None })
}

/// The programs of a strategy's ranks: its micro-batch, recomputation and layers of each stage.
fn programs(
    planning: &PlanningArgs,
    request: &SearchRequest,
    at: &Strategy,
    node: &Hardware,
) -> Result<Planned> {
    let parallel = at.parallel()?;
    let graph = planning.graph(&ModelSource::open(&planning.model)?, request.seq)?;
    let device = Device::Cuda(0);
    let target = device.target(node)?;
    let target = if parallel.is_single() { target } else { device.among_ranks(target) };
    let recompute = match at.recompute {
        ActivationRecompute::Full => Recompute::Full,
        ActivationRecompute::Selective => Recompute::Selective,
        _ => Recompute::None,
    };
    let policy = match planning.is_auto() && !request.fp8 {
        true => PrecisionPolicy::bf16(),
        false => planning.policy(&graph, (device, &target), (at.micro_batch, request.seq))?.0,
    };
    let asked = PlanRequest {
        seq: request.seq,
        global_batch: request.global_batch,
        policy,
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
    let planned = autoplan_stages(&graph, node, &asked, split, catalog.as_ref(), &target)?;
    planned.fallbacks(planning.allow_fallback)?;
    Ok(planned)
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

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use deepwell_plan::ModelShape;
    use deepwell_plan::gpu_model::GpuModel;
    use deepwell_plan::search::{Machines, search};

    use super::*;

    /// A search over eight GPUs whose first plan is within the trainer's rules.
    fn searched(runnable_only: bool) -> (SearchRequest, Found) {
        let shape = ModelShape::known("mixtral-8x7b").expect("a known model");
        let machines = Machines::of_gpus(GpuModel::h200(), 8);
        let request = SearchRequest::new(shape, 4096, 64, machines);
        let within_rules = SearchRequest { runnable_only: true, ..request.clone() };
        let found = search(&within_rules).expect("a plan");
        assert!(found.best.at.parallel().is_ok() && found.runnable.len() > 2);
        (SearchRequest { runnable_only, ..request }, found)
    }

    /// Plans that do not lower were printed with `--runnable`, and the exit code was 0.
    #[test]
    fn runnable_without_a_plan_that_lowers_is_an_error() {
        let too_large = || PlanError::NothingFits { limit_bytes: 1, rejected: Vec::new() };
        let check = |error: &dyn Fn() -> anyhow::Error, reason: &str| {
            let (request, mut found) = searched(true);
            let tried = found.runnable.clone();
            let lowered = best_by(&request, &mut found, &|_, _| {}, &|_| Err(error()));
            let error = lowered.expect_err("no plan lowers");
            assert!(error.downcast_ref::<PlanError>().is_some_and(PlanError::is_no_plan));
            let text = error.to_string();
            let heading = format!("the trainer runs none of the {} best plans", tried.len());
            assert!(text.starts_with(&heading), "{text}");
            for candidate in tried {
                let row = format!("\n  {}: {reason}", candidate.at);
                assert!(text.contains(&row), "expected `{row}` in: {text}");
            }
        };
        check(&|| too_large().into(), "its programs need more memory than a GPU has");
        check(
            &|| anyhow!("op `rms_norm` is split by columns"),
            "op `rms_norm` is split by columns",
        );
    }

    /// Without the option the best plan is shown, and what is said of it is what came of lowering.
    #[test]
    fn without_runnable_the_best_plan_stays_with_its_reason() {
        let too_large = || PlanError::NothingFits { limit_bytes: 1, rejected: Vec::new() };
        let check = |error: &dyn Fn() -> anyhow::Error, expected: &str| {
            let (request, mut found) = searched(false);
            let (best, others) = (found.best.at, found.runnable.len() - 1);
            let lowered = best_by(&request, &mut found, &|_, _| {}, &|_| Err(error()))
                .expect("a plan that is not run yet");
            assert!(lowered.planned.is_none() && found.best.at == best);
            let expected = expected.replace("OTHERS", &others.to_string());
            assert_eq!(lowered.not_run_yet.as_deref(), Some(expected.as_str()));
        };
        check(
            &|| too_large().into(),
            "its programs need more memory than a GPU has, and so do those of the next OTHERS \
             plans within the rules",
        );
        // Another reason than memory is one of the model, and ends the trials.
        check(&|| anyhow!("no kernel"), "no kernel");
    }
}
