//! Context parallelism: the graph of one rank, which holds two chunks of each sequence.

use std::borrow::Cow;

use deepwell_ir::ops::Zigzag;
use deepwell_ir::{Graph, ProcessGroup, Target, context_parallel};

use crate::{Plan, PlanError};

/// Returns the graph of a context-parallel rank, or `graph` itself if sequences are whole.
pub(super) fn part_of_sequences<'g>(
    graph: Cow<'g, Graph>,
    plan: &Plan,
    target: &Target,
) -> Result<Cow<'g, Graph>, PlanError> {
    let ranks = plan.parallel.context;
    let Some(rank) = target.ranks.member_of(ProcessGroup::CONTEXT) else { return Ok(graph) };
    if !plan.seq.is_multiple_of(2 * ranks) {
        return Err(PlanError::Request {
            what: "sequence length",
            expected: format!(
                "a multiple of {}, two chunks for each of the {ranks} context-parallel ranks",
                2 * ranks
            ),
            got: plan.seq.to_string(),
        });
    }
    let part = Zigzag { place: rank.place, ranks };
    Ok(Cow::Owned(context_parallel(&graph, (rank.group, part))?))
}
