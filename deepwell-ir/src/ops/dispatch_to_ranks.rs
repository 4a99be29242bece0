//! Where each pair of token and expert goes in a buffer that is cut among the ranks of an
//! expert-parallel group.
//!
//! # Rows for ranks
//!
//! Of `n` ranks each has `E/n` experts, in their order. A buffer for all of them is `[n·C, ..]`:
//! slab `p`, the rows `p·C..(p+1)·C`, goes to the rank at place `p`. `C` is the largest number of
//! pairs that a rank can keep for another: `T · min(K, E/n)`, or `E/n` times the capacity of an
//! expert if a capacity factor makes this smaller. No size depends on the routing.
//!
//! A slab begins with its pairs, sorted by expert and then by pair; the rest of it has none. What
//! is sent along says of each row which expert it is for, so that a receiver who sorts what came
//! by expert ([`RowsOf::Sent`](super::RowsOf)) has each expert's rows in the order
//! of the ranks and, within a rank, of the pairs: the order of one rank that has all the tokens.

use serde::{Deserialize, Serialize};

use super::capacity::{capacity, check_factor};
use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// experts i32 `[T, K]` → rows i32 `[T, K]`, load i32 `[2, E]`, pairs i32 `[n·C]`, wanted i32
/// `[n·C, K]`.
///
/// `rows`, `load` and `pairs` are as [`Dispatch`](super::Dispatch) has them, for the rows of this
/// module. `wanted[r][k]` is the expert of row `r`, counted from the first of its rank, where row
/// `r` has the `k`-th pair of a token, and -1 elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DispatchToRanks {
    /// Experts of the layer, on all ranks together.
    pub experts: usize,
    /// Ranks that have some of them each.
    pub ranks: usize,
    /// As of [`Dispatch`](super::Dispatch), for the tokens of this rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
}

impl DispatchToRanks {
    /// Experts of a rank.
    pub const fn experts_of_rank(&self) -> usize {
        self.experts / self.ranks
    }

    /// Rows of the buffer for all ranks, of so many tokens with `top_k` experts each.
    pub fn rows(&self, tokens: Dim, top_k: usize) -> Dim {
        let rows = tokens.times(self.ranks * top_k.min(self.experts_of_rank()));
        match self.capacity_factor {
            None => rows,
            Some(_) => rows.at_most(self.capacity(tokens, top_k).times(self.experts)),
        }
    }

    /// Most rows for one expert.
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

    /// A comparison and an addition for each pair.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0])
    }

    /// Neither a choice nor a place has a gradient.
    fn backward(&self, _node: &Node, _context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Ok(())
    }
}
