//! Element-wise sum.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError};

/// `a + b`, same shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Add {}

impl OpRule for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["a", "b"])?;
        let dtype = check.same_float(&[0, 1])?;
        check.shape(1, &inputs[0].shape)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        context.contribute(node.inputs[0], dout)?;
        context.contribute(node.inputs[1], dout)
    }
}
