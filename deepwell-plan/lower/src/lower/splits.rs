//! Slices of parameters on a tensor-parallel rank.

use std::collections::HashMap;

use deepwell_ir::{GroupId, ProcessGroup, RankSlices, Split, Target, TensorRank, ValueId};

/// The rank of a target in its tensor-parallel group, if it has one.
pub(super) fn rank_of(target: &Target) -> Option<TensorRank> {
    let (group, members) = target.ranks.named(ProcessGroup::TENSOR)?;
    let place = members.position_of(target.ranks.rank)?;
    Some(TensorRank { group, place, ranks: members.ranks.len() })
}

/// This rank's slice of each split parameter, by the parameter's name.
pub(super) type Splits = HashMap<String, Split>;

/// This rank's slices for the precision pass; `None` if parameters are whole.
pub(super) fn slices<'a>(splits: &'a Splits, target: &Target) -> Option<RankSlices<'a>> {
    rank_of(target).map(|rank| RankSlices { rank, splits })
}

/// Gradients whose squares are summed, and the groups whose ranks hold different gradients.
pub(super) struct NormTerms {
    /// One list for each chunk of this rank's layers; slices of buckets may share a list.
    pub(super) gradients: Vec<Vec<ValueId>>,
    pub(super) groups: Vec<(GroupId, u32)>,
}
