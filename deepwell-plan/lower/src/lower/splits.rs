//! Slices of parameters on a tensor-parallel rank.

use std::collections::HashMap;

use deepwell_ir::{GroupId, ProcessGroup, RankSlices, Split, Target, ValueId};

/// This rank's slice of each split parameter, by the parameter's name.
pub(super) type Splits = HashMap<String, Split>;

/// This rank's slices for the precision pass; `None` if parameters are whole.
pub(super) fn slices<'a>(splits: &'a Splits, target: &Target) -> Option<RankSlices<'a>> {
    target.ranks.member_of(ProcessGroup::TENSOR).map(|rank| RankSlices { rank, splits })
}

/// Gradients whose squares are summed, and the groups whose ranks hold different gradients.
pub(super) struct NormTerms {
    /// One list for each chunk of this rank's layers; slices of buckets may share a list.
    pub(super) gradients: Vec<Vec<ValueId>>,
    pub(super) groups: Vec<(GroupId, u32)>,
}
