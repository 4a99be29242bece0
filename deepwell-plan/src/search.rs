//! Search over the degrees of a distributed plan.
//!
//! Every combination is looked at; what cannot be is dropped with a reason, and reasons are
//! counted.
//! What fits is predicted in closed form, and the best are simulated. The result keeps the second
//! best, the best with each dimension changed, and the front of time, memory and GPUs.

mod report;
mod request;
mod space;

use serde::Serialize;

use crate::memory::stage_memory_estimate;
use crate::step_time::{LayerTimes, StepTime, step_time, step_time_known};
use crate::{Parallelism, PlanError};

pub use report::{Change, replan};
pub use request::{Dimension, Pin, SearchRequest, known_model};

/// A plan with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The degrees.
    pub at: Parallelism,
    /// Whether linear layers run in FP8.
    pub fp8: bool,
    /// Seconds of a step.
    pub seconds: f64,
    /// Bytes of a GPU's memory, on the fullest stage.
    pub memory_bytes: f64,
}

/// Why combinations were dropped.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dropped {
    /// The reason.
    pub reason: &'static str,
    /// How many.
    pub count: usize,
    /// The first of them.
    pub example: Parallelism,
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
    /// No other is better in time, memory and GPUs together; least time first.
    pub front: Vec<Candidate>,
    /// Combinations looked at.
    pub considered: usize,
    /// Those that fit.
    pub fitting: usize,
    /// Those that do not, by reason, most first.
    pub dropped: Vec<Dropped>,
}

/// Simulations at most.
const SIMULATED: usize = 24;
/// Passes of a simulation at most, so that it ends in seconds.
const PASSES_MAX: usize = 2_000_000;

/// Searches.
///
/// # Errors
/// A request that cannot be searched, or nothing that fits, with the reasons.
pub fn search(request: &SearchRequest) -> Result<Found, PlanError> {
    request.check()?;
    let mut fitting: Vec<Candidate> = Vec::new();
    let mut dropped: Vec<Dropped> = Vec::new();
    let mut considered = 0;
    let known = LayerTimes::default();
    space::for_each(request, &mut |at, reason| {
        considered += 1;
        match reason.map_or_else(|| memory(request, &at), Err) {
            Ok(memory_bytes) => {
                for &fp8 in &request.fp8 {
                    let rules = request.step_rules(fp8);
                    let (shape, machine) = (&request.shape, (&request.gpu, &request.fabric));
                    let time = step_time_known(shape, &at, machine, &rules, request.seq, &known);
                    fitting.push(Candidate { at, fp8, seconds: time.seconds, memory_bytes });
                }
            }
            Err(reason) => match dropped.iter_mut().find(|known| known.reason == reason) {
                Some(known) => known.count += 1,
                None => dropped.push(Dropped { reason, count: 1, example: at }),
            },
        }
    });
    dropped.sort_by(|a, b| b.count.cmp(&a.count).then(a.reason.cmp(b.reason)));
    fitting.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.at.cmp(&b.at)));
    let count = fitting.len();
    let simulated = simulate_best(request, &mut fitting)?;
    let Some(best) = fitting.first().cloned() else {
        let rejected = dropped
            .iter()
            .map(|d| format!("{} plans: {}, such as {}", d.count, d.reason, d.example));
        return Err(PlanError::NothingFits {
            limit_bytes: request.memory_limit_bytes() as u64,
            rejected: rejected.collect(),
        });
    };
    let step = simulated.unwrap_or_else(|| request.estimate(&best));
    let what_if = Dimension::ALL.into_iter().filter_map(|dimension| {
        let own = dimension.of(&best.at);
        let other = fitting.iter().find(|candidate| dimension.of(&candidate.at) != own)?;
        Some((dimension, other.clone()))
    });
    Ok(Found {
        second: fitting.get(1).cloned(),
        what_if: what_if.collect(),
        front: front(&fitting),
        considered,
        fitting: count,
        dropped,
        step,
        best,
    })
}

/// Bytes of the fullest stage, or why they are too many.
fn memory(request: &SearchRequest, at: &Parallelism) -> Result<f64, &'static str> {
    let rules = request.memory;
    let of = |stage| stage_memory_estimate(&request.shape, at, &rules, request.seq, stage).device();
    let bytes = of(0).max(of(at.pp - 1)) + request.outside_bytes;
    if bytes > request.memory_limit_bytes() {
        Err("needs more memory than a GPU has")
    } else {
        Ok(bytes)
    }
}

/// Simulates the best one until it is one that was simulated: then no other is estimated better.
fn simulate_best(
    request: &SearchRequest,
    fitting: &mut Vec<Candidate>,
) -> Result<Option<StepTime>, PlanError> {
    let mut simulated: Vec<(Parallelism, bool, StepTime)> = Vec::new();
    while let Some(candidate) = fitting.first().cloned() {
        let at = candidate.at;
        let same =
            |known: &&(Parallelism, bool, StepTime)| (known.0, known.1) == (at, candidate.fp8);
        if let Some((_, _, step)) = simulated.iter().find(same) {
            return Ok(Some(step.clone()));
        }
        if simulated.len() == SIMULATED || at.pp * at.vpp * at.micro_batches > PASSES_MAX {
            return Ok(None);
        }
        let rules = request.step_rules(candidate.fp8);
        let (gpu, fabric) = (&request.gpu, &request.fabric);
        let step = step_time(&request.shape, &at, gpu, fabric, &rules, request.seq)?;
        fitting.remove(0);
        let place = fitting.partition_point(|other| other.seconds < step.seconds);
        fitting.insert(place, Candidate { seconds: step.seconds, ..candidate.clone() });
        simulated.push((at, candidate.fp8, step));
    }
    Ok(None)
}

/// Candidates that no other is better than in time, memory and GPUs; `fitting` is sorted by time.
fn front(fitting: &[Candidate]) -> Vec<Candidate> {
    let mut front: Vec<Candidate> = Vec::new();
    for candidate in fitting {
        let is_beaten = front.iter().any(|other| {
            other.memory_bytes <= candidate.memory_bytes && other.at.gpus() <= candidate.at.gpus()
        });
        if !is_beaten {
            front.push(candidate.clone());
        }
    }
    front
}

#[cfg(test)]
mod tests;
