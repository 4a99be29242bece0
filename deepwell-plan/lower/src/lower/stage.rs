//! A rank's place in a pipeline, and its part of the graph.

use std::borrow::Cow;

use deepwell_ir::{Graph, GroupId, Node, PipelineCut, ProcessGroup, Target, cut_pipeline};

use crate::{Plan, PlanError};

/// A rank's place in a pipeline.
pub(super) struct Pipeline {
    pub(super) cut: PipelineCut,
    /// This rank's stages of the model, one for each of the rank's chunks.
    pub(super) stages: Vec<u32>,
    pub(super) group: GroupId,
    pub(super) ranks: u32,
}

/// Returns the graph with sends and receives between stages, and this rank's place in the pipeline;
/// `graph` itself if the pipeline has one stage.
pub(super) fn cut<'g>(
    graph: &'g Graph,
    plan: &Plan,
    target: &Target,
) -> Result<(Cow<'g, Graph>, Option<Pipeline>), PlanError> {
    let Some((group, members)) = target.ranks.named(ProcessGroup::PIPELINE) else {
        return Ok((Cow::Borrowed(graph), None));
    };
    let (ranks, count) = (members.ranks.len(), plan.parallel.stages());
    if plan.stages.len() != count {
        return Err(PlanError::Request {
            what: "layers of the pipeline's stages",
            expected: format!("those of {count} stages"),
            got: format!("{:?}", plan.stages),
        });
    }
    let (graph, cut) = cut_pipeline(graph, &plan.stages, (group, ranks))?;
    let pipeline = Pipeline { cut, stages: Vec::new(), group, ranks: ranks as u32 };
    Ok((Cow::Owned(graph), Some(pipeline.of_rank(plan, target))))
}

/// The nodes of this rank's stage of a pipeline.
pub(super) fn part_of_rank<'g>(
    graph: Cow<'g, Graph>,
    pipeline: Option<&Pipeline>,
) -> Result<Cow<'g, Graph>, PlanError> {
    match pipeline {
        Some(pipeline) => Ok(Cow::Owned(pipeline.cut.part(&graph, &pipeline.stages)?)),
        None => Ok(graph),
    }
}

impl Pipeline {
    /// The place of `target`'s rank in the same pipeline.
    pub(super) fn of_rank(&self, plan: &Plan, target: &Target) -> Pipeline {
        let place = plan.parallel.pipeline_place(target.ranks.rank as usize);
        let stages = (place..plan.parallel.stages()).step_by(self.ranks as usize);
        let stages = stages.map(|stage| stage as u32).collect();
        Pipeline { cut: self.cut.clone(), stages, ..*self }
    }

    /// Whether an earlier stage holds the parameter as well.
    pub(super) fn is_tied_copy(&self, parameter: &str) -> bool {
        let owner = self.cut.owner(parameter);
        owner.is_none_or(|owner| !self.stages.contains(&owner))
    }

    /// Whether another stage holds the parameter as well.
    pub(super) fn is_tied(&self, parameter: &str) -> bool {
        self.cut.stages_with(parameter).len() > 1
    }

    /// Number of this rank's chunks of layers.
    pub(super) fn chunks(&self) -> u32 {
        self.stages.len() as u32
    }

    /// The chunk of layers that a node belongs to.
    pub(super) fn chunk_of_node(&self, node: &Node) -> u32 {
        self.cut.stage_of(node) / self.ranks
    }

    /// The chunk of this rank with a parameter.
    pub(super) fn chunk_of(&self, parameter: &str) -> u32 {
        let of = self.cut.stages_with(parameter);
        let chunk = self.stages.iter().position(|stage| of.contains(stage));
        chunk.unwrap_or_default() as u32
    }
}
