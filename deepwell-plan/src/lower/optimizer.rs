//! The optimizer's body: the norm of all gradients, then the update, bucket by bucket.

use std::ops::Range;

use deepwell_ir::ops::{AdamW, AdamWCoefficients, GradNorm};
use deepwell_ir::{
    Access, Accumulate, DType, MemoryKind, NodeId, Op, Operand, Phase, Tag, ValueId,
};

use super::{Lowering, NewCall};
use crate::{Plan, PlanError};

impl Lowering<'_> {
    /// Lowers the optimizer to a body.
    pub(super) fn optimizer(&mut self, plan: &Plan) -> Result<(), PlanError> {
        let gradients = self.parameters.iter().filter_map(|state| state.gradient);
        let gradients: Vec<Operand> = gradients.map(read).collect();
        let norm = self.host.grad_norm;
        let norms = norm.map(write).into_iter().collect();
        self.optimizer_call("grad_norm", GradNorm {}.into(), gradients, norms)?;

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

    fn optimizer_call(
        &mut self,
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
            phase: Phase::Optimizer,
            tag: Tag::Head,
            layer: None,
            source: NodeId(self.graph.nodes.len() as u32),
            recomputes: false,
        })
    }
}

fn read(value: ValueId) -> Operand {
    Operand { value, access: Access::Read }
}

fn write(value: ValueId) -> Operand {
    Operand { value, access: Access::Write }
}

fn update(value: ValueId) -> Operand {
    Operand { value, access: Access::Update }
}
