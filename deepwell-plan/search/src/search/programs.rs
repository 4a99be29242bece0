//! Memory of the lowered programs of plans within the trainer's rules.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::memory::stage_memory_estimate;
use crate::{ProgramBytes, ProgramMemory, Strategy};

use super::SearchRequest;

/// Programs of a model, by strategy. Programs of a few layers are lowered and extrapolated
/// ([`ProgramMemory`]); a plan whose whole programs fail can be excluded by [`Programs::refuse`].
pub struct Programs<'a> {
    memory: ProgramMemory<'a>,
    /// By strategy and memory limit.
    known: RefCell<HashMap<(Strategy, u64), Known>>,
    refused: RefCell<Vec<(Strategy, String)>>,
}

type Known = Result<Option<Vec<ProgramBytes>>, String>;

/// Lower bound of a program's memory relative to the count for several streams: one stream keeps
/// less, and not every kept buffer grows with the micro-batch.
const AT_LEAST: f64 = 0.95;

/// Reason for dropping a plan whose programs do not fit.
pub const PROGRAMS_TOO_LARGE: &str = "its programs need more memory than a GPU has";

impl<'a> Programs<'a> {
    /// Creates a cache over `memory`.
    pub fn new(memory: ProgramMemory<'a>) -> Programs<'a> {
        let (known, refused) = Default::default();
        Programs { memory, known, refused }
    }

    /// The bytes of each stage of a plan, or why the trainer does not run the plan.
    ///
    /// # Errors
    /// The reason as text.
    pub fn needed(
        &self,
        request: &SearchRequest,
        at: &Strategy,
    ) -> Result<Vec<ProgramBytes>, String> {
        let refused = self.refused.borrow();
        if let Some((_, why)) = refused.iter().find(|(other, _)| other == at) {
            return Err(why.clone());
        }
        let limit_bytes = request.memory_limit_bytes() as u64;
        let known = self.known.borrow().get(&(*at, limit_bytes)).cloned();
        let needed = known.unwrap_or_else(|| {
            let needed = self.memory.of_strategy(&request.shape, at, limit_bytes);
            let needed = needed.map_err(|error| error.to_string());
            self.known.borrow_mut().insert((*at, limit_bytes), needed.clone());
            needed
        });
        needed?.ok_or_else(|| PROGRAMS_TOO_LARGE.to_string())
    }

    /// Excludes a plan whose whole programs failed, so that another plan is taken.
    pub fn refuse(&self, at: Strategy, why: String) {
        self.refused.borrow_mut().push((at, why));
    }

    /// Lower bound of the bytes of the plan's fullest program.
    pub(super) fn at_least(&self, request: &SearchRequest, at: &Strategy) -> f64 {
        let rules = request.memory_rules();
        let stage = stage_memory_estimate(&request.shape, at, &rules, request.seq, 0);
        let states = stage.parameters + stage.gradients + stage.optimizer;
        if AT_LEAST * states > request.memory_limit_bytes() {
            return states;
        }
        let within_step = self.memory.within_step(&request.shape, at);
        AT_LEAST * (states + within_step.unwrap_or(0.0))
    }
}
