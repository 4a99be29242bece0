//! The projection of a mixture's router, in FP32.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, MathUnit, Node, OpError, Shape};

/// x `[T, D]`, w f32 `[E, D]` (, bias f32 `[E]`) → logits f32 `[T, E]`: the projection of a router,
/// computed in FP32 from the master weights for any storage type of `x`. Rounded logits would
/// change the selection of a few percent of the tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLogits {
    /// Whether a third operand is added to each row.
    pub bias: bool,
}

fn check_router(check: &Check<'_>, x: usize) -> Result<[Dim; 3], OpError> {
    check.same_float(&[x])?;
    check.dtype(x + 1, DType::F32)?;
    let (of_x, w) = (check.rank(x, 2)?, check.rank(x + 1, 2)?);
    check.shape(x + 1, &Shape(vec![w[0], of_x[1]]))?;
    Ok([of_x[0], w[0], w[1]])
}

impl OpRule for RouterLogits {
    fn name(&self) -> &'static str {
        "router_logits"
    }

    fn attributes(&self) -> String {
        if self.bias { "bias".to_string() } else { String::new() }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names: &[&str] = if self.bias { &["x", "w", "bias"] } else { &["x", "w"] };
        let check = Check::count(self.name(), inputs, names)?;
        let [tokens, experts, _] = check_router(&check, 0)?;
        if self.bias {
            check.dtype(2, DType::F32)?;
            check.shape(2, &Shape(vec![experts]))?;
        }
        Ok(vec![OutputType::statistic("", Shape(vec![tokens, experts]), DType::F32)])
    }

    /// FP32 accuracy; on tensor cores, FP32 operands are split into BF16 parts.
    fn unit(&self, _operands: &[DType]) -> MathUnit {
        MathUnit::Bf16
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[1][0] as u64
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dlogits) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let dw = context.parameter_gradient(w);
        if self.bias {
            let db = context.parameter_gradient(node.inputs[2]);
            context.emit(super::BiasGrad {}, "bgrad", &[dlogits], &[db])?;
        }
        let outputs = [None, Some(dw)];
        let op = RouterLogitsBackward {};
        let made = context.emit_with(op, "", &[dlogits, x, w], &outputs)?;
        context.contribute(x, made[0])
    }
}

/// dlogits f32 `[T, E]`, x `[T, D]`, w f32 `[E, D]` → dx `[T, D]`, dw f32 `[E, D]` `(+)=`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLogitsBackward {}

impl OpRule for RouterLogitsBackward {
    fn name(&self) -> &'static str {
        "router_logits_backward"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dlogits", "x", "w"])?;
        let [tokens, experts, _] = check_router(&check, 1)?;
        check.dtype(0, DType::F32)?;
        check.shape(0, &Shape(vec![tokens, experts]))?;
        Ok(vec![
            OutputType::activation("dx", inputs[1].shape.clone(), inputs[1].dtype),
            OutputType::accumulator("dw", inputs[2].shape.clone()),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn unit(&self, _operands: &[DType]) -> MathUnit {
        MathUnit::Bf16
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        4 * product(&shapes[1]) * shapes[2][0] as u64
    }
}
