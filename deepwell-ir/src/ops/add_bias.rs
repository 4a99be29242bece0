//! A bias added to each row: for a linear layer whose ranks first sum partial results.

use serde::{Deserialize, Serialize};

use super::{BiasGrad, Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError, Shape};

/// `out[t, :] = x[t, :] + bias`: x `[T, N]`, bias `[N]` → `[T, N]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddBias {}

impl OpRule for AddBias {
    fn name(&self) -> &'static str {
        "add_bias"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "bias"])?;
        let dtype = check.same_float(&[0, 1])?;
        let width = check.rank(0, 2)?[1];
        check.shape(1, &Shape(vec![width]))?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let db = context.parameter_gradient(node.inputs[1]);
        context.emit(BiasGrad {}, "bgrad", &[dout], &[db])?;
        context.contribute(node.inputs[0], dout)
    }
}
