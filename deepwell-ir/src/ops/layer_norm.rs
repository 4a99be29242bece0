//! Layer normalization (Ba, Kiros and Hinton, arXiv 1607.06450, section 3).

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// `y = (x - mean) · rstd · w + b` with the mean and `rstd = 1 / sqrt(variance + eps)` of each row,
/// where the variance divides by D, not D - 1: x `[T, D]`, w `[D]`, b `[D]` → y `[T, D]`, mean f32
/// `[T]`, rstd f32 `[T]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

/// Mean and reciprocal standard deviation of each row.
fn statistics(rows: Dim) -> [OutputType; 2] {
    let of_row = |suffix| OutputType::statistic(suffix, Shape(vec![rows]), DType::F32);
    [of_row("mean"), of_row("rstd")]
}

impl OpRule for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn attributes(&self) -> String {
        format!("eps={:e}", self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "w", "b"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        let x = check.rank(0, 2)?;
        check.shape(1, &Shape(vec![x[1]]))?;
        check.shape(2, &Shape(vec![x[1]]))?;
        let [mean, rstd] = statistics(x[0]);
        Ok(vec![OutputType::activation("", Shape(x.to_vec()), dtype), mean, rstd])
    }

    fn result_count(&self) -> usize {
        3
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Mean 1, variance 3, normalization 4.
        8 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, w, b) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let dw = context.parameter_gradient(w);
        let db = context.parameter_gradient(b);
        // The residual branch contributes to `x` before this op in backward order; the op adds that
        // gradient.
        let residual = context.take_gradient(x);
        let mut inputs = vec![dy, x, w, node.outputs[1], node.outputs[2]];
        inputs.extend(residual);
        let op = LayerNormBackward { residual: residual.is_some() };
        let dx = context.emit_with(op, "", &inputs, &[None, Some(dw), Some(db)])?[0];
        context.contribute(x, dx)
    }
}

/// `sum = x + delta`, then [`LayerNorm`] of the stored sum: x, delta, w, b → sum, y, mean, rstd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddLayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

impl OpRule for AddLayerNorm {
    fn name(&self) -> &'static str {
        "add_layer_norm"
    }

    fn attributes(&self) -> String {
        format!("eps={:e}", self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "delta", "w", "b"])?;
        let dtype = check.same_float(&[0, 1, 2, 3])?;
        let x = check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        check.shape(2, &Shape(vec![x[1]]))?;
        check.shape(3, &Shape(vec![x[1]]))?;
        let [mean, rstd] = statistics(x[0]);
        Ok(vec![
            OutputType::activation("sum", Shape(x.to_vec()), dtype),
            OutputType::activation("", Shape(x.to_vec()), dtype),
            mean,
            rstd,
        ])
    }

    fn result_count(&self) -> usize {
        4
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        9 * product(&shapes[0])
    }
}

/// dy, x, w, mean, rstd (, dresidual) → dx (plus dresidual), dw f32 `(+)=`, db f32 `(+)=`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNormBackward {
    /// Whether a sixth operand is added to dx.
    pub residual: bool,
}

impl OpRule for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn attributes(&self) -> String {
        if self.residual { "residual".to_string() } else { String::new() }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let mut names = vec!["dy", "x", "w", "mean", "rstd"];
        if self.residual {
            names.push("dresidual");
        }
        let check = Check::count(self.name(), inputs, &names)?;
        let dtype = check.same_float(&[0, 1, 2])?;
        let x = check.rank(1, 2)?;
        check.shape(0, &inputs[1].shape)?;
        check.shape(2, &Shape(vec![x[1]]))?;
        for statistic in [3, 4] {
            check.shape(statistic, &Shape(vec![x[0]]))?;
            check.dtype(statistic, DType::F32)?;
        }
        if self.residual {
            check.shape(5, &inputs[1].shape)?;
            check.dtype(5, dtype)?;
        }
        Ok(vec![
            OutputType::activation("", Shape(x.to_vec()), dtype),
            OutputType::accumulator("dw", Shape(vec![x[1]])),
            OutputType::accumulator("db", Shape(vec![x[1]])),
        ])
    }

    fn result_count(&self) -> usize {
        3
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        14 * product(&shapes[1])
    }
}
