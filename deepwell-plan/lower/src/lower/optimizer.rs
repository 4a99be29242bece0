//! The optimizer's body: the gradient reduction over the ranks that split the batch, the gradient
//! norm, then the AdamW update, bucket by bucket, with the weight copies written by AdamW.

use std::ops::Range;

use deepwell_ir::ops::{
    AdamW, AdamWCoefficients, Collective, CollectiveKind, GradNorm, Reduction, SelectionBiasUpdate,
    WeightCopy,
};
use deepwell_ir::{
    Access, Accumulate, DType, GroupId, MemoryKind, NodeId, Op, Operand, ParameterState, Phase,
    ProcessGroup, SplitOver, Tag, ValueId,
};

use super::tensor::NormTerms;
use super::{Lowering, NewCall};
use crate::{Plan, PlanError};

impl Lowering<'_> {
    /// Lowers the optimizer to a body.
    pub(super) fn optimizer(&mut self, plan: &Plan) -> Result<(), PlanError> {
        self.plan_update_copies();
        self.sum_shared_gradients()?;
        self.sum_over_tensor_ranks()?;
        let slices = self.sum_over_ranks(plan)?;
        if slices.is_none() {
            self.norm_of_gradients()?;
        }
        self.sum_losses()?;
        let norm = self.host.grad_norm;

        let beta1 = plan.optimizer.beta1;
        let (beta2, eps) = (plan.optimizer.beta2, plan.optimizer.eps);
        let name = "adamw_coefficients";
        let shape = vec![AdamWCoefficients::COUNT];
        let coefficients = self.add(name.to_string(), DType::F32, shape, MemoryKind::Activations);
        let of_host =
            [norm.map(read), self.host.schedule.map(read), self.host.counters.map(update)];
        let inputs = of_host.into_iter().flatten().collect();
        let op = AdamWCoefficients { beta1, beta2, eps };
        self.optimizer_call(name, op.into(), inputs, vec![write(coefficients)])?;
        self.update_selection_biases(plan.optimizer.selection_bias_rate, coefficients)?;

        if let Some(slices) = slices {
            self.update_shards(coefficients, &slices)?;
            self.end_body(Phase::Optimizer, 0);
            return Ok(());
        }
        let buckets = self.buckets(plan.bucket_bytes).into_iter();
        let trained: Vec<_> = buckets.filter(|bucket| !self.is_counted[bucket.start]).collect();
        for (index, bucket) in trained.into_iter().enumerate() {
            let mut operands = vec![read(coefficients)];
            let mut weight_decay = Vec::with_capacity(bucket.len());
            let (mut copies, mut outputs) = (Vec::new(), Vec::new());
            for index in bucket.clone() {
                let parameter = index - bucket.start;
                for (kind, tensors) in self.update_copies.of(index).to_vec() {
                    copies.push(WeightCopy { parameter, kind });
                    outputs.extend(tensors.into_iter().map(|id| write(self.value(id))));
                }
                let state = &self.parameters[index];
                let moments = [state.first_moment, state.second_moment].into_iter().flatten();
                operands.extend(state.gradient.map(read));
                operands.push(update(state.master));
                operands.extend(moments.map(update));
                let decay = if self.decays[index] { plan.optimizer.weight_decay } else { 0.0 };
                weight_decay.push(decay);
            }
            let op = AdamW { parameters: bucket, weight_decay, copies };
            self.optimizer_call(&format!("adamw.{index}"), op.into(), operands, outputs)?;
        }
        self.end_body(Phase::Optimizer, 0);
        Ok(())
    }

    /// Computes the norm of all gradients. This rank may hold a gradient whole, a slice, or none.
    fn norm_of_gradients(&mut self) -> Result<(), PlanError> {
        let is_trained = |(state, is_counted): &(&ParameterState, &bool)| {
            !**is_counted && !self.is_copy(&state.name)
        };
        let trained = self.parameters.iter().zip(&self.is_counted).filter(is_trained);
        let gradients: Vec<(String, ValueId, Option<SplitOver>)> = trained
            .filter_map(|(it, _)| {
                Some((it.name.clone(), it.gradient?, it.split.map(|split| split.over)))
            })
            .collect();
        let has_slices = [ProcessGroup::TENSOR, ProcessGroup::EXPERT]
            .iter()
            .any(|group| self.target.ranks.named(group).is_some());
        if has_slices || self.pipeline.is_some() {
            let counted = gradients
                .into_iter()
                .map(|(name, gradient, split)| (name, self.counted(gradient, split)));
            let counted = counted.collect();
            let gradients = self.by_chunk(counted);
            return self.norm_of_terms(NormTerms { gradients, groups: Vec::new() });
        }
        let gradients = gradients.into_iter().map(|(_, gradient, _)| read(gradient)).collect();
        let norm = self.host.grad_norm.map(write).into_iter().collect();
        self.optimizer_call("grad_norm", GradNorm {}.into(), gradients, norm)
    }

    /// Updates the selection biases of routers by the counts of chosen experts of the whole step.
    fn update_selection_biases(
        &mut self,
        rate: f32,
        coefficients: ValueId,
    ) -> Result<(), PlanError> {
        let parameters = self.parameters.iter().zip(&self.is_counted);
        let counted = parameters.filter(|(_, is_counted)| **is_counted);
        let counted: Vec<_> =
            counted.filter_map(|(state, _)| Some((state.gradient?, state.master))).collect();
        for (index, (counts, bias)) in counted.into_iter().enumerate() {
            let operands = vec![read(coefficients), read(counts), update(bias)];
            let op = SelectionBiasUpdate { rate };
            let name = format!("selection_bias.{index}");
            self.optimizer_call(&name, op.into(), operands, Vec::new())?;
        }
        Ok(())
    }

    /// Sums gradients, bucket by bucket, and the loss over the ranks that split the batch. Each
    /// rank's loss is already divided by the global number of tokens, so the sum is the mean.
    /// Returns this rank's slices of the gradients if the optimizer state is sharded.
    fn sum_over_ranks(&mut self, plan: &Plan) -> Result<Option<Vec<ValueId>>, PlanError> {
        let is_shared = self.sharing().is_some();
        for (index, bucket) in self.buckets(plan.bucket_bytes).into_iter().enumerate() {
            // Gradients of shards are reduce-scattered below.
            if is_shared && !self.is_counted[bucket.start] || self.reduction.has(index) {
                continue;
            }
            self.sum_bucket(index, Phase::Optimizer)?;
        }
        if let (Some(loss), Some(of_all)) = (self.host.loss, self.named_group(ProcessGroup::DATA)) {
            let loss = vec![loss];
            self.sum_over("all_reduce.loss", loss, of_all, Phase::Optimizer)?;
        }
        match is_shared {
            true => self.scatter_gradients().map(Some),
            false => Ok(None),
        }
    }

    /// A group of this rank and the group's size.
    fn named_group(&self, name: &str) -> Option<(GroupId, u32)> {
        let (id, group) = self.target.ranks.named(name)?;
        Some((id, group.ranks.len() as u32))
    }

    /// Sums a bucket of gradients over ranks; returns false if the bucket or the group does not
    /// exist.
    pub(super) fn sum_bucket(&mut self, index: usize, phase: Phase) -> Result<bool, PlanError> {
        let Some(bucket) = self.buckets(self.plan.bucket_bytes).get(index).cloned() else {
            return Ok(false);
        };
        let group = match self.is_of_expert_rank(bucket.start) {
            // The ranks of this group are data-parallel or tensor-parallel.
            true => self.named_group(ProcessGroup::EXPERT_DATA),
            false => self.named_group(ProcessGroup::DATA),
        };
        let Some(group) = group else { return Ok(false) };
        let gradients = self.parameters[bucket].iter().filter_map(|state| state.gradient).collect();
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
        self.phase_call(phase, name, op.into(), tensors, Vec::new())
    }

    /// Groups consecutive parameters to buckets with at most `limit_bytes` of gradients. A larger
    /// parameter has its own bucket, and so has a parameter not updated by AdamW.
    pub(super) fn buckets(&self, limit_bytes: usize) -> Vec<Range<usize>> {
        let mut buckets: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for (index, state) in self.parameters.iter().enumerate() {
            let Some(gradient) = state.gradient else { continue };
            let own = self.values[gradient.index()].range.bytes;
            bytes += own;
            let is_counted = |index: usize| self.is_counted[index];
            match buckets.last_mut() {
                Some(bucket)
                    if bucket.end == index
                        && bytes <= limit_bytes
                        && !is_counted(index)
                        && !is_counted(bucket.start)
                        && self.is_of_expert_rank(index)
                            == self.is_of_expert_rank(bucket.start) =>
                {
                    bucket.end += 1;
                }
                _ => {
                    buckets.push(index..index + 1);
                    bytes = own;
                }
            }
        }
        buckets
    }

    pub(super) fn optimizer_call(
        &mut self,
        name: &str,
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> Result<(), PlanError> {
        self.phase_call(Phase::Optimizer, name, op, inputs, outputs)
    }

    /// Adds a call without a node in the graph.
    pub(super) fn phase_call(
        &mut self,
        phase: Phase,
        name: &str,
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> Result<(), PlanError> {
        self.call(NewCall {
            name: name.to_string(),
            op,
            input_count: inputs.len(),
            operands: [inputs, outputs].concat(),
            accumulate: Accumulate::Never,
            accumulator_bytes: 0,
            phase,
            tag: Tag::Head,
            layer: None,
            source: NodeId(self.graph.nodes.len() as u32),
            recomputes: false,
        })
    }
}

pub(super) fn read(value: ValueId) -> Operand {
    Operand { value, access: Access::Read }
}

pub(super) fn write(value: ValueId) -> Operand {
    Operand { value, access: Access::Write }
}

pub(super) fn update(value: ValueId) -> Operand {
    Operand { value, access: Access::Update }
}
