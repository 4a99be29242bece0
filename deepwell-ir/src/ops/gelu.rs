//! Gaussian error linear unit (Hendrycks and Gimpel, arXiv 1606.08415, section 2).

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError};

/// x `[T, F]` → `x · Φ(x)`, where Φ is the distribution function of the standard normal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gelu {
    /// Whether to approximate Φ(x) by `(1 + tanh(sqrt(2/π) (x + 0.044715 x³))) / 2`, as GPT-2 does.
    pub tanh: bool,
}

/// Attribute text.
fn attributes(tanh: bool) -> String {
    if tanh { "tanh".to_string() } else { String::new() }
}

impl OpRule for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn attributes(&self) -> String {
        attributes(self.tanh)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        let dtype = check.same_float(&[0])?;
        check.rank(0, 2)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        8 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let x = node.inputs[0];
        let dx = context.emit_fresh(GeluBackward { tanh: self.tanh }, "", &[dy, x])?[0];
        context.contribute(x, dx)
    }
}

/// dy, x → dx.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeluBackward {
    /// Whether to use the approximation, see [`Gelu::tanh`].
    pub tanh: bool,
}

impl OpRule for GeluBackward {
    fn name(&self) -> &'static str {
        "gelu_backward"
    }

    fn attributes(&self) -> String {
        attributes(self.tanh)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "x"])?;
        let dtype = check.same_float(&[0, 1])?;
        check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        12 * product(&shapes[0])
    }
}
