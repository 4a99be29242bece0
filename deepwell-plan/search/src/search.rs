//! Search over the degrees of a distributed plan.
//!
//! Every combination is checked. Impossible combinations are dropped and counted by reason. Fitting
//! combinations are predicted in closed form, and the best are simulated. The result includes the
//! second best plan, the best plan for a change of each dimension, and the front of time, memory
//! and GPUs.
//!
//! A [`ClusterPlan`] describes the best plan; [`replan`] computes the state to move to another
//! cluster, and [`what_if`] the effect of a change of the request.

mod accounting;
mod candidates;
mod cluster_plan;
mod dimension;
mod machines;
mod measured;
mod page;
mod pictures;
mod precision;
mod programs;
mod rank_map;
mod replan;
mod request;
mod space;
mod warnings;
mod what_if;

use std::fmt;

use serde::Serialize;

use self::candidates::Candidates;
use crate::Strategy;
use crate::memory::{StageLayers, stage_memory_estimate, states};
use crate::step_time::{LayerTimes, StepTime, first_full_stage, step_time_known};
use deepwell_lower::PlanError;

pub use accounting::{Accounting, Count};
pub use cluster_plan::{ClusterPlan, RunCost, StagePlan};
pub use dimension::{Dimension, Pin};
pub use machines::Machines;
pub use measured::{
    CopyMeasurement, GemmMeasurement, GpuMeasurement, LinkMeasurement, MachineMeasurements,
};
pub use page::explanation;
pub use pictures::Pictures;
pub use precision::PrecisionTime;
pub use programs::{PROGRAMS_TOO_LARGE, Programs};
pub use rank_map::{RankGroup, RankMap};
pub use replan::{Change, Moves, replan};
pub use request::{ByTrainer, SearchRequest};
pub use what_if::{WhatIf, what_if};

/// Share of a pipeline's time that may be idle before a plan warns of it.
pub const BUBBLE_MAX: f64 = 0.05;

/// A plan with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Degrees of parallelism and other choices of the plan.
    pub at: Strategy,
    /// Seconds of a step.
    pub seconds: f64,
    /// Idle share of the pipeline, 0 to 1.
    pub bubble: f64,
    /// Bytes of a GPU's memory on the fullest stage, by the lowered programs if available.
    pub memory_bytes: f64,
}

impl Candidate {
    /// GPU seconds of a step, a measure of cost.
    pub fn gpu_seconds(&self) -> f64 {
        self.seconds * self.at.gpus() as f64
    }
}

/// Dropped combinations with the same reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dropped {
    /// The reason.
    pub reason: &'static str,
    /// Number of combinations.
    pub count: usize,
    /// The first dropped combination.
    pub example: Strategy,
    /// Detail of the example, if the reason does not include it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl fmt::Display for Dropped {
    /// The reason with its example.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, such as {}", self.reason, self.example)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, ": {why}"))
    }
}

/// Counts a dropped combination under its reason.
fn drop_one(all: &mut Vec<Dropped>, reason: &'static str, example: Strategy, why: Option<String>) {
    match all.iter_mut().find(|known| known.reason == reason) {
        Some(known) => known.count += 1,
        None => all.push(Dropped { reason, count: 1, example, why }),
    }
}

/// Result of a search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// The plan with the least time.
    pub best: Candidate,
    /// Its simulated step.
    pub step: StepTime,
    /// The second best plan, if requested.
    pub second: Option<Candidate>,
    /// The best plan with another value of each dimension, if requested.
    pub what_if: Vec<(Dimension, Candidate)>,
    /// The fastest plan with a bubble of at most [`BUBBLE_MAX`].
    pub small_bubble: Option<Candidate>,
    /// Pareto front of time, memory and GPUs; least time first.
    pub front: Vec<Candidate>,
    /// The fastest plan, if unsupported by the trainer and a slower supported plan was taken.
    pub faster: Option<Candidate>,
    /// Number of combinations checked.
    pub considered: usize,
    /// Number of fitting combinations.
    pub fitting: usize,
    /// Dropped combinations, by reason, most frequent first.
    pub dropped: Vec<Dropped>,
}

/// Limit on the passes of a simulation, to end within seconds.
const PASSES_MAX: usize = 2_000_000;

/// Combinations between two progress reports.
const REPORT_EVERY: usize = 4096;

/// Optional inputs of a search besides the request.
#[derive(Clone, Copy, Default)]
pub struct SearchAids<'a> {
    /// Lowered programs, used to decide which plans within the trainer's rules fit. Without
    /// programs the closed form decides, with constants of other frameworks.
    pub programs: Option<&'a Programs<'a>>,
    /// Called with the progress of the search from time to time.
    pub progress: Option<&'a dyn Fn(Progress)>,
    /// Whether to skip the second best plan and the best plans for each changed dimension, as each
    /// may need lowered programs.
    pub best_alone: bool,
}

/// Progress of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Number of combinations checked.
    Combinations(usize),
    /// Number of plans whose programs were lowered.
    Programs(usize),
}

/// Searches for the fastest plan.
///
/// # Errors
/// An invalid request, or no plan, with the reasons.
pub fn search(request: &SearchRequest) -> Result<Found, PlanError> {
    search_with(request, &SearchAids::default())
}

/// [`search`] with the memory of lowered programs and progress reports.
///
/// # Errors
/// As [`search`].
pub fn search_with(request: &SearchRequest, aids: &SearchAids<'_>) -> Result<Found, PlanError> {
    request.check()?;
    let mut all: Vec<Candidate> = Vec::new();
    let mut dropped: Vec<Dropped> = Vec::new();
    let (mut considered, mut fitting) = (0usize, 0);
    let (known, rules) = (LayerTimes::default(), request.step_rules());
    let predicted = |at: Strategy, memory_bytes: f64| {
        let (shape, machine) = (&request.shape, request.machines.parts());
        let time = step_time_known(shape, &at, machine, &rules, request.seq, &known);
        Candidate { at, seconds: time.seconds, bubble: time.bubble, memory_bytes }
    };
    space::for_each(request, &mut |at, reason| {
        considered += 1;
        if considered.is_multiple_of(REPORT_EVERY)
            && let Some(progress) = aids.progress
        {
            progress(Progress::Combinations(considered));
        }
        let held = match reason {
            Some(reason) => Err((reason, None)),
            None => memory(request, &at).map_err(|bytes| (TOO_LARGE, Some(bytes))),
        };
        match held {
            Ok(bytes) => {
                fitting += 1;
                all.push(predicted(at, bytes));
            }
            Err((TOO_LARGE, _))
                if request.by_trainer == ByTrainer::Only && at.parallel().is_err() =>
            {
                drop_one(&mut dropped, NOT_BY_TRAINER, at, None);
            }
            // Programs decide about these combinations, unless the closed form is far above the
            // limit.
            Err((TOO_LARGE, Some(bytes)))
                if aids.programs.is_some()
                    && bytes * CLOSED_FORM_MIN <= request.memory_limit_bytes()
                    && at.parallel().is_ok() =>
            {
                all.push(predicted(at, bytes));
            }
            Err((reason, _)) => drop_one(&mut dropped, reason, at, None),
        }
    });
    all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.at.cmp(&b.at)));
    let mut candidates = Candidates::new(request, all, aids);
    let simulated = candidates.simulate_best()?;
    let Some(best) = candidates.first(|_| true) else {
        let of_others = candidates.all().iter().filter(|_| request.by_trainer == ByTrainer::Only);
        of_others.for_each(|other| drop_one(&mut dropped, NOT_BY_TRAINER, other.at, None));
        dropped.extend(candidates.too_large());
        return Err(nothing_found(request, &mut dropped));
    };
    let step = simulated.unwrap_or_else(|| request.estimate(&best.at));
    let dimensions = if aids.best_alone { &[][..] } else { &Dimension::ALL };
    let what_if = dimensions.iter().filter_map(|&dimension| {
        let own = dimension.of(&best.at);
        let other = candidates.first(|candidate| dimension.of(&candidate.at) != own)?;
        Some((dimension, other))
    });
    let what_if = what_if.collect();
    let found = Found {
        second: match aids.best_alone {
            true => None,
            false => candidates.first(|other| other.at != best.at),
        },
        what_if,
        small_bubble: match best.bubble > BUBBLE_MAX {
            true => candidates.first(|other| other.bubble <= BUBBLE_MAX),
            false => Some(best.clone()),
        },
        faster: candidates.faster_than(&best),
        front: front(candidates.all()),
        considered,
        fitting,
        dropped: Vec::new(),
        step,
        best,
    };
    dropped.extend(candidates.too_large());
    dropped.sort_by(|a, b| b.count.cmp(&a.count).then(a.reason.cmp(b.reason)));
    Ok(Found { dropped, ..found })
}

/// Smallest ratio of a program's bytes to the closed form.
const CLOSED_FORM_MIN: f64 = 0.75;

/// The error of a search without result: memory, if memory alone excluded some combinations and
/// plans unsupported by the trainer were allowed.
fn nothing_found(request: &SearchRequest, dropped: &mut [Dropped]) -> PlanError {
    dropped.sort_by(|a, b| b.count.cmp(&a.count).then(a.reason.cmp(b.reason)));
    let rejected: Vec<String> =
        dropped.iter().map(|dropped| format!("{} plans: {dropped}", dropped.count)).collect();
    let limit_bytes = request.memory_limit_bytes() as u64;
    let by_memory = [TOO_LARGE, PROGRAMS_TOO_LARGE];
    let is_too_large = dropped.iter().any(|d| by_memory.contains(&d.reason));
    match (is_too_large, request.by_trainer == ByTrainer::Only) {
        (true, false) => {
            let rejected = rejected.into_iter().chain(on_host(request)).collect();
            PlanError::NothingFits { limit_bytes, rejected }
        }
        (true, true) => PlanError::NoPlan {
            what: format!(
                "no plan that the trainer runs fits into {} of memory",
                deepwell_lower::format_bytes(limit_bytes)
            ),
            rejected,
            hint:
                "without `--runnable` the best of other plans is printed; more GPUs or a shorter \
                   sequence need less memory of each"
                    .to_string(),
        },
        (false, _) => {
            let gpus = request.gpus.iter().copied().max().unwrap_or(0);
            PlanError::NoPlan {
                what: format!("no plan for {gpus} GPUs and {} sequences", request.global_batch),
                rejected,
                hint: "take back a pin, or give a batch that more numbers divide".to_string(),
            }
        }
    }
}

/// The best plan with the optimizer on the host, as a hint.
fn on_host(request: &SearchRequest) -> Option<String> {
    if request.pins.iter().any(|pin| pin.dimension == Dimension::Offload) {
        return None;
    }
    let pin = Pin { dimension: Dimension::Offload, value: 1, forbidden: false };
    let pins = request.pins.iter().copied().chain([pin]).collect();
    let best = search(&SearchRequest { pins, ..request.clone() }).ok()?.best;
    Some(format!("with `--pin {pin}` there is a plan: {}, {:.3} s a step", best.at, best.seconds))
}

/// Reason for dropping a plan unsupported by the trainer.
const NOT_BY_TRAINER: &str = "the trainer does not run it yet";

/// Reason for dropping a plan above the memory limit.
const TOO_LARGE: &str = "needs more memory than a GPU has";

/// Bytes of the fullest stage; `Err` with the bytes if above the limit.
fn memory(request: &SearchRequest, at: &Strategy) -> Result<f64, f64> {
    let rules = request.memory_rules();
    // Most combinations end here, by the memory of their states alone.
    let held = states(&request.shape, at, &rules, &StageLayers::of(&request.shape, at, 0));
    let least = held.parameters + held.gradients + held.optimizer;
    if !at.offload && least * CLOSED_FORM_MIN > request.memory_limit_bytes() {
        return Err(least);
    }
    let of = |stage| stage_memory_estimate(&request.shape, at, &rules, request.seq, stage).device();
    let mut bytes = of(0).max(of(at.pp - 1));
    let fullest = first_full_stage(&request.shape, at);
    if fullest > 0 && fullest + 1 < at.pp {
        bytes = bytes.max(of(fullest));
    }
    bytes += request.outside_bytes_among(at.gpus());
    if bytes > request.memory_limit_bytes() { Err(bytes) } else { Ok(bytes) }
}

/// The Pareto front of time, memory and GPUs; it covers GPU time too, the product of time and GPUs.
/// `fitting` is sorted by time.
fn front(fitting: &[Candidate]) -> Vec<Candidate> {
    let mut front: Vec<Candidate> = Vec::new();
    // The least memory so far with each number of GPUs.
    let mut least: Vec<(usize, f64)> = Vec::new();
    for candidate in fitting {
        let (gpus, memory) = (candidate.at.gpus(), candidate.memory_bytes);
        if least.iter().any(|&(other, bytes)| other <= gpus && bytes <= memory) {
            continue;
        }
        match least.iter_mut().find(|(other, _)| *other == gpus) {
            Some(known) => known.1 = memory,
            None => least.push((gpus, memory)),
        }
        front.push(candidate.clone());
    }
    front
}

#[cfg(test)]
mod tests;
