//! Destination of each (token, expert) pair in a buffer that is split among the ranks of an
//! expert-parallel group.
//!
//! # Rows for ranks
//!
//! Each of `n` ranks has `E/n` consecutive experts. A send buffer is `[n·C, ..]`: slab `p`, the
//! rows `p·C..(p+1)·C`, goes to the rank at place `p`. `C` is the largest number of pairs that one
//! rank can send to another: `T · min(K, E/n)`, or `E/n` times the capacity of an expert if a
//! capacity factor makes this smaller. No size depends on the routing.
//!
//! A slab begins with its pairs, sorted by expert and then by pair; the other rows are empty.
//! `wanted` is sent along and names the expert of each row. A receiver that sorts its rows by
//! expert ([`RowsOf::Sent`](super::RowsOf)) therefore has each expert's rows ordered by rank and,
//! within a rank, by pair: the same order as on a single rank with all tokens.

use serde::{Deserialize, Serialize};

use super::capacity::{capacity, check_factor};
use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// experts i32 `[T, K]` → rows i32 `[T, K]`, load i32 `[2, E]`, pairs i32 `[n·C]`, wanted i32
/// `[n·C, K]`.
///
/// `rows`, `load` and `pairs` are as in [`Dispatch`](super::Dispatch), for the rows of this module.
/// `wanted[r][k]` is the expert of row `r`, counted from the first expert of the destination rank,
/// if row `r` holds the `k`-th pair of a token, and -1 otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DispatchToRanks {
    /// Experts of the layer, on all ranks together.
    pub experts: usize,
    /// Number of ranks that split the experts.
    pub ranks: usize,
    /// As in [`Dispatch`](super::Dispatch), for the tokens of this rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
}

impl DispatchToRanks {
    /// Number of experts per rank.
    pub const fn experts_of_rank(&self) -> usize {
        self.experts / self.ranks
    }

    /// Rows of the send buffer for all ranks, for `tokens` with `top_k` experts each.
    pub fn rows(&self, tokens: Dim, top_k: usize) -> Dim {
        let rows = tokens.times(self.ranks * top_k.min(self.experts_of_rank()));
        match self.capacity_factor {
            None => rows,
            Some(_) => rows.at_most(self.capacity(tokens, top_k).times(self.experts)),
        }
    }

    /// Maximum number of rows for one expert.
    pub fn capacity(&self, tokens: Dim, top_k: usize) -> Dim {
        self.capacity_factor.map_or(tokens, |factor| capacity(factor, self.experts, tokens, top_k))
    }
}

impl OpRule for DispatchToRanks {
    fn name(&self) -> &'static str {
        "dispatch_to_ranks"
    }

    fn attributes(&self) -> String {
        let DispatchToRanks { experts, ranks, capacity_factor } = self;
        let text = format!("experts={experts} ranks={ranks}");
        match capacity_factor {
            Some(factor) => format!("{text} capacity_factor={factor}"),
            None => text,
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["experts"])?;
        check.dtype(0, DType::I32)?;
        let tokens = check.rank(0, 2)?[0];
        let top_k = check.fixed(0, 1)?;
        if self.ranks == 0 || self.experts == 0 || !self.experts.is_multiple_of(self.ranks) {
            let expected = "at least 1 expert for each rank, and as many for all";
            return Err(check.error(expected, self.attributes()));
        }
        check_factor(&check, self.capacity_factor)?;
        let rows = self.rows(tokens, top_k);
        let i32s = |suffix, shape| OutputType::statistic(suffix, shape, DType::I32);
        Ok(vec![
            i32s("rows", inputs[0].shape.clone()),
            i32s("load", Shape::new([2, self.experts])),
            i32s("pairs", Shape(vec![rows])),
            i32s("wanted", Shape(vec![rows, Dim::fixed(top_k)])),
        ])
    }

    fn result_count(&self) -> usize {
        4
    }

    /// One comparison and one addition per pair.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0])
    }

    /// Routing indices have no gradient.
    fn backward(&self, _node: &Node, _context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Ok(())
    }
}
