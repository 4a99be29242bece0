//! One stage of a pipeline: its part of the graph, and what the stages agree on before the update.
//!
//! A stage's forward pass begins with what it receives and ends with what it sends, and so does its
//! backward pass, the other way round. In the optimizer's body
//! - the first and the last stage sum the gradient of a table that both have (tied embeddings),
//! - squares of gradients are summed parameter by parameter and exchanged, so that every stage adds
//!   up the sums of all in the order of the stages. That is the order of the parameters, in `f64`,
//!   as on one rank: the norm has the same bits, and with it all that is clipped or skipped,
//! - the losses of all stages are summed; where there are no routers it is the last stage's alone.

use std::borrow::Cow;

use deepwell_ir::ops::{Collective, CollectiveKind, GradNorm, Reduction};
use deepwell_ir::{
    DType, Graph, GroupId, MemoryKind, ParameterState, PipelineCut, ProcessGroup, Target, ValueId,
    cut_pipeline,
};

use super::Lowering;
use super::optimizer::{read, update, write};
use crate::{Plan, PlanError};

/// A rank's place in a pipeline.
pub(super) struct Pipeline {
    cut: PipelineCut,
    stage: u32,
    group: GroupId,
}

/// The graph with what stages send each other, and this rank's place among them; the graph as it is
/// where there is one stage.
pub(super) fn cut<'g>(
    graph: &'g Graph,
    plan: &Plan,
    target: &Target,
) -> Result<(Cow<'g, Graph>, Option<Pipeline>), PlanError> {
    let Some((group, members)) = target.ranks.named(ProcessGroup::PIPELINE) else {
        return Ok((Cow::Borrowed(graph), None));
    };
    if plan.stages.len() != members.ranks.len() {
        return Err(PlanError::Request {
            what: "layers of the pipeline's stages",
            expected: format!("those of {} stages", members.ranks.len()),
            got: format!("{:?}", plan.stages),
        });
    }
    let stage = plan.parallel.pipeline_place(target.ranks.rank as usize) as u32;
    let (graph, cut) = cut_pipeline(graph, &plan.stages, group)?;
    Ok((Cow::Owned(graph), Some(Pipeline { cut, stage, group })))
}

/// The nodes of this rank's stage of a pipeline.
pub(super) fn part_of_rank(graph: Graph, pipeline: Option<&Pipeline>) -> Result<Graph, PlanError> {
    match pipeline {
        Some(pipeline) => Ok(pipeline.cut.stage(&graph, pipeline.stage)?),
        None => Ok(graph),
    }
}

impl Pipeline {
    /// Whether an earlier stage has the parameter as well.
    pub(super) fn is_copy(&self, parameter: &str) -> bool {
        self.cut.owner(parameter) != Some(self.stage)
    }

    fn is_shared(&self, parameter: &str) -> bool {
        self.cut.stages_with(parameter).len() > 1
    }

    fn ranks(&self) -> u32 {
        self.cut.stages() as u32
    }
}

impl Lowering<'_> {
    /// Whether an earlier stage of the pipeline has the parameter as well.
    pub(super) fn is_copy(&self, parameter: &str) -> bool {
        self.pipeline.is_some_and(|pipeline| pipeline.is_copy(parameter))
    }

    /// Sums gradients of parameters that two stages have.
    pub(super) fn sum_shared_gradients(&mut self) -> Result<(), PlanError> {
        let Some(pipeline) = self.pipeline else { return Ok(()) };
        let shared = |state: &&ParameterState| pipeline.is_shared(&state.name);
        let gradients: Vec<(String, ValueId)> = (self.parameters.iter().filter(shared))
            .filter_map(|state| Some((state.name.clone(), state.gradient?)))
            .collect();
        if gradients.is_empty() {
            return Ok(());
        }
        let Some((group, members)) = self.target.ranks.named(ProcessGroup::EMBEDDING) else {
            return Err(PlanError::Request {
                what: "ranks of the target",
                expected: format!("a group `{}` for `{}`", ProcessGroup::EMBEDDING, gradients[0].0),
                got: format!("{:?}", self.target.ranks.groups),
            });
        };
        let ranks = members.ranks.len() as u32;
        for (name, gradient) in gradients {
            let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
            let op = Collective::of_bucket(kind, group, ranks, 1);
            let name = format!("all_reduce.tied.{name}");
            self.optimizer_call(&name, op.into(), vec![update(gradient)], Vec::new())?;
        }
        Ok(())
    }

    /// The group of a pipeline's stages, of which each gives as many sums of squares as that with
    /// the most: those of nothing are zero, and change no bit.
    pub(super) fn fill_up_for_stages(
        &mut self,
        gradients: &mut Vec<ValueId>,
    ) -> Option<(GroupId, u32)> {
        let pipeline = self.pipeline?;
        let most = pipeline.cut.parameters_of_largest_stage();
        if gradients.len() < most {
            gradients.resize(most, self.no_gradient());
        }
        Some((pipeline.group, pipeline.ranks()))
    }

    /// Sums the losses of all stages, for each of them to report and to guard.
    pub(super) fn sum_losses(&mut self) -> Result<(), PlanError> {
        let Some(pipeline) = self.pipeline else { return Ok(()) };
        let (group, ranks) = (pipeline.group, pipeline.ranks());
        let own = match self.host.loss {
            Some(loss) => loss,
            None => {
                // A stage without a loss gives zero: the norm of nothing.
                let name = "loss.none";
                let zero = self.add(name.into(), DType::F32, vec![1], MemoryKind::Activations);
                self.optimizer_call(name, GradNorm {}.into(), Vec::new(), vec![write(zero)])?;
                zero
            }
        };
        let all = self.add("loss.pipeline".to_string(), DType::F32, vec![1], MemoryKind::Host);
        let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
        let op = Collective::new(kind, group, ranks);
        let name = "all_reduce.loss.pipeline";
        self.optimizer_call(name, op.into(), vec![read(own)], vec![write(all)])?;
        self.host.loss = Some(all);
        Ok(())
    }
}
