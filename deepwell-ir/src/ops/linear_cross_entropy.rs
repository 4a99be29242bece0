//! Output head and cross-entropy in one op, by chunks of tokens, so that the full logits are never
//! stored.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// Targets with this value do not count in the loss, as in PyTorch.
pub const IGNORED_TARGET: i32 = -100;

fn check<'a>(op: &'static str, inputs: &'a [TensorType]) -> Result<Check<'a>, OpError> {
    let check = Check::count(op, inputs, &["x", "w", "targets", "loss_scale"])?;
    check.same_float(&[0, 1])?;
    let x = check.rank(0, 2)?;
    let w = check.rank(1, 2)?;
    check.shape(1, &Shape(vec![w[0], x[1]]))?;
    check.dtype(2, DType::I32)?;
    check.shape(2, &Shape(vec![x[0]]))?;
    check.dtype(3, DType::F32)?;
    check.shape(3, &Shape(vec![Dim::fixed(1)]))?;
    Ok(check)
}

fn unit(operands: &[DType]) -> MathUnit {
    if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
}

/// x `[T, D]`, w `[V, D]`, targets i32 `[T]`, loss_scale f32 `[1]` →
/// `loss (+)= loss_scale · sum over tokens of (lse - logit of the target)`.
///
/// `loss_scale` is the reciprocal of the step's token count, which makes the loss a mean.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCrossEntropy {}

impl OpRule for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        check(self.name(), inputs)?;
        Ok(vec![OutputType::accumulator("loss", Shape(vec![Dim::fixed(1)]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[1][0] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        // The gradient of the loss itself is one, so forward and backward are a single pass and the
        // gradient node replaces this one.
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let dw = context.parameter_gradient(w);
        context.replace_forward();
        let outputs = [Some(node.outputs[0]), None, Some(dw)];
        let made = context.emit_with(LinearCrossEntropyGrad {}, "", &node.inputs, &outputs)?;
        context.contribute(x, made[1])
    }
}

/// Like [`LinearCrossEntropy`], with dx `[T, D]` and dw f32 `[V, D]` `(+)=` in the same pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCrossEntropyGrad {}

impl OpRule for LinearCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        check(self.name(), inputs)?;
        Ok(vec![
            OutputType::accumulator("loss", Shape(vec![Dim::fixed(1)])),
            OutputType::activation("dx", inputs[0].shape.clone(), inputs[0].dtype),
            OutputType::accumulator("dw", inputs[1].shape.clone()),
        ])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        6 * product(&shapes[0]) * shapes[1][0] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }
}
