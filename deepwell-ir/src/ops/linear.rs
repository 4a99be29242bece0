//! Linear layers in F32 or BF16 and their two gradients.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

fn matrix_unit(operands: &[DType]) -> MathUnit {
    match operands[0] {
        DType::Bf16 => MathUnit::Bf16,
        _ => MathUnit::F32,
    }
}

/// `y = x · wᵀ (+ bias)`: x `[T, K]`, w `[N, K]`, bias `[N]` → `[T, N]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// Whether a third operand is added to each row.
    pub bias: bool,
}

impl OpRule for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn attributes(&self) -> String {
        if self.bias { "bias".to_string() } else { String::new() }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names: &[&str] = if self.bias { &["x", "w", "bias"] } else { &["x", "w"] };
        let check = Check::count(self.name(), inputs, names)?;
        let dtype = check.same_float(if self.bias { &[0, 1, 2] } else { &[0, 1] })?;
        let x = check.rank(0, 2)?;
        let w = check.rank(1, 2)?;
        check.shape(1, &Shape(vec![w[0], x[1]]))?;
        if self.bias {
            check.shape(2, &Shape(vec![w[0]]))?;
        }
        Ok(vec![OutputType::activation("", Shape(vec![x[0], w[0]]), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[1][0] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        matrix_unit(operands)
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let dw = context.parameter_gradient(w);
        context.emit(LinearWgrad {}, "wgrad", &[dy, x], &[dw])?;
        if self.bias {
            let db = context.parameter_gradient(node.inputs[2]);
            context.emit(BiasGrad {}, "bgrad", &[dy], &[db])?;
        }
        let dx = context.emit_fresh(LinearDgrad {}, "dgrad", &[dy, w])?[0];
        context.contribute(x, dx)
    }
}

/// `dx = dy · w`: dy `[T, N]`, w `[N, K]` → `[T, K]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearDgrad {}

impl OpRule for LinearDgrad {
    fn name(&self) -> &'static str {
        "linear_dgrad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "w"])?;
        let dtype = check.same_float(&[0, 1])?;
        let dy = check.rank(0, 2)?;
        let w = check.rank(1, 2)?;
        check.shape(0, &Shape(vec![dy[0], w[0]]))?;
        Ok(vec![OutputType::activation("", Shape(vec![dy[0], w[1]]), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[1][1] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        matrix_unit(operands)
    }
}

/// `dw (+)= dyᵀ · x`: dy `[T, N]`, x `[T, K]` → f32 `[N, K]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearWgrad {}

impl OpRule for LinearWgrad {
    fn name(&self) -> &'static str {
        "linear_wgrad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "x"])?;
        check.same_float(&[0, 1])?;
        let dy = check.rank(0, 2)?;
        let x = check.rank(1, 2)?;
        check.shape(1, &Shape(vec![dy[0], x[1]]))?;
        Ok(vec![OutputType::accumulator("dw", Shape(vec![dy[1], x[1]]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[1][1] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        matrix_unit(operands)
    }
}

/// `db (+)= sum over rows of dy`: dy `[T, N]` → f32 `[N]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BiasGrad {}

impl OpRule for BiasGrad {
    fn name(&self) -> &'static str {
        "bias_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy"])?;
        check.same_float(&[0])?;
        let width: Dim = check.rank(0, 2)?[1];
        Ok(vec![OutputType::accumulator("db", Shape(vec![width]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }
}
