//! Root-mean-square normalization (Zhang and Sennrich, arXiv 1910.07467, equation 4).

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, IrError, Node, OpError, Shape};

/// `y = x · rstd · w`, `rstd = 1 / sqrt(mean(x²) + eps)`: x `[T, D]`, w `[D]` → y `[T, D]`,
/// rstd f32 `[T]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

impl OpRule for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn attributes(&self) -> String {
        format!("eps={:e}", self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "w"])?;
        let dtype = check.same_float(&[0, 1])?;
        let x = check.rank(0, 2)?;
        check.shape(1, &Shape(vec![x[1]]))?;
        Ok(vec![
            OutputType::activation("", Shape(x.to_vec()), dtype),
            OutputType::statistic("rstd", Shape(vec![x[0]]), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        4 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let dw = context.parameter_gradient(w);
        // The residual branch contributes to `x` before this op in backward order; the op adds that
        // gradient.
        let residual = context.take_gradient(x);
        let mut inputs = vec![dy, x, w, node.outputs[1]];
        inputs.extend(residual);
        let op = RmsNormBackward { residual: residual.is_some() };
        let dx = context.emit_with(op, "", &inputs, &[None, Some(dw)])?[0];
        context.contribute(x, dx)
    }
}

/// `sum = x + delta`, then [`RmsNorm`] of the stored sum: → sum, y, rstd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddRmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

impl OpRule for AddRmsNorm {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn attributes(&self) -> String {
        format!("eps={:e}", self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "delta", "w"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        let x = check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        check.shape(2, &Shape(vec![x[1]]))?;
        Ok(vec![
            OutputType::activation("sum", Shape(x.to_vec()), dtype),
            OutputType::activation("", Shape(x.to_vec()), dtype),
            OutputType::statistic("rstd", Shape(vec![x[0]]), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        3
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        5 * product(&shapes[0])
    }
}

/// dy, x, w, rstd (, dresidual) → dx (plus dresidual), dw f32 `(+)=`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormBackward {
    /// Whether a fifth operand is added to dx.
    pub residual: bool,
}

impl OpRule for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn attributes(&self) -> String {
        if self.residual { "residual".to_string() } else { String::new() }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let mut names = vec!["dy", "x", "w", "rstd"];
        if self.residual {
            names.push("dresidual");
        }
        let check = Check::count(self.name(), inputs, &names)?;
        let dtype = check.same_float(&[0, 1, 2])?;
        let x = check.rank(1, 2)?;
        check.shape(0, &inputs[1].shape)?;
        check.shape(2, &Shape(vec![x[1]]))?;
        check.shape(3, &Shape(vec![x[0]]))?;
        check.dtype(3, DType::F32)?;
        if self.residual {
            check.shape(4, &inputs[1].shape)?;
            check.dtype(4, dtype)?;
        }
        Ok(vec![
            OutputType::activation("", Shape(x.to_vec()), dtype),
            OutputType::accumulator("dw", Shape(vec![x[1]])),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        10 * product(&shapes[1])
    }
}
