//! Search over the degrees of a distributed plan.
//!
//! Every combination is looked at; what cannot be is dropped with a reason, and reasons are
//! counted. What fits is predicted in closed form, and the best are simulated. The result keeps
//! the second best, the best with each dimension changed, and the front of time, memory and GPUs.
//!
//! A [`ClusterPlan`] is what a reader wants to know of the best one; [`replan`] says what another
//! cluster moves, [`what_if`] what another number would do.

mod accounting;
mod cluster_plan;
mod dimension;
mod machines;
mod measured;
mod page;
mod pictures;
mod rank_map;
mod replan;
mod request;
mod space;
mod warnings;
mod what_if;

use serde::Serialize;

use crate::memory::stage_memory_estimate;
use crate::step_time::{LayerTimes, StepTime, first_full_stage, step_time, step_time_known};
use crate::{Parallel, PlanError, Strategy};

pub use accounting::{Accounting, Count};
pub use cluster_plan::{ClusterPlan, RunCost, StagePlan};
pub use dimension::{Dimension, Pin};
pub use machines::Machines;
pub use measured::{
    CopyMeasurement, GemmMeasurement, GpuMeasurement, LinkMeasurement, MachineMeasurements,
};
pub use page::explanation;
pub use pictures::Pictures;
pub use rank_map::{RankGroup, RankMap};
pub use replan::{Change, Moves, replan};
pub use request::SearchRequest;
pub use what_if::{WhatIf, what_if};

/// Share of a pipeline's time that may be idle before a plan warns of it.
pub const BUBBLE_MAX: f64 = 0.05;

/// A plan with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// How the model is divided.
    pub at: Strategy,
    /// Seconds of a step.
    pub seconds: f64,
    /// Idle share of the pipeline, 0 to 1.
    pub bubble: f64,
    /// Bytes of a GPU's memory, on the fullest stage.
    pub memory_bytes: f64,
}

impl Candidate {
    /// Seconds of all GPUs together: what a step costs.
    pub fn gpu_seconds(&self) -> f64 {
        self.seconds * self.at.gpus() as f64
    }
}

/// Why combinations were dropped.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dropped {
    /// The reason.
    pub reason: &'static str,
    /// How many.
    pub count: usize,
    /// The first of them.
    pub example: Strategy,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// The least time.
    pub best: Candidate,
    /// Its simulated step.
    pub step: StepTime,
    /// The next after it.
    pub second: Option<Candidate>,
    /// The best plan whose named dimension differs from the best one's.
    pub what_if: Vec<(Dimension, Candidate)>,
    /// The least time among those whose bubble is within [`BUBBLE_MAX`].
    pub small_bubble: Option<Candidate>,
    /// No other is better in time, memory and GPUs together; least time first.
    pub front: Vec<Candidate>,
    /// The first of those within the rules of the trainer ([`Strategy::parallel`]), least time
    /// first. Only lowering tells whether the programs of one fit.
    pub runnable: Vec<Candidate>,
    /// Combinations looked at.
    pub considered: usize,
    /// Those that fit.
    pub fitting: usize,
    /// Those that do not, by reason, most first.
    pub dropped: Vec<Dropped>,
}

/// Plans within the trainer's rules which are kept, and those of the same degrees among them: the
/// next is there where one does not lower.
const RUNNABLE: usize = 12;
const RUNNABLE_ALIKE: usize = 2;
/// Simulations at most.
const SIMULATED: usize = 24;
/// Passes of a simulation at most, so that it ends in seconds.
const PASSES_MAX: usize = 2_000_000;

/// Combinations between two reports of a search that is watched.
const REPORT_EVERY: usize = 4096;

/// Searches.
///
/// # Errors
/// A request that cannot be searched, or no plan, with the reasons.
pub fn search(request: &SearchRequest) -> Result<Found, PlanError> {
    search_watched(request, &mut |_| {})
}

/// [`search`], which tells `progress` now and then how many combinations it has looked at.
///
/// # Errors
/// As [`search`].
pub fn search_watched(
    request: &SearchRequest,
    progress: &mut dyn FnMut(usize),
) -> Result<Found, PlanError> {
    request.check()?;
    let mut fitting: Vec<Candidate> = Vec::new();
    // With the optimizer on the host, of what does not fit without: nobody has measured it, so that
    // it is a plan only where there is no other, and else said beside the plan.
    let mut on_host: Vec<Candidate> = Vec::new();
    let mut dropped: Vec<Dropped> = Vec::new();
    let mut considered = 0usize;
    let (known, rules) = (LayerTimes::default(), request.step_rules());
    space::for_each(request, &mut |at, reason| {
        considered += 1;
        if considered.is_multiple_of(REPORT_EVERY) {
            progress(considered);
        }
        let predicted = |at: Strategy, memory_bytes: f64| {
            let (shape, machine) = (&request.shape, request.machines.parts());
            let time = step_time_known(shape, &at, machine, &rules, request.seq, &known);
            let (seconds, bubble) = (time.seconds, time.bubble);
            Candidate { at, seconds, bubble, memory_bytes }
        };
        let held = reason.map_or_else(|| memory(request, &at), Err);
        let may_go_to_host = !at.offload && !request.runnable_only;
        if held == Err(TOO_LARGE) && may_go_to_host && space::pinned(request, Dimension::Offload, 1)
        {
            considered += 1;
            let at = Strategy { offload: true, ..at };
            on_host.extend(memory(request, &at).ok().map(|bytes| predicted(at, bytes)));
        }
        match held {
            Ok(memory_bytes) => fitting.push(predicted(at, memory_bytes)),
            Err(reason) => match dropped.iter_mut().find(|known| known.reason == reason) {
                Some(known) => known.count += 1,
                None => dropped.push(Dropped { reason, count: 1, example: at }),
            },
        }
    });
    if fitting.is_empty() {
        std::mem::swap(&mut fitting, &mut on_host);
    }
    dropped.sort_by(|a, b| b.count.cmp(&a.count).then(a.reason.cmp(b.reason)));
    fitting.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.at.cmp(&b.at)));
    let count = fitting.len();
    let simulated = simulate_best(request, &mut fitting)?;
    let Some(best) = fitting.first().cloned() else {
        return Err(nothing_found(request, &dropped));
    };
    let step = simulated.unwrap_or_else(|| request.estimate(&best.at));
    let what_if = Dimension::ALL.into_iter().filter_map(|dimension| {
        let own = dimension.of(&best.at);
        let other = fitting.iter().find(|candidate| dimension.of(&candidate.at) != own);
        let other = match dimension {
            Dimension::Offload => {
                other.or_else(|| on_host.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)))
            }
            _ => other,
        };
        Some((dimension, other?.clone()))
    });
    Ok(Found {
        second: fitting.get(1).cloned(),
        what_if: what_if.collect(),
        small_bubble: fitting.iter().find(|other| other.bubble <= BUBBLE_MAX).cloned(),
        front: front(&fitting),
        runnable: runnable(&fitting),
        considered,
        fitting: count,
        dropped,
        step,
        best,
    })
}

/// Why a search found nothing: memory, if some combinations failed by it alone and all kinds of
/// plans were asked for.
fn nothing_found(request: &SearchRequest, dropped: &[Dropped]) -> PlanError {
    let rejected = dropped
        .iter()
        .map(|d| format!("{} plans: {}, such as {}", d.count, d.reason, d.example))
        .collect();
    let limit_bytes = request.memory_limit_bytes() as u64;
    let is_too_large = dropped.iter().any(|d| d.reason == TOO_LARGE);
    match (is_too_large, request.runnable_only) {
        (true, false) => PlanError::NothingFits { limit_bytes, rejected },
        (true, true) => PlanError::NoPlan {
            what: format!(
                "no plan that the trainer runs fits into {} of memory",
                crate::format_bytes(limit_bytes)
            ),
            rejected,
            hint: "without `--runnable` all kinds of plans are searched; more GPUs or a shorter \
                   sequence need less memory of each",
        },
        (false, _) => {
            let gpus = request.gpus.iter().copied().max().unwrap_or(0);
            PlanError::NoPlan {
                what: format!("no plan for {gpus} GPUs and {} sequences", request.global_batch),
                rejected,
                hint: "take back a pin, or give a batch that more numbers divide",
            }
        }
    }
}

/// The first candidates within the rules of the trainer.
fn runnable(fitting: &[Candidate]) -> Vec<Candidate> {
    let mut taken: Vec<(Parallel, Candidate)> = Vec::new();
    for candidate in fitting {
        let Ok(parallel) = candidate.at.parallel() else { continue };
        let parallel = Parallel { chunks: 1, schedule: Default::default(), ..parallel };
        let alike = taken.iter().filter(|(other, _)| *other == parallel).count();
        if alike < RUNNABLE_ALIKE {
            taken.push((parallel, candidate.clone()));
        }
        if taken.len() == RUNNABLE {
            break;
        }
    }
    taken.into_iter().map(|(_, candidate)| candidate).collect()
}

impl Found {
    /// Takes another plan for the best one.
    ///
    /// # Errors
    /// A schedule that its degrees do not allow.
    pub fn take(&mut self, request: &SearchRequest, other: &Candidate) -> Result<(), PlanError> {
        let at = &other.at;
        self.step = match at.pp * at.vpp * at.micro_batches > PASSES_MAX {
            true => request.estimate(at),
            false => {
                let (gpu, fabric) = request.machines.parts();
                step_time(&request.shape, at, gpu, fabric, &request.step_rules(), request.seq)?
            }
        };
        let (seconds, bubble) = (self.step.seconds, self.step.bubble);
        self.best = Candidate { seconds, bubble, ..other.clone() };
        Ok(())
    }
}

/// Why a plan does not fit.
const TOO_LARGE: &str = "needs more memory than a GPU has";

/// Bytes of the fullest stage, or why they are too many.
fn memory(request: &SearchRequest, at: &Strategy) -> Result<f64, &'static str> {
    let rules = request.memory_rules();
    let of = |stage| stage_memory_estimate(&request.shape, at, &rules, request.seq, stage).device();
    let mut bytes = of(0).max(of(at.pp - 1));
    let fullest = first_full_stage(&request.shape, at);
    if fullest > 0 && fullest + 1 < at.pp {
        bytes = bytes.max(of(fullest));
    }
    bytes += request.outside_bytes_among(at.gpus());
    if bytes > request.memory_limit_bytes() { Err(TOO_LARGE) } else { Ok(bytes) }
}

/// Simulates the best one until it is one that was simulated: then no other is estimated better.
fn simulate_best(
    request: &SearchRequest,
    fitting: &mut Vec<Candidate>,
) -> Result<Option<StepTime>, PlanError> {
    let mut simulated: Vec<(Strategy, StepTime)> = Vec::new();
    let rules = request.step_rules();
    while let Some(candidate) = fitting.first().cloned() {
        let at = candidate.at;
        if let Some((_, step)) = simulated.iter().find(|known| known.0 == at) {
            return Ok(Some(step.clone()));
        }
        if simulated.len() == SIMULATED || at.pp * at.vpp * at.micro_batches > PASSES_MAX {
            return Ok(None);
        }
        let (gpu, fabric) = request.machines.parts();
        let step = step_time(&request.shape, &at, gpu, fabric, &rules, request.seq)?;
        fitting.remove(0);
        let place = fitting.partition_point(|other| other.seconds < step.seconds);
        let (seconds, bubble) = (step.seconds, step.bubble);
        fitting.insert(place, Candidate { seconds, bubble, ..candidate });
        simulated.push((at, step));
    }
    Ok(None)
}

/// Candidates that no other is better than in time, memory and GPUs, and so in GPU time, which is
/// the product of two of them. `fitting` is sorted by time.
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
