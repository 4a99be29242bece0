//! Suggests changes with which the trainer supports a plan.

use deepwell_plan::PlanError;
use deepwell_plan::search::{ByTrainer, Machines, SearchAids, SearchRequest, search_with};

/// Largest multiple of the GPUs tried.
const GPUS_TIMES_MAX: usize = 64;

/// Adds suggestions to the error of a request without a plan: each pin removed, and more GPUs.
pub(crate) fn named(
    error: anyhow::Error,
    request: &SearchRequest,
    aids: &SearchAids<'_>,
) -> anyhow::Error {
    let is_no_plan = error.downcast_ref().is_some_and(PlanError::is_no_plan);
    if !is_no_plan || request.by_trainer != ByTrainer::Only {
        return error;
    }
    let (what, rejected) = match error.downcast::<PlanError>() {
        Ok(PlanError::NoPlan { what, rejected, .. }) => (what, rejected),
        Ok(other) => return other.into(),
        Err(error) => return error,
    };
    let hint = match all(request, aids).as_slice() {
        [] => "more memory of each GPU, or a shorter sequence".to_string(),
        found => format!("the trainer runs a plan\n  {}", found.join("\n  ")),
    };
    PlanError::NoPlan { what, rejected, hint }.into()
}

/// Describes the nearest requests with a plan supported by the trainer.
fn all(request: &SearchRequest, aids: &SearchAids<'_>) -> Vec<String> {
    let plan = |other: &SearchRequest, change: String| {
        let aids = SearchAids { best_alone: true, ..*aids };
        let best = search_with(other, &aids).ok()?.best;
        Some(format!("{change}: {}, {:.3} s a step", best.at, best.seconds))
    };
    let mut found: Vec<String> = Vec::new();
    for (index, pin) in request.pins.iter().enumerate() {
        let mut pins = request.pins.clone();
        pins.remove(index);
        found.extend(plan(
            &SearchRequest { pins, ..request.clone() },
            format!("without `--pin {pin}`"),
        ));
    }
    let gpus = request.gpus.iter().copied().max().unwrap_or(1);
    let times = std::iter::successors(Some(2), |times| Some(times * 2));
    let more = times.take_while(|times| *times <= GPUS_TIMES_MAX).find_map(|times| {
        let gpus = gpus * times;
        let machines = Machines { gpus, ..request.machines.clone() };
        let other = SearchRequest { gpus: vec![gpus], machines, ..request.clone() };
        plan(&other, format!("on {gpus} GPUs"))
    });
    found.extend(more);
    found
}
