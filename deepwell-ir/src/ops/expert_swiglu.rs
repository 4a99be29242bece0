//! The gated activation of experts, times the router's gates.

use serde::{Deserialize, Serialize};

use super::permute::check_maps;
use super::{Check, ExpertActivation, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, IrError, Node, OpError, Shape};

/// gate, up `[R, F]`, gates f32 `[T, K]`, rows i32 `[T, K]`, pairs i32 `[R]` → `[R, F]`: the
/// activation of each row times the gate of its pair, zero for a row without a pair.
///
/// The gate multiplies the input of the down projection, not the output (as in Megatron-LM;
/// transformers multiplies the output). In exact arithmetic both are equal, but here the gradient
/// of the gate is `⟨dout, activation⟩`, so expert outputs need not be kept. In MXFP8, the gated
/// activation is quantized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertSwiGlu {
    /// The activation.
    pub activation: ExpertActivation,
}

const OPERANDS: [&str; 5] = ["gate", "up", "gates", "rows", "pairs"];

/// Checks the forward operands from input `first` on; returns the element type.
fn check_operands(check: &Check<'_>, first: usize) -> Result<DType, OpError> {
    let dtype = check.same_float(&[first, first + 1])?;
    let gate = check.rank(first, 2)?;
    check.shape(first + 1, &check.inputs[first].shape)?;
    check.dtype(first + 2, DType::F32)?;
    check_maps(check, first + 3)?;
    check.shape(first + 2, &check.inputs[first + 3].shape)?;
    check.shape(first + 4, &Shape(vec![gate[0]]))?;
    Ok(dtype)
}

impl OpRule for ExpertSwiGlu {
    fn name(&self) -> &'static str {
        "expert_swiglu"
    }

    fn attributes(&self) -> String {
        self.activation.describe()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &OPERANDS)?;
        let dtype = check_operands(&check, 0)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        6 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let inputs = [&[dout], &node.inputs[..]].concat();
        let op = ExpertSwiGluBackward { activation: self.activation };
        let gradients = context.emit_fresh(op, "", &inputs)?;
        for (&input, gradient) in node.inputs.iter().zip(gradients) {
            context.contribute(input, gradient)?;
        }
        Ok(())
    }
}

/// dout, gate, up `[R, F]`, gates, rows, pairs → dgate, dup `[R, F]`, dgates f32 `[T, K]`.
///
/// The dgates entry of a pair is the dot product of the pair's row of `dout` with the recomputed
/// activation of that row; 0 for a dropped pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertSwiGluBackward {
    /// The activation.
    pub activation: ExpertActivation,
}

impl OpRule for ExpertSwiGluBackward {
    fn name(&self) -> &'static str {
        "expert_swiglu_backward"
    }

    fn attributes(&self) -> String {
        self.activation.describe()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = [&["dout"][..], &OPERANDS].concat();
        let check = Check::count(self.name(), inputs, &names)?;
        let dtype = check_operands(&check, 1)?;
        check.dtype(0, dtype)?;
        check.shape(0, &inputs[1].shape)?;
        let matrix = |suffix| OutputType::activation(suffix, inputs[1].shape.clone(), dtype);
        Ok(vec![
            matrix("dgate"),
            matrix("dup"),
            OutputType::statistic("dgates", inputs[3].shape.clone(), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        3
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        13 * product(&shapes[1])
    }
}
