//! Over how many ranks one model trains, and what each of them has of it.

use std::fmt;

use deepwell_ir::{ProcessGroup, Ranks};
use serde::{Deserialize, Serialize};

use crate::PlanError;

/// The degrees of parallelism of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parallel {
    /// Ranks that split the sequences of a step and sum up their gradients.
    pub data: usize,
    /// ZeRO stage: what the data-parallel ranks have a part of each. 0 nothing, 1 the optimizer
    /// state.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zero: u8,
}

fn is_zero(stage: &u8) -> bool {
    *stage == 0
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel { data: 1, zero: 0 }
    }
}

impl Parallel {
    /// Data parallel over so many ranks.
    pub const fn data(ranks: usize) -> Parallel {
        Parallel { data: ranks, zero: 0 }
    }

    /// Whether one rank does it all.
    pub fn is_single(&self) -> bool {
        self.world_size() == 1
    }

    /// Ranks of the world.
    pub const fn world_size(&self) -> usize {
        self.data
    }

    /// One rank of the world with its groups; programs for a world of one have none.
    pub fn ranks(&self, rank: usize) -> Ranks {
        if self.is_single() {
            return Ranks::default();
        }
        let all = (0..self.data as u32).collect();
        let data = ProcessGroup { name: ProcessGroup::DATA.to_string(), ranks: all };
        let world_size = self.world_size() as u32;
        Ranks { rank: rank as u32, world_size, groups: vec![data] }
    }

    /// Which part of the sequences of a step a rank has, counted from 0: those of a part lie one
    /// behind the other.
    pub const fn data_place(&self, rank: usize) -> usize {
        rank
    }

    /// Sequences of a step that one rank has.
    ///
    /// # Errors
    /// A batch that cannot be split evenly.
    pub fn rows_of_rank(&self, global_batch: usize) -> Result<usize, PlanError> {
        if self.data > 0 && global_batch.is_multiple_of(self.data) {
            return Ok(global_batch / self.data);
        }
        Err(PlanError::Request {
            what: "batch size",
            expected: format!("a multiple of the {} ranks that split it", self.data),
            got: global_batch.to_string(),
        })
    }
}

impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data {}", self.data)?;
        match self.zero {
            0 => Ok(()),
            stage => write!(f, ", ZeRO {stage}"),
        }
    }
}
