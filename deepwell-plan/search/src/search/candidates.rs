//! The candidates of a search, sorted by time. Programs are lowered only for a candidate about to
//! be taken: a search has thousands of candidates, and takes a few.

use std::collections::{HashMap, HashSet};

use super::programs::PROGRAMS_TOO_LARGE;
use super::{
    ByTrainer, Candidate, Dropped, PASSES_MAX, Progress, SearchAids, SearchRequest, drop_one,
};
use crate::step_time::{StepTime, step_time};
use crate::{ActivationRecompute, Strategy};
use deepwell_lower::PlanError;

/// Most simulations, first of pipelines near the best estimate and then of the best candidates.
const SIMULATED: usize = 24;
/// Largest ratio of estimate and simulation: they agree within a few percent.
const NEAR: f64 = 1.03;
/// Largest number of passes of a pipeline simulated for being near the best.
const PASSES_NEAR: usize = 20_000;

/// Candidates sorted by time.
pub(super) struct Candidates<'a> {
    request: &'a SearchRequest,
    sorted: Vec<Candidate>,
    aids: &'a SearchAids<'a>,
    /// Number of plans whose programs were lowered.
    asked: usize,
    /// Plans whose programs fit.
    checked: HashSet<Strategy>,
    /// Recomputation and micro-batch of plans that do not fit, by the plan's other dimensions.
    full: HashMap<Strategy, Vec<(ActivationRecompute, usize)>>,
    /// Strategies that cannot be lowered with any recomputation and micro-batch.
    not_lowered: HashSet<Strategy>,
    dropped: Vec<Dropped>,
}

/// Reason for dropping a plan without programs.
const NOT_LOWERED: &str = "its programs cannot be lowered";

impl<'a> Candidates<'a> {
    pub(super) fn new(
        request: &'a SearchRequest,
        sorted: Vec<Candidate>,
        aids: &'a SearchAids<'a>,
    ) -> Candidates<'a> {
        let (checked, full, not_lowered, dropped) = Default::default();
        Candidates { request, sorted, aids, asked: 0, checked, full, not_lowered, dropped }
    }

    pub(super) fn all(&self) -> &[Candidate] {
        &self.sorted
    }

    /// Takes the dropped plans whose programs do not fit or cannot be lowered.
    pub(super) fn too_large(&mut self) -> Vec<Dropped> {
        std::mem::take(&mut self.dropped)
    }

    /// The first wanted candidate that fits. The request may prefer plans supported by the trainer.
    pub(super) fn first(&mut self, wanted: impl Fn(&Candidate) -> bool) -> Option<Candidate> {
        let index = self.index_of_best(wanted)?;
        Some(self.sorted[index].clone())
    }

    /// The first candidate before `taken` that the trainer does not support.
    pub(super) fn faster_than(&self, taken: &Candidate) -> Option<Candidate> {
        let before = self.sorted.iter().take_while(|other| other.at != taken.at);
        let is_run = |candidate: &Candidate| candidate.at.parallel().is_ok();
        before.filter(|other| !is_run(other)).find(|_| is_run(taken)).cloned()
    }

    fn index_of_best(&mut self, wanted: impl Fn(&Candidate) -> bool) -> Option<usize> {
        let by_trainer = |candidate: &Candidate| candidate.at.parallel().is_ok();
        match self.request.by_trainer {
            ByTrainer::Whatever => self.index_of_first(wanted),
            ByTrainer::Only => self.index_of_first(|it| by_trainer(it) && wanted(it)),
            ByTrainer::First => self
                .index_of_first(|it| by_trainer(it) && wanted(it))
                .or_else(|| self.index_of_first(wanted)),
        }
    }

    fn index_of_first(&mut self, wanted: impl Fn(&Candidate) -> bool) -> Option<usize> {
        let mut removed = HashSet::new();
        let mut found = None;
        for index in 0..self.sorted.len() {
            if !wanted(&self.sorted[index]) {
                continue;
            }
            if self.fits(index) {
                found = Some(index);
                break;
            }
            removed.insert(index);
        }
        let before = found.map(|found| removed.iter().filter(|&&index| index < found).count());
        let mut index = 0;
        self.sorted.retain(|_| {
            index += 1;
            !removed.contains(&(index - 1))
        });
        Some(found? - before?)
    }

    /// Whether a candidate fits, by its programs if supported by the trainer. Sets the candidate's
    /// memory to the programs' memory.
    fn fits(&mut self, index: usize) -> bool {
        let at = self.sorted[index].at;
        let programs = self.aids.programs.filter(|_| at.parallel().is_ok());
        let Some(programs) = programs.filter(|_| !self.checked.contains(&at)) else { return true };
        let family = Strategy {
            recompute: ActivationRecompute::Full,
            micro_batch: 1,
            micro_batches: at.micro_batch * at.micro_batches,
            ..at
        };
        // Less recomputation or a larger micro-batch only adds memory.
        let is_fuller = |other: &(ActivationRecompute, usize)| {
            at.recompute <= other.0 && at.micro_batch >= other.1
        };
        let is_full = self.full.get(&family).is_some_and(|full| full.iter().any(is_fuller));
        let limit_bytes = self.request.memory_limit_bytes();
        let (reason, why) = if self.not_lowered.contains(&family) {
            (NOT_LOWERED, None)
        } else if is_full || programs.at_least(self.request, &at) > limit_bytes {
            (PROGRAMS_TOO_LARGE, None)
        } else {
            self.asked += 1;
            if let Some(progress) = self.aids.progress {
                progress(Progress::Programs(self.asked));
            }
            match programs.needed(self.request, &at) {
                Ok(needed) => {
                    let peak = needed.iter().map(|stage| stage.peak()).max().unwrap_or(0);
                    self.sorted[index].memory_bytes = peak as f64;
                    self.checked.insert(at);
                    return true;
                }
                Err(why) if why == PROGRAMS_TOO_LARGE => (PROGRAMS_TOO_LARGE, None),
                Err(why) => (NOT_LOWERED, Some(why)),
            }
        };
        if reason == PROGRAMS_TOO_LARGE && !is_full {
            self.full.entry(family).or_default().push((at.recompute, at.micro_batch));
        }
        if reason == NOT_LOWERED {
            self.not_lowered.insert(family);
        }
        drop_one(&mut self.dropped, reason, at, why);
        false
    }

    /// Simulates the best candidate until it is already simulated: then no candidate has a better
    /// estimate.
    ///
    /// A simulation may be faster than its estimate, so a few candidates near the best are
    /// simulated first.
    pub(super) fn simulate_best(&mut self) -> Result<Option<StepTime>, PlanError> {
        let mut simulated: Vec<(Strategy, StepTime)> = Vec::new();
        let passes = |at: &Strategy| at.pp * at.vpp * at.micro_batches;
        let first = self.sorted.first().map_or(0.0, |first| first.seconds);
        let is_near = |other: &&Candidate| {
            other.seconds <= NEAR * first && other.at.pp > 1 && passes(&other.at) <= PASSES_NEAR
        };
        let near: Vec<Strategy> =
            self.sorted.iter().filter(is_near).take(SIMULATED).map(|other| other.at).collect();
        for at in near {
            let index = self.sorted.iter().position(|other| other.at == at);
            let Some(index) = index else { continue };
            simulated.push((at, self.simulate(index)?));
        }
        let most = simulated.len() + SIMULATED;
        while let Some(index) = self.index_of_best(|_| true) {
            let at = self.sorted[index].at;
            if let Some((_, step)) = simulated.iter().find(|known| known.0 == at) {
                return Ok(Some(step.clone()));
            }
            if simulated.len() == most || passes(&at) > PASSES_MAX {
                return Ok(None);
            }
            simulated.push((at, self.simulate(index)?));
        }
        Ok(None)
    }

    /// Simulates a candidate and re-sorts it by the simulated time.
    fn simulate(&mut self, index: usize) -> Result<StepTime, PlanError> {
        let (rules, (gpu, fabric)) = (self.request.step_rules(), self.request.machines.parts());
        let candidate = self.sorted.remove(index);
        let step =
            step_time(&self.request.shape, &candidate.at, gpu, fabric, &rules, self.request.seq)?;
        let place = self.sorted.partition_point(|other| other.seconds < step.seconds);
        let (seconds, bubble) = (step.seconds, step.bubble);
        self.sorted.insert(place, Candidate { seconds, bubble, ..candidate });
        Ok(step)
    }
}
