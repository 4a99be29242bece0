//! One rank of an expert-parallel group, with its experts, and the ranks summing gradients of
//! experts.
//!
//! Each rank of a group has its own tokens: of other sequences if the ranks are data-parallel, of
//! the same sequences if they are tensor-parallel. The gradient of an expert already includes all
//! tokens of the group, so it is summed only over ranks of other groups with the same experts.

use deepwell_ir::{Graph, IrError, ProcessGroup, Target, expert_row_alignment};
use deepwell_moe::{expand, expand_on_rank};
use deepwell_precision::PrecisionPolicy;

use super::splits::Splits;
use crate::PlanError;

/// Expands experts to ops that have kernels, with groups of rows that are a multiple of `align`.
/// Returns the experts of the target's rank, and its slices of parameters.
pub(super) fn expand_for_rank(
    graph: &Graph,
    align: usize,
    target: &Target,
) -> Result<(Graph, Splits), PlanError> {
    let Some(rank) = target.ranks.member_of(ProcessGroup::EXPERT) else {
        return Ok((expand(graph, align)?, Splits::new()));
    };
    let (own, splits) = expand_on_rank(graph, align, rank)?;
    let names = own.parameters().map(|(_, tensor)| tensor.name.clone());
    let splits = names.zip(splits).filter_map(|(name, split)| Some((name, split?))).collect();
    Ok((own, splits))
}

/// Expands experts to ops that have kernels, all experts on one rank.
pub(crate) fn expand_experts(graph: &Graph, policy: &PrecisionPolicy) -> Result<Graph, IrError> {
    expand(graph, expert_row_alignment(graph, policy)?)
}
