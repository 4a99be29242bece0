//! Biases of experts, added to grouped rows (see [`super::Dispatch`]).

use serde::{Deserialize, Serialize};

use super::permute::check_maps;
use super::{Check, GroupedRows, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// x `[R, N]`, bias `[E, N]`, offsets i32 `[E + 1]`, gates f32 `[T, K]`, rows i32 `[T, K]`, pairs
/// i32 `[R]` → `[R, N]`: adds the bias of each row's group to the row; a row without a pair stays
/// zero.
///
/// If gated, the bias is first multiplied by the gate of the row's pair: for a down projection,
/// whose input [`super::ExpertSwiGlu`] has multiplied. Otherwise the gates are not read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedBias {
    /// Groups and their alignment.
    pub grouped: GroupedRows,
    /// Whether the gate of a pair multiplies the bias.
    pub gated: bool,
}

const OPERANDS: [&str; 6] = ["x", "bias", "offsets", "gates", "rows", "pairs"];

impl GroupedBias {
    /// Checks the forward operands; in the backward op, x is the gradient of the result.
    fn check(&self, check: &Check<'_>) -> Result<DType, OpError> {
        let dtype = check.same_float(&[0, 1])?;
        self.grouped.check_offsets(check, 2)?;
        let x = check.rank(0, 2)?;
        check.shape(1, &Shape(vec![Dim::fixed(self.grouped.groups), x[1]]))?;
        check.dtype(3, DType::F32)?;
        check_maps(check, 4)?;
        check.shape(3, &check.inputs[4].shape)?;
        check.shape(5, &Shape(vec![x[0]]))?;
        Ok(dtype)
    }

    fn text(&self) -> String {
        let gated = if self.gated { " gated" } else { "" };
        format!("{}{gated}", self.grouped.describe())
    }
}

impl OpRule for GroupedBias {
    fn name(&self) -> &'static str {
        "grouped_bias"
    }

    fn attributes(&self) -> String {
        self.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &OPERANDS)?;
        let dtype = self.check(&check)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        (1 + u64::from(self.gated)) * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, bias, gates) = (node.inputs[0], node.inputs[1], node.inputs[3]);
        let inputs = [&[dout], &node.inputs[1..]].concat();
        let outputs = [Some(context.parameter_gradient(bias)), None];
        let op = GroupedBiasBackward { forward: self.clone() };
        let made = context.emit_with(op, "", &inputs, &outputs[..1 + usize::from(self.gated)])?;
        if self.gated {
            context.contribute(gates, made[1])?;
        }
        context.contribute(x, dout)
    }
}

/// dout `[R, N]`, bias, offsets, gates, rows, pairs → dbias f32 `[E, N]` `(+)=` (, dgates f32
/// `[T, K]`, where the forward is gated).
///
/// The dgates entry of a pair is the dot product of the pair's row of dout with the expert's bias;
/// 0 for a dropped pair. The gradient of x is dout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedBiasBackward {
    /// The forward op.
    pub forward: GroupedBias,
}

impl OpRule for GroupedBiasBackward {
    fn name(&self) -> &'static str {
        "grouped_bias_backward"
    }

    fn attributes(&self) -> String {
        self.forward.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = [&["dout"], &OPERANDS[1..]].concat();
        let check = Check::count(self.name(), inputs, &names)?;
        self.forward.check(&check)?;
        let mut outputs = vec![OutputType::accumulator("dbias", inputs[1].shape.clone())];
        if self.forward.gated {
            let shape = inputs[3].shape.clone();
            outputs.push(OutputType::statistic("dgates", shape, DType::F32));
        }
        Ok(outputs)
    }

    fn result_count(&self) -> usize {
        1 + usize::from(self.forward.gated)
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        (1 + 3 * u64::from(self.forward.gated)) * product(&shapes[0])
    }
}
