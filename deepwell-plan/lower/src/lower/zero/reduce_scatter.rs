//! Gradients to slices: reduce-scatters before the update or during the backward pass, and the
//! update of the slices.

use deepwell_ir::ops::{AdamW, Collective, CollectiveKind, Reduction};
use deepwell_ir::{Accumulate, DType, MemoryKind, Phase, Shard, ValueId};

use super::state::Bucket;
use crate::PlanError;
use crate::lower::builder::{NewCall, read, update, write};
use crate::lower::lowering::Lowering;
use crate::lower::splits::NormTerms;

impl Lowering<'_> {
    /// The gradients of a bucket that is whole on every tensor-parallel rank, or this rank's slice
    /// if they are reduce-scattered during the backward pass.
    pub(in crate::lower) fn whole_bucket(&self, index: usize) -> Option<Vec<ValueId>> {
        let bucket = self.zero.buckets.get(index).filter(|bucket| bucket.split.is_none())?;
        Some(bucket.scattered.map_or_else(|| bucket.gradients.clone(), |slice| vec![slice]))
    }

    /// Returns each rank's slice of the gradients, summed over all ranks, and computes their norm.
    pub(in crate::lower) fn scatter_gradients(&mut self) -> Result<Vec<ValueId>, PlanError> {
        let mut slices = Vec::with_capacity(self.zero.buckets.len());
        for index in 0..self.zero.buckets.len() {
            if let Some(own) = self.zero.buckets[index].scattered {
                slices.push(own);
                continue;
            }
            let own = match self.reduction.slice(index) {
                Some(own) => own,
                None => self.scatter_bucket(index, Phase::Optimizer)?,
            };
            slices.push(own);
        }
        let counted =
            slices.iter().zip(&self.zero.buckets).filter(|(_, bucket)| !bucket.is_tied_copy);
        let counted: Vec<_> = counted.map(|(&slice, bucket)| (slice, bucket.split)).collect();
        let gradients = counted.into_iter().map(|(slice, split)| self.counted(slice, split));
        let gradients = vec![gradients.collect()];
        let groups = self.rank.zero_group().into_iter().collect();
        self.norm_of_terms(NormTerms { gradients, groups })?;
        Ok(slices)
    }

    /// Reduce-scatters a bucket of gradients; returns this rank's slice.
    pub(in crate::lower) fn scatter_bucket(
        &mut self,
        index: usize,
        phase: Phase,
    ) -> Result<ValueId, PlanError> {
        let Bucket { master, group: (group, ranks), .. } = self.zero.buckets[index];
        let gradients = self.zero.buckets[index].gradients.clone();
        let (name, shape) =
            (format!("grad.shard.{index}"), self.build.values[master.index()].shape.clone());
        let own = self.build.add(name, DType::F32, shape, MemoryKind::Activations);
        let kind = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
        let op = Collective::of_bucket(kind, group, ranks, gradients.len());
        let inputs = gradients.into_iter().map(read).collect();
        let name = format!("reduce_scatter.gradients.{index}");
        self.build.phase_call(phase, &name, op.into(), inputs, vec![write(own)])?;
        Ok(own)
    }

    /// Updates this rank's slices.
    pub(in crate::lower) fn update_shards(
        &mut self,
        coefficients: ValueId,
        gradients: &[ValueId],
    ) -> Result<(), PlanError> {
        for (index, &gradient) in gradients.iter().enumerate() {
            let Shard { master, first_moment, second_moment, .. } = self.zero.shards[index].clone();
            let state = [master, first_moment, second_moment].map(update);
            let operands = [read(coefficients), read(gradient)].into_iter().chain(state).collect();
            let weight_decay = vec![self.zero.buckets[index].weight_decay];
            let op = AdamW {
                parameters: index..index + 1,
                weight_decay,
                copies: Vec::new(),
                moments: self.rank.plan.optimizer.moments,
            };
            self.build.optimizer_call(
                &format!("adamw.{index}"),
                op.into(),
                operands,
                Vec::new(),
            )?;
        }
        Ok(())
    }

    /// Reduce-scatters the buckets whose gradients are complete after a node.
    pub(in crate::lower) fn scatter_after(&mut self, at: usize) -> Result<(), PlanError> {
        for bucket in self.zero.gathers.complete_after.get(&at).cloned().unwrap_or_default() {
            let (group, ranks) = self.zero.buckets[bucket].group;
            let gradients = self.zero.buckets[bucket].gradients.clone();
            let Some(own) = self.zero.buckets[bucket].scattered else { continue };
            let kind = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
            let op = Collective::of_bucket(kind, group, ranks, gradients.len());
            // On devices a sum that is accumulated arrives in this bucket first.
            let adds = self.rank.target.arch != "cpu" && self.rank.plan.micro_batches > 1;
            let parameters = self.zero.buckets[bucket].parameters.len();
            let operand = |(index, value)| match adds {
                _ if index >= parameters => write(value),
                true => update(value),
                false => read(value),
            };
            let inputs = gradients.into_iter().enumerate().map(operand).collect();
            let (pass, outputs) = ((self.rank.graph.nodes[at].phase, None), vec![write(own)]);
            let name = format!("reduce_scatter.gradients.{bucket}");
            let call = self.build.call_without_node(pass, &name, op.into(), inputs, outputs);
            self.build.call(NewCall {
                accumulate: Accumulate::AfterFirst,
                accumulator_bytes: self.build.values[own.index()].range.bytes as u64,
                ..call
            })?;
            self.sum_slice_after(at, bucket)?;
        }
        Ok(())
    }
}
