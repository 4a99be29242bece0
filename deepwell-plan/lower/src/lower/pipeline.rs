//! One stage of a pipeline: its part of the graph, and the collectives of all stages before the
//! update.
//!
//! The forward pass of a stage begins with receives and ends with sends; so does the backward pass,
//! in the opposite direction. In the optimizer's body
//! - the first and the last stage sum the gradient of a table on both stages (tied embeddings),
//! - squares of gradients are summed per parameter and all-gathered, so every stage adds up the
//!   sums of all stages in stage order. This is the order of the parameters, in `f64`, as on one
//!   rank: the norm has the same bits, and so has everything clipped or skipped,
//! - the losses of all stages are summed; without routers only the last stage has a loss.

use deepwell_ir::ops::{Collective, CollectiveKind, GradNorm, Reduction};
use deepwell_ir::{DType, GroupId, MemoryKind, ParameterState, ProcessGroup, ValueId};

use super::builder::{read, update, write};
use super::lowering::Lowering;
use super::rank::RankContext;
use crate::PlanError;

impl RankContext<'_> {
    /// Gradients of this rank, chunk by chunk.
    pub(super) fn by_chunk(&self, gradients: Vec<(String, ValueId)>) -> Vec<Vec<ValueId>> {
        let mut chunks = vec![Vec::new(); self.chunks() as usize];
        for (parameter, gradient) in gradients {
            let chunk = self.pipeline.map_or(0, |pipeline| pipeline.chunk_of(&parameter));
            chunks[chunk as usize].push(gradient);
        }
        chunks
    }
}

impl Lowering<'_> {
    /// Sums gradients of parameters held by two stages.
    pub(super) fn sum_shared_gradients(&mut self) -> Result<(), PlanError> {
        let Some(pipeline) = self.rank.pipeline else { return Ok(()) };
        let shared = |state: &&ParameterState| pipeline.is_tied(&state.name);
        let gradients: Vec<(String, ValueId)> = (self.parameters.states.iter().filter(shared))
            .filter_map(|state| Some((state.name.clone(), state.gradient?)))
            .collect();
        if gradients.is_empty() {
            return Ok(());
        }
        let Some((group, members)) = self.rank.target.ranks.named(ProcessGroup::EMBEDDING) else {
            return Err(PlanError::Request {
                what: "ranks of the target",
                expected: format!("a group `{}` for `{}`", ProcessGroup::EMBEDDING, gradients[0].0),
                got: format!("{:?}", self.rank.target.ranks.groups),
            });
        };
        let ranks = members.ranks.len() as u32;
        for (name, gradient) in gradients {
            let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
            let op = Collective::of_bucket(kind, group, ranks, 1);
            let name = format!("all_reduce.tied.{name}");
            self.build.optimizer_call(&name, op.into(), vec![update(gradient)], Vec::new())?;
        }
        Ok(())
    }

    /// Pads the lists of sums of squares to the length of the stage with the most parameters, chunk
    /// by chunk, and returns the group of the pipeline. Padding is zero and changes no bit.
    pub(super) fn fill_up_for_stages(
        &mut self,
        chunks: &mut [Vec<ValueId>],
    ) -> Option<(GroupId, u32)> {
        let pipeline = self.rank.pipeline?;
        let most = pipeline.cut.parameters_of_largest_stage();
        // A single list may hold the gradients of all chunks.
        let most = most * pipeline.stages.len().div_ceil(chunks.len().max(1));
        for gradients in chunks {
            if gradients.len() < most {
                let nothing = self.no_gradient();
                gradients.resize(most, nothing);
            }
        }
        Some((pipeline.group, pipeline.ranks))
    }

    /// Sums the losses of all stages, so that every stage reports and guards the same loss.
    pub(super) fn sum_losses(&mut self) -> Result<(), PlanError> {
        let Some(pipeline) = self.rank.pipeline else { return Ok(()) };
        let (group, ranks) = (pipeline.group, pipeline.ranks);
        let own = match self.build.host.loss {
            Some(loss) => loss,
            None => {
                // A stage without a loss contributes zero: the norm of an empty list.
                let name = "loss.none";
                let zero =
                    self.build.add(name.into(), DType::F32, vec![1], MemoryKind::Activations);
                self.build.optimizer_call(
                    name,
                    GradNorm {}.into(),
                    Vec::new(),
                    vec![write(zero)],
                )?;
                zero
            }
        };
        let all =
            self.build.add("loss.pipeline".to_string(), DType::F32, vec![1], MemoryKind::Host);
        let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
        let op = Collective::new(kind, group, ranks);
        let name = "all_reduce.loss.pipeline";
        self.build.optimizer_call(name, op.into(), vec![read(own)], vec![write(all)])?;
        self.build.host.loss = Some(all);
        Ok(())
    }
}
