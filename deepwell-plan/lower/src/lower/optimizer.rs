//! The optimizer's body: the gradient reduction over the ranks that split the batch, the gradient
//! norm, then the AdamW update, bucket by bucket, with the weight copies written by AdamW.

use std::ops::Range;

use deepwell_ir::ops::{
    AdamW, AdamWCoefficients, Collective, CollectiveKind, GradNorm, Reduction, SelectionBiasUpdate,
    WeightCopy,
};
use deepwell_ir::{
    DType, GroupId, MemoryKind, ParameterState, Phase, ProcessGroup, SplitOver, ValueId,
};

use super::builder::{read, update, write};
use super::copies::UpdateCopies;
use super::lowering::Lowering;
use super::splits::NormTerms;
use crate::{OptimizerSpec, PlanError};

impl Lowering<'_> {
    /// Lowers the optimizer to a body.
    pub(super) fn optimizer(&mut self) -> Result<(), PlanError> {
        if self.rank.updates_in_backward() {
            return self.end_of_updates();
        }
        self.update_copies = UpdateCopies::plan(&self.rank, &self.parameters);
        self.sum_shared_gradients()?;
        self.sum_over_tensor_ranks()?;
        let slices = self.sum_over_ranks()?;
        if slices.is_none() {
            self.norm_of_gradients()?;
        }
        self.sum_losses()?;
        let norm = self.build.host.grad_norm;

        let coefficients = self.coefficients(norm)?;
        self.update_selection_biases(coefficients)?;
        match slices {
            Some(slices) => self.update_shards(coefficients, &slices)?,
            None => self.update_buckets(coefficients)?,
        }
        self.build.end_body(Phase::Optimizer, 0);
        Ok(())
    }

    /// The optimizer's body after updates in the backward pass: norm and count of the step.
    fn end_of_updates(&mut self) -> Result<(), PlanError> {
        self.norm_of_updates()?;
        let coefficients = self.coefficients(self.build.host.grad_norm)?;
        self.update_selection_biases(coefficients)?;
        self.build.end_body(Phase::Optimizer, 0);
        Ok(())
    }

    /// Computes the coefficients of this step's update from the norm, the learning rate and the
    /// number of steps.
    fn coefficients(&mut self, norm: Option<ValueId>) -> Result<ValueId, PlanError> {
        let name = "adamw_coefficients";
        let shape = vec![AdamWCoefficients::COUNT];
        let coefficients =
            self.build.add(name.to_string(), DType::F32, shape, MemoryKind::Activations);
        let host = &self.build.host;
        let of_host = [norm.map(read), host.schedule.map(read), host.counters.map(update)];
        let inputs = of_host.into_iter().flatten().collect();
        let OptimizerSpec { beta1, beta2, eps, .. } = self.rank.plan.optimizer;
        let op = AdamWCoefficients { beta1, beta2, eps, of_bucket: false };
        self.build.optimizer_call(name, op.into(), inputs, vec![write(coefficients)])?;
        Ok(coefficients)
    }

    /// Updates whole parameters, bucket by bucket, with their weight copies.
    fn update_buckets(&mut self, coefficients: ValueId) -> Result<(), PlanError> {
        let optimizer = &self.rank.plan.optimizer;
        let buckets = self.parameters.buckets.iter();
        let is_trained = |bucket: &&Range<usize>| !self.parameters.is_selection_bias[bucket.start];
        let trained: Vec<_> = buckets.filter(is_trained).cloned().collect();
        for (number, bucket) in trained.into_iter().enumerate() {
            let mut operands = vec![read(coefficients)];
            let mut weight_decay = Vec::with_capacity(bucket.len());
            let (mut copies, mut outputs) = (Vec::new(), Vec::new());
            for index in bucket.clone() {
                let parameter = index - bucket.start;
                for (kind, tensors) in self.update_copies.of(index) {
                    copies.push(WeightCopy { parameter, kind: kind.clone() });
                    outputs.extend(tensors.iter().map(|&id| write(self.build.value(id))));
                }
                let state = &self.parameters.states[index];
                let moments = [state.first_moment, state.second_moment].into_iter().flatten();
                operands.extend(state.gradient.map(read));
                operands.push(update(state.master.value()));
                operands.extend(moments.map(update));
                let decays = self.parameters.decays[index];
                weight_decay.push(if decays { optimizer.weight_decay } else { 0.0 });
            }
            let moments = optimizer.moments;
            let op = AdamW { parameters: bucket, weight_decay, copies, moments };
            let name = format!("adamw.{number}");
            self.build.optimizer_call(&name, op.into(), operands, outputs)?;
        }
        Ok(())
    }

    /// Computes the norm of all gradients. This rank may hold a gradient whole, a slice, or none.
    fn norm_of_gradients(&mut self) -> Result<(), PlanError> {
        let is_trained = |(state, is_selection_bias): &(&ParameterState, &bool)| {
            !**is_selection_bias && !self.rank.is_tied_copy(&state.name)
        };
        let trained = self
            .parameters
            .states
            .iter()
            .zip(&self.parameters.is_selection_bias)
            .filter(is_trained);
        let gradients: Vec<(String, ValueId, Option<SplitOver>)> = trained
            .filter_map(|(it, _)| {
                Some((it.name.clone(), it.gradient?, it.split.map(|split| split.over)))
            })
            .collect();
        let has_slices = [ProcessGroup::TENSOR, ProcessGroup::EXPERT]
            .iter()
            .any(|group| self.rank.target.ranks.named(group).is_some());
        if has_slices || self.rank.pipeline.is_some() {
            let counted = gradients
                .into_iter()
                .map(|(name, gradient, split)| (name, self.counted(gradient, split)));
            let counted = counted.collect();
            let gradients = self.rank.by_chunk(counted);
            return self.norm_of_terms(NormTerms { gradients, groups: Vec::new() });
        }
        let gradients = gradients.into_iter().map(|(_, gradient, _)| read(gradient)).collect();
        let norm = self.build.host.grad_norm.map(write).into_iter().collect();
        self.build.optimizer_call("grad_norm", GradNorm {}.into(), gradients, norm)
    }

    /// Updates the selection biases of routers by the counts of chosen experts of the whole step.
    fn update_selection_biases(&mut self, coefficients: ValueId) -> Result<(), PlanError> {
        let rate = self.rank.plan.optimizer.selection_bias_rate;
        let parameters = self.parameters.states.iter().zip(&self.parameters.is_selection_bias);
        let counted = parameters.filter(|(_, is_selection_bias)| **is_selection_bias);
        let counted: Vec<_> = counted
            .filter_map(|(state, _)| Some((state.gradient?, state.master.value())))
            .collect();
        for (index, (counts, bias)) in counted.into_iter().enumerate() {
            let operands = vec![read(coefficients), read(counts), update(bias)];
            let op = SelectionBiasUpdate { rate };
            let name = format!("selection_bias.{index}");
            self.build.optimizer_call(&name, op.into(), operands, Vec::new())?;
        }
        Ok(())
    }

    /// Sums gradients, bucket by bucket, and the loss over the ranks that split the batch. Each
    /// rank's loss is already divided by the global number of tokens, so the sum is the mean.
    /// Returns this rank's slices of the gradients if the optimizer state is sharded.
    fn sum_over_ranks(&mut self) -> Result<Option<Vec<ValueId>>, PlanError> {
        let shards_optimizer = self.rank.zero_group().is_some();
        for index in 0..self.parameters.buckets.len() {
            let first = self.parameters.buckets[index].start;
            // Gradients of shards are reduce-scattered below.
            if shards_optimizer && !self.parameters.is_selection_bias[first]
                || self.reduction.has(index)
            {
                continue;
            }
            self.sum_bucket(index, Phase::Optimizer)?;
        }
        if let (Some(loss), Some(of_all)) =
            (self.build.host.loss, self.rank.named_group(ProcessGroup::DATA))
        {
            let loss = vec![loss];
            self.sum_over("all_reduce.loss", loss, of_all, Phase::Optimizer)?;
        }
        match shards_optimizer {
            true => self.scatter_gradients().map(Some),
            false => Ok(None),
        }
    }

    /// Sums a bucket of gradients over ranks; returns false if the bucket or the group does not
    /// exist.
    pub(super) fn sum_bucket(&mut self, index: usize, phase: Phase) -> Result<bool, PlanError> {
        let Some(bucket) = self.parameters.buckets.get(index).cloned() else { return Ok(false) };
        let group = match self.parameters.is_of_expert_rank(bucket.start) {
            // The ranks of this group are data-parallel or tensor-parallel.
            true => self.rank.named_group(ProcessGroup::EXPERT_DATA),
            false => self.rank.named_group(ProcessGroup::DATA),
        };
        let Some(group) = group else { return Ok(false) };
        let gradients = self.parameters.gradients(bucket);
        self.sum_over(&format!("all_reduce.gradients.{index}"), gradients, group, phase)?;
        Ok(true)
    }

    pub(super) fn sum_over(
        &mut self,
        name: &str,
        tensors: Vec<ValueId>,
        (group, ranks): (GroupId, u32),
        phase: Phase,
    ) -> Result<(), PlanError> {
        let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
        let op = Collective::of_bucket(kind, group, ranks, tensors.len());
        let tensors = tensors.into_iter().map(update).collect();
        self.build.phase_call(phase, name, op.into(), tensors, Vec::new())
    }
}
