//! One rank whose gradients of a tied table are kept apart, as those of two stages are.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::{Call, Instance, Op, Phase, Program, ValueId};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};

/// Keeps the gradients of a table that is read twice apart until the update begins.
pub(crate) struct Apart {
    gradient: ValueId,
    head: Vec<f32>,
    embedding: Vec<f32>,
    is_summed: bool,
}

impl Apart {
    /// For the table of a program, if its head has no other.
    pub(crate) fn of(program: &Program) -> Option<Apart> {
        let writes = |call: &&Call| matches!(call.op, Op::EmbeddingBackward(_));
        let call = program.calls.iter().find(writes)?;
        let gradient = call.outputs().first()?.value;
        let elements = program.value(gradient).elements();
        let [head, embedding] = [vec![0.0; elements], vec![0.0; elements]];
        let is_head = |call: &&Call| matches!(call.op, Op::LinearCrossEntropyGrad(_));
        let head_call = program.calls.iter().find(is_head)?;
        let is_tied = head_call.outputs().iter().any(|output| output.value == gradient);
        is_tied.then_some(Apart { gradient, head, embedding, is_summed: false })
    }

    fn part(&mut self, op: &Op) -> Option<&mut Vec<f32>> {
        match op {
            Op::LinearCrossEntropyGrad(_) => Some(&mut self.head),
            Op::EmbeddingBackward(_) => Some(&mut self.embedding),
            _ => None,
        }
    }
}

impl Observer for Apart {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        let range = program.value(self.gradient).range;
        let is_update = call.phase == Phase::Optimizer;
        if is_update && !std::mem::replace(&mut self.is_summed, is_update) {
            let sums = self.embedding.iter().zip(&self.head).map(|(a, b)| a + b);
            backend.write(range, cast_slice(&sums.collect::<Vec<f32>>()))?;
        }
        if let Some(part) = self.part(&call.op) {
            if instance.is_first {
                part.fill(0.0);
            }
            backend.write(range, cast_slice(part))?;
            self.is_summed = false;
        }
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        let range = program.value(self.gradient).range;
        match self.part(&call.op) {
            Some(part) => backend.read(range, cast_slice_mut(part)),
            None => Ok(()),
        }
    }
}
