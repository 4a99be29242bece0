//! Destination of each (token, expert) pair in a buffer sorted by expert.
//!
//! # Grouped rows
//!
//! Token `t` and its `k`-th expert are pair `t · K + k`. A matrix of grouped rows is `[R, C]`, one
//! row per pair, sorted by expert. `R` is fixed by the sizes and does not depend on the routing: it
//! is the minimum of the rows for all pairs ([`GroupedRows::rows`]) and the rows of full groups
//! ([`GroupedRows::rows_within`]). The following tensors stay on the device, so that the host never
//! waits:
//!
//! | name | type | holds |
//! |---|---|---|
//! | `offsets` | i32 `[E + 1]` | group `e` has the rows `offsets[e]..offsets[e + 1]` |
//! | `load` | i32 `[2, E]` | pairs that chose each expert; number of these pairs with a row |
//! | `rows` | i32 `[T, K]` | the row of each pair, -1 for a dropped pair |
//! | `pairs` | i32 `[R]` | the pair of each row, -1 for a row without a pair |
//!
//! - `offsets[0]` is 0, and every offset is a multiple of `align`: a block of 32 rows never crosses
//!   groups, so a columnwise quantization of the whole matrix starts new blocks with each group. A
//!   group without pairs has no rows.
//! - The first `load[1][e]` rows of a group hold its pairs, in ascending order. Fewer than `align`
//!   rows without a pair follow, up to the end of the group.
//! - Rows without a pair are zero, including rows from `offsets[E]` to `R`. Every op that writes
//!   grouped rows writes these zeros, so no op reads uninitialized rows and no quantization counts
//!   them.

use serde::{Deserialize, Serialize};

use super::capacity::{capacity, check_factor};
use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// Number of groups and row alignment of each group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupedRows {
    /// Groups: the experts of a layer, `E`.
    pub groups: usize,
    /// Row alignment: every group has a multiple of `align` rows, the number of consecutive rows
    /// that share a scale.
    pub align: usize,
    /// Whether the capacity of the groups, rather than the number of pairs, sizes a buffer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
}

impl GroupedRows {
    /// Groups without a capacity.
    pub const fn new(groups: usize, align: usize) -> GroupedRows {
        GroupedRows { groups, align, limited: false }
    }

    /// Upper bound of the padding rows that alignment adds, a multiple of `align`.
    pub const fn padding_max(&self) -> usize {
        (self.groups * self.align.saturating_sub(1)).next_multiple_of(self.align)
    }

    /// Rows of a buffer for `pairs` pairs, for any distribution over groups. `None` for a number of
    /// pairs that is counted in blocks.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim, ops::GroupedRows};
    ///
    /// // Two experts for each of 99 tokens, in 8 groups of whole 32 rows.
    /// let rows = GroupedRows::new(8, 32).rows(Dim::TOKENS.times(2)).unwrap();
    /// assert_eq!(rows.bind(&Binding { batch: 3, seq: 33 }), 224 + 248_usize.next_multiple_of(32));
    /// ```
    pub fn rows(&self, pairs: Dim) -> Option<Dim> {
        Some(pairs.plus(self.padding_max())?.round_up_to(self.align))
    }

    /// [`GroupedRows::rows`] of groups with at most `of_group` pairs each. A limit of `pairs`
    /// itself is dropped: it comes from the same capacity, and full groups are the tighter bound.
    ///
    /// ```
    /// use deepwell_ir::{Binding, Dim, ops::GroupedRows};
    ///
    /// // As above, with a quarter of the tokens for an expert at most: 25, in whole 32.
    /// let grouped = GroupedRows::new(8, 32);
    /// let rows = grouped.rows_within(Dim::TOKENS.times(2), Dim::TOKENS.share(1, 4)).unwrap();
    /// assert_eq!(rows.bind(&Binding { batch: 3, seq: 33 }), 8 * 32);
    /// ```
    pub fn rows_within(&self, pairs: Dim, of_group: Dim) -> Option<Dim> {
        let all_full = of_group.round_up_to(self.align).times(self.groups);
        Some(self.rows(pairs.without_limit())?.at_most(all_full))
    }

    /// Upper bound of the pairs in a buffer, rounded up to `align`: the rows without padding. Full
    /// groups of a capacity have almost no padding.
    pub const fn pairs_of(&self, rows: usize) -> usize {
        if self.limited { rows } else { rows.saturating_sub(self.padding_max()) }
    }

    pub(super) fn describe(&self) -> String {
        let limited = if self.limited { " limited" } else { "" };
        format!("groups={} align={}{limited}", self.groups, self.align)
    }

    /// Checks that the number of groups and the alignment are not zero.
    pub(super) fn check(&self, check: &Check<'_>) -> Result<(), OpError> {
        if self.groups == 0 || self.align == 0 {
            return Err(check.error("at least 1 group of a multiple of 1 row", self.describe()));
        }
        Ok(())
    }

    /// Checks that input `index` is `offsets`.
    pub(super) fn check_offsets(&self, check: &Check<'_>, index: usize) -> Result<(), OpError> {
        self.check(check)?;
        check.dtype(index, DType::I32)?;
        check.shape(index, &Shape::new([self.groups + 1]))
    }
}

/// Pairs that have a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowsOf {
    /// All pairs; each expert is a group.
    #[default]
    All,
    /// Tokens are rows received from all ranks ([`super::DispatchToRanks`]): a row has at most one
    /// expert of this rank; its other `K` entries are -1, pairs without a row. `R` covers `T`
    /// pairs.
    Sent {
        /// Maximum number of rows that all ranks together send for one expert.
        of_expert: Dim,
    },
    /// Tokens are from all ranks of a group; this rank has the experts from `first` on, one group
    /// each, and pairs of other experts have no row. The experts of a token are distinct, so `R`
    /// covers `T · min(K, groups)` pairs for any routing.
    Here {
        /// The first expert of this rank.
        first: usize,
        /// Experts of the layer, on all ranks together.
        experts: usize,
    },
}

impl RowsOf {
    fn is_all(&self) -> bool {
        *self == RowsOf::All
    }
}

/// experts i32 `[T, K]` → offsets i32 `[E + 1]`, load i32 `[2, E]`, rows i32 `[T, K]`, pairs i32
/// `[R]`, as defined in the module documentation. With [`RowsOf::Here`], `load` covers all experts
/// of the layer, and pairs of experts on other ranks have no row.
///
/// The sort is stable. With a capacity factor, an expert accepts at most `ceil(factor · T · K / E)`
/// pairs, in ascending order. The gates of the remaining pairs are not renormalized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dispatch {
    /// Groups and their alignment.
    pub grouped: GroupedRows,
    /// Limits the pairs of an expert to a multiple of an even share; `None` drops no pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Pairs that have a row.
    #[serde(default, skip_serializing_if = "RowsOf::is_all")]
    pub rows_of: RowsOf,
}

impl Dispatch {
    /// Number of experts that tokens choose from, the length of `load`.
    pub const fn experts(&self) -> usize {
        match self.rows_of {
            RowsOf::Here { experts, .. } => experts,
            RowsOf::All | RowsOf::Sent { .. } => self.grouped.groups,
        }
    }

    /// Range of the experts with rows in this buffer; each expert is a group.
    pub const fn here(&self) -> std::ops::Range<usize> {
        match self.rows_of {
            RowsOf::Here { first, .. } => first..first + self.grouped.groups,
            RowsOf::All | RowsOf::Sent { .. } => 0..self.grouped.groups,
        }
    }

    /// Rows of the buffer for `tokens` with `top_k` experts each; `None` for a number of tokens
    /// that is counted in blocks.
    pub fn buffer_rows(&self, tokens: Dim, top_k: usize) -> Option<Dim> {
        let grouped = &self.grouped;
        match (self.rows_of, self.capacity_factor) {
            (RowsOf::All, Some(factor)) => {
                let of_expert = capacity(factor, self.experts(), tokens, top_k);
                grouped.rows_within(tokens.times(top_k), of_expert)
            }
            (RowsOf::All, None) => grouped.rows(tokens.times(top_k)),
            (RowsOf::Sent { of_expert }, _) => grouped.rows_within(tokens, of_expert),
            (RowsOf::Here { .. }, _) => grouped.rows(tokens.times(top_k.min(grouped.groups))),
        }
    }
}

impl OpRule for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn attributes(&self) -> String {
        let mut grouped = self.grouped.describe();
        match self.rows_of {
            RowsOf::All => {}
            RowsOf::Sent { of_expert } => grouped.push_str(&format!(" sent={of_expert}")),
            RowsOf::Here { first, experts } => {
                grouped.push_str(&format!(" first={first} experts={experts}"));
            }
        }
        match self.capacity_factor {
            Some(factor) => format!("{grouped} capacity_factor={factor}"),
            None => grouped,
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["experts"])?;
        check.dtype(0, DType::I32)?;
        self.grouped.check(&check)?;
        let experts = check.rank(0, 2)?;
        let top_k = check.fixed(0, 1)?;
        check_factor(&check, self.capacity_factor)?;
        if let RowsOf::Here { first, experts } = self.rows_of {
            if first.checked_add(self.grouped.groups).is_none_or(|end| end > experts) {
                let expected = format!("experts of a rank among the layer's {experts}");
                let got = format!("{} from {first} on", self.grouped.groups);
                return Err(check.error(expected, got));
            }
            if let Some(factor) = self.capacity_factor {
                let expected = "no capacity factor where tokens of all ranks are sorted";
                return Err(check.error(expected, factor.to_string()));
            }
        }
        let rows = self.buffer_rows(experts[0], top_k);
        let rows = rows.ok_or_else(|| check.error("tokens one by one", experts[0].to_string()))?;
        let i32s = |suffix, shape| OutputType::statistic(suffix, shape, DType::I32);
        let groups = self.grouped.groups;
        Ok(vec![
            i32s("offsets", Shape::new([groups + 1])),
            i32s("load", Shape::new([2, self.experts()])),
            i32s("rows", inputs[0].shape.clone()),
            i32s("pairs", Shape(vec![rows])),
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
