//! Rectified linear unit.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError};

/// x `[T, F]` → `max(x, 0)`; NaN stays NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Relu {}

impl OpRule for Relu {
    fn name(&self) -> &'static str {
        "relu"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        let dtype = check.same_float(&[0])?;
        check.rank(0, 2)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let x = node.inputs[0];
        let dx = context.emit_fresh(ReluBackward {}, "", &[dy, x])?[0];
        context.contribute(x, dx)
    }
}

/// dy, x → dx: `dy`, and zero where `x <= 0`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReluBackward {}

impl OpRule for ReluBackward {
    fn name(&self) -> &'static str {
        "relu_backward"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "x"])?;
        let dtype = check.same_float(&[0, 1])?;
        check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }
}
