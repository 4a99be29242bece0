//! Where each pair of token and expert goes in a buffer that is sorted by expert.
//!
//! # Grouped rows
//!
//! Token `t` and its `k`-th expert are pair `t · K + k`. A matrix of grouped rows is `[R, C]`, one
//! row for each pair, sorted by expert. `R` is fixed by the sizes and does not depend on the
//! routing: it is the smaller of the rows for all pairs ([`GroupedRows::rows`]) and the rows of
//! groups that are all full ([`GroupedRows::rows_within`]). On the device, so that the host waits
//! for nothing, lie
//!
//! | name | type | holds |
//! |---|---|---|
//! | `offsets` | i32 `[E + 1]` | group `e` has the rows `offsets[e]..offsets[e + 1]` |
//! | `load` | i32 `[2, E]` | pairs that chose each expert; those of them that have a row |
//! | `rows` | i32 `[T, K]` | the row of each pair, -1 for one that was dropped |
//! | `pairs` | i32 `[R]` | the pair of each row, -1 for a row without one |
//!
//! - `offsets[0]` is 0, and every offset is a multiple of `align`: a block of 32 rows never crosses
//!   groups, so a columnwise quantization of the whole matrix starts anew with each group. A group
//!   without pairs has no rows.
//! - The first `load[1][e]` rows of a group have its pairs, in ascending order; fewer than `align`
//!   rows follow that have none, to the end of the group.
//! - Rows without a pair are zero, those from `offsets[E]` to `R` too. Every op that writes grouped
//!   rows writes these zeros, so no quantization counts, and no op reads, what nobody wrote.

use serde::{Deserialize, Serialize};

use super::capacity::{capacity, check_factor};
use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// How many groups there are, and of which multiple of rows each takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupedRows {
    /// Groups: the experts of a layer, `E`.
    pub groups: usize,
    /// Each group has a multiple of so many rows: of as many as share a scale along them.
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

    /// Most rows that alignment adds, a multiple of it.
    pub const fn padding_max(&self) -> usize {
        (self.groups * self.align.saturating_sub(1)).next_multiple_of(self.align)
    }

    /// Rows of a buffer that holds so many pairs, however they are spread; `None` for a number of
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
    /// itself is left out: it comes from the same capacity, and full groups are the tighter bound.
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

    /// The most pairs in a buffer, rounded up to `align`: the rows without padding. Full groups of
    /// a capacity have next to no padding.
    pub const fn pairs_of(&self, rows: usize) -> usize {
        if self.limited { rows } else { rows.saturating_sub(self.padding_max()) }
    }

    pub(super) fn describe(&self) -> String {
        let limited = if self.limited { " limited" } else { "" };
        format!("groups={} align={}{limited}", self.groups, self.align)
    }

    /// Wants a number of groups and an alignment that are not zero.
    pub(super) fn check(&self, check: &Check<'_>) -> Result<(), OpError> {
        if self.groups == 0 || self.align == 0 {
            return Err(check.error("at least 1 group of a multiple of 1 row", self.describe()));
        }
        Ok(())
    }

    /// Wants input `index` to be `offsets`.
    pub(super) fn check_offsets(&self, check: &Check<'_>, index: usize) -> Result<(), OpError> {
        self.check(check)?;
        check.dtype(index, DType::I32)?;
        check.shape(index, &Shape::new([self.groups + 1]))
    }
}

/// Which of the pairs have a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowsOf {
    /// All pairs; each expert is a group.
    #[default]
    All,
    /// Tokens are rows that ranks sent ([`super::DispatchToRanks`]): a row has one expert of this
    /// rank at most, and the others of its `K` are -1, pairs without a row. `R` is of `T` pairs.
    Sent {
        /// Most rows that all ranks together send for one expert.
        of_expert: Dim,
    },
    /// Tokens are those of all ranks of a group, of which this one has the experts from `first` on,
    /// a group each; pairs of other experts have no row. The experts of a token differ, so that `R`
    /// is of `T · min(K, groups)` pairs, however tokens choose.
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
/// `[R]`, as the module's documentation has them. With [`RowsOf::Here`] `load` is of all experts of
/// the layer; pairs of those elsewhere have no row.
///
/// Pairs are sorted stably. With a capacity factor an expert takes
/// `ceil(factor · T · K / E)` pairs at most, in ascending order; the gates of what is left are not
/// renormalized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dispatch {
    /// Groups and their alignment.
    pub grouped: GroupedRows,
    /// Limits the pairs of an expert to so many times its even share; none drops nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Which pairs have a row.
    #[serde(default, skip_serializing_if = "RowsOf::is_all")]
    pub rows_of: RowsOf,
}

impl Dispatch {
    /// Experts that tokens choose from, which `load` is of.
    pub const fn experts(&self) -> usize {
        match self.rows_of {
            RowsOf::Here { experts, .. } => experts,
            RowsOf::All | RowsOf::Sent { .. } => self.grouped.groups,
        }
    }

    /// The experts whose pairs have rows, a group each.
    pub const fn here(&self) -> std::ops::Range<usize> {
        match self.rows_of {
            RowsOf::Here { first, .. } => first..first + self.grouped.groups,
            RowsOf::All | RowsOf::Sent { .. } => 0..self.grouped.groups,
        }
    }

    /// Rows of the buffer for so many tokens with `top_k` experts each; `None` for tokens that are
    /// counted in blocks.
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

    /// A comparison and an addition for each pair.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0])
    }

    /// Neither a choice nor a place has a gradient.
    fn backward(&self, _node: &Node, _context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Ok(())
    }
}
