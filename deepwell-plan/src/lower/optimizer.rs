//! The optimizer's body: gradients summed over the ranks that split the batch, the norm of all
//! gradients, then the update, bucket by bucket.

use std::ops::Range;

use deepwell_ir::ops::{AdamW, AdamWCoefficients, Collective, CollectiveKind, GradNorm, Reduction};
use deepwell_ir::{
    Access, Accumulate, DType, MemoryKind, NodeId, Op, Operand, Phase, ProcessGroup, Tag, ValueId,
};

use super::{Lowering, NewCall};
use crate::{Plan, PlanError};

impl Lowering<'_> {
    /// Lowers the optimizer to a body.
    pub(super) fn optimizer(&mut self, plan: &Plan) -> Result<(), PlanError> {
        let slices = self.sum_over_ranks(plan)?;
        let norm = self.host.grad_norm;
        if slices.is_none() {
            let gradients = self.parameters.iter().filter_map(|state| state.gradient);
            let gradients: Vec<Operand> = gradients.map(read).collect();
            let norms = norm.map(write).into_iter().collect();
            self.optimizer_call("grad_norm", GradNorm {}.into(), gradients, norms)?;
        }

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

        if let Some(slices) = slices {
            self.update_shards(coefficients, &slices)?;
            self.end_body(Phase::Optimizer);
            return Ok(());
        }
        for (index, bucket) in self.buckets(plan.bucket_bytes).into_iter().enumerate() {
            let mut operands = vec![read(coefficients)];
            let mut weight_decay = Vec::with_capacity(bucket.len());
            for state in &self.parameters[bucket.clone()] {
                let moments = [state.first_moment, state.second_moment].into_iter().flatten();
                operands.extend(state.gradient.map(read));
                operands.push(update(state.master));
                operands.extend(moments.map(update));
                let is_matrix = self.values[state.master.index()].shape.len() > 1;
                weight_decay.push(if is_matrix { plan.optimizer.weight_decay } else { 0.0 });
            }
            let op = AdamW { parameters: bucket, weight_decay };
            self.optimizer_call(&format!("adamw.{index}"), op.into(), operands, Vec::new())?;
        }
        self.end_body(Phase::Optimizer);
        Ok(())
    }

    /// Sums gradients, bucket by bucket, and the loss over the ranks that split the sequences of a
    /// step. Each rank's loss is already divided by the tokens of all, so that a sum is the mean.
    /// Where ranks share the optimizer state: this rank's slices of the gradients.
    fn sum_over_ranks(&mut self, plan: &Plan) -> Result<Option<Vec<ValueId>>, PlanError> {
        let target = self.target;
        let Some((group, members)) = target.ranks.named(ProcessGroup::DATA) else {
            return Ok(None);
        };
        let ranks = members.ranks.len() as u32;
        let is_shared = self.sharing().is_some();
        let buckets = if is_shared { Vec::new() } else { self.buckets(plan.bucket_bytes) };
        let of_bucket = |(index, bucket): (usize, Range<usize>)| {
            let gradients = self.parameters[bucket].iter().filter_map(|state| state.gradient);
            (format!("all_reduce.gradients.{index}"), gradients.collect())
        };
        let mut sums: Vec<(String, Vec<ValueId>)> =
            buckets.into_iter().enumerate().map(of_bucket).collect();
        sums.extend(self.host.loss.map(|loss| ("all_reduce.loss".to_string(), vec![loss])));
        for (name, tensors) in sums {
            let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
            let op = Collective::of_bucket(kind, group, ranks, tensors.len());
            let tensors = tensors.into_iter().map(update).collect();
            self.optimizer_call(&name, op.into(), tensors, Vec::new())?;
        }
        match is_shared {
            true => self.scatter_gradients((group, ranks)).map(Some),
            false => Ok(None),
        }
    }

    /// Consecutive parameters with gradients of at most `limit_bytes` together; one with more is
    /// alone.
    fn buckets(&self, limit_bytes: usize) -> Vec<Range<usize>> {
        let mut buckets: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for (index, state) in self.parameters.iter().enumerate() {
            let Some(gradient) = state.gradient else { continue };
            let own = self.values[gradient.index()].range.bytes;
            bytes += own;
            match buckets.last_mut() {
                Some(bucket) if bucket.end == index && bytes <= limit_bytes => bucket.end += 1,
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

    /// A call that stands for no node of the graph.
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
