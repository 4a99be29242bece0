//! Root-mean-square normalization of each head of queries or keys (Henry et al., arXiv
//! 2010.04245, with RMSNorm in place of the length).

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// `y = x · rstd · w` within each head, `rstd = 1 / sqrt(mean(x²) + eps)` over a head's D
/// elements: x `[T, H·D]`, w `[D]` → y `[T, H·D]`, rstd f32 `[T·H]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadRmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

/// `T·H` for operand `x` with gain `w`, given as operand indices.
fn heads_of_all_rows(check: &Check<'_>, x: usize, w: usize) -> Result<Dim, OpError> {
    let rows = check.rank(x, 2)?[0];
    check.rank(w, 1)?;
    let (width, head_dim) = (check.fixed(x, 1)?, check.fixed(w, 0)?);
    if head_dim == 0 || !width.is_multiple_of(head_dim) {
        return Err(check.error(format!("a width of whole heads of {head_dim}"), width.to_string()));
    }
    Ok(rows.times(width / head_dim))
}

impl OpRule for HeadRmsNorm {
    fn name(&self) -> &'static str {
        "head_rms_norm"
    }

    fn attributes(&self) -> String {
        format!("eps={:e}", self.eps)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "w"])?;
        let dtype = check.same_float(&[0, 1])?;
        let heads = heads_of_all_rows(&check, 0, 1)?;
        Ok(vec![
            OutputType::activation("", inputs[0].shape.clone(), dtype),
            OutputType::statistic("rstd", Shape(vec![heads]), DType::F32),
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
        let inputs = [dy, x, w, node.outputs[1]];
        let dx = context.emit_with(HeadRmsNormBackward {}, "", &inputs, &[None, Some(dw)])?[0];
        context.contribute(x, dx)
    }
}

/// dy, x, w, rstd → dx, dw f32 `(+)=`, summed over tokens and heads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadRmsNormBackward {}

impl OpRule for HeadRmsNormBackward {
    fn name(&self) -> &'static str {
        "head_rms_norm_backward"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dy", "x", "w", "rstd"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        let heads = heads_of_all_rows(&check, 1, 2)?;
        check.shape(0, &inputs[1].shape)?;
        check.shape(3, &Shape(vec![heads]))?;
        check.dtype(3, DType::F32)?;
        Ok(vec![
            OutputType::activation("", inputs[1].shape.clone(), dtype),
            OutputType::accumulator("dw", inputs[2].shape.clone()),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        10 * product(&shapes[1])
    }
}
