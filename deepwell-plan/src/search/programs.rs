//! What a search asks of the programs of plans within the trainer's rules.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::memory::stage_memory_estimate;
use crate::{ProgramBytes, ProgramMemory, Strategy};

use super::SearchRequest;

/// Programs of a model, by strategy. Those of few layers are lowered and extended
/// ([`ProgramMemory`]); what whole programs came to can be said in return ([`Programs::refuse`]).
pub struct Programs<'a> {
    memory: ProgramMemory<'a>,
    /// By strategy and limit of memory.
    known: RefCell<HashMap<(Strategy, u64), Known>>,
    refused: RefCell<Vec<(Strategy, String)>>,
}

type Known = Result<Option<Vec<ProgramBytes>>, String>;

/// Share of what is counted in one go that programs have at least: on one stream they keep less,
/// and not all of what they keep grows with the micro-batch.
const AT_LEAST: f64 = 0.95;

/// Why programs do not fit.
pub const PROGRAMS_TOO_LARGE: &str = "its programs need more memory than a GPU has";

impl<'a> Programs<'a> {
    /// Those that `memory` lowers.
    pub fn new(memory: ProgramMemory<'a>) -> Programs<'a> {
        let (known, refused) = Default::default();
        Programs { memory, known, refused }
    }

    /// What each stage of a plan needs, or why the trainer does not run it.
    ///
    /// # Errors
    /// The reason, in words.
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

    /// Whole programs of a plan did not do: another one has to.
    pub fn refuse(&self, at: Strategy, why: String) {
        self.refused.borrow_mut().push((at, why));
    }

    /// Bytes that the fullest of a plan's programs has at least.
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
