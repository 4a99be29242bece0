//! Gated activation `silu(gate) · up` (Shazeer, arXiv 2002.05202).

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError};

/// gate, up `[T, F]` → `silu(gate) · up`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGlu {}

impl OpRule for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["gate", "up"])?;
        let dtype = check.same_float(&[0, 1])?;
        check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        5 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let inputs = [dout, node.inputs[0], node.inputs[1]];
        let gradients = context.emit_fresh(SwiGluBackward {}, "", &inputs)?;
        context.contribute(node.inputs[0], gradients[0])?;
        context.contribute(node.inputs[1], gradients[1])
    }
}

/// dout, gate, up → dgate, dup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGluBackward {}

impl OpRule for SwiGluBackward {
    fn name(&self) -> &'static str {
        "swiglu_backward"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dout", "gate", "up"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        check.shape(2, &inputs[0].shape)?;
        Ok(vec![
            OutputType::activation("dgate", inputs[0].shape.clone(), dtype),
            OutputType::activation("dup", inputs[0].shape.clone(), dtype),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        9 * product(&shapes[0])
    }
}
