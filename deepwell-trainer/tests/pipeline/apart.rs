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
        let writes = |call: &&Call| is_of_embedding(&call.op);
        let call = program.calls.iter().find(writes)?;
        let gradient = call.outputs().first()?.value;
        let elements = program.value(gradient).elements();
        let [head, embedding] = [vec![0.0; elements], vec![0.0; elements]];
        let is_head = |call: &&Call| is_of_head(&call.op);
        let head_call = program.calls.iter().find(is_head)?;
        let is_tied = head_call.outputs().iter().any(|output| output.value == gradient);
        is_tied.then_some(Apart { gradient, head, embedding, is_summed: false })
    }

    fn part(&mut self, op: &Op) -> Option<&mut Vec<f32>> {
        match op {
            op if is_of_head(op) => Some(&mut self.head),
            op if is_of_embedding(op) => Some(&mut self.embedding),
            _ => None,
        }
    }
}

fn is_of_embedding(op: &Op) -> bool {
    matches!(op, Op::EmbeddingBackward(_) | Op::VocabParallelEmbeddingBackward(_))
}

fn is_of_head(op: &Op) -> bool {
    matches!(op, Op::LinearCrossEntropyGrad(_) | Op::VocabParallelCrossEntropyGrad(_))
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
