//! One rank of an expert-parallel group: the experts that it has, and who sums their gradients.
//!
//! The ranks of a group have tokens of their own each: of other sequences, where they are
//! data-parallel, or of the same ones, where they are tensor-parallel. The gradient of an expert is
//! that of all tokens of the group already, so it is summed over the ranks of other groups that
//! have the same experts, and over no others.

use deepwell_ir::{Graph, IrError, ProcessGroup, SplitOver, Target, expert_row_alignment};
use deepwell_moe::{ExpertRank, expand, expand_on_rank};
use deepwell_precision::PrecisionPolicy;

use super::Lowering;
use super::tensor::Splits;
use crate::PlanError;

/// The rank of a target in its expert-parallel group, if it has one.
pub(super) fn rank_of(target: &Target) -> Option<ExpertRank> {
    let (group, members) = target.ranks.named(ProcessGroup::EXPERT)?;
    let place = members.position_of(target.ranks.rank)?;
    Some(ExpertRank { group, place, ranks: members.ranks.len() })
}

/// Experts as ops that have kernels, in groups of rows that are a multiple of `align`: those of
/// the target's rank, with the slices that it has of parameters.
pub(super) fn expand_for_rank(
    graph: &Graph,
    align: usize,
    target: &Target,
) -> Result<(Graph, Splits), PlanError> {
    let Some(rank) = rank_of(target) else { return Ok((expand(graph, align)?, Splits::new())) };
    let (own, splits) = expand_on_rank(graph, align, rank)?;
    let names = own.parameters().map(|(_, tensor)| tensor.name.clone());
    let splits = names.zip(splits).filter_map(|(name, split)| Some((name, split?))).collect();
    Ok((own, splits))
}

/// Experts as ops that have kernels, all on one rank.
pub(crate) fn expand_experts(graph: &Graph, policy: &PrecisionPolicy) -> Result<Graph, IrError> {
    expand(graph, expert_row_alignment(graph, policy)?)
}

impl Lowering<'_> {
    /// Whether the gradient of a parameter is that of an expert-parallel group's tokens.
    pub(super) fn is_of_expert_rank(&self, index: usize) -> bool {
        self.parameters[index].split.is_some_and(|split| split.over == SplitOver::Expert)
    }
}
