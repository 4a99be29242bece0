//! Token rows to pair rows and back, see [`super::Dispatch`].

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, IrError, Node, OpError, Shape};

/// x `[T, D]`, rows i32 `[T, K]`, pairs i32 `[R]` → `[R, D]`: each row is the row of the pair's
/// token, zero without a pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Permute {}

impl OpRule for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "rows", "pairs"])?;
        let dtype = check.same_float(&[0])?;
        let x = check.rank(0, 2)?;
        check_maps(&check, 1)?;
        check.shape(1, &Shape(vec![x[0], check.rank(1, 2)?[1]]))?;
        let rows = check.rank(2, 1)?[0];
        Ok(vec![like_rows(Shape(vec![rows, x[1]]), dtype)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let inputs = [dout, node.inputs[1], node.inputs[2]];
        let dx = context.emit_fresh(Unpermute {}, "", &inputs)?[0];
        context.contribute(node.inputs[0], dx)
    }
}

/// y `[R, D]`, rows i32 `[T, K]`, pairs i32 `[R]` → `[T, D]`: for each token the sum of the rows of
/// its pairs, in ascending order, in FP32 and rounded once. A dropped pair adds nothing.
///
/// No gates are applied, as [`super::ExpertSwiGlu`] has already applied the gates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unpermute {}

impl OpRule for Unpermute {
    fn name(&self) -> &'static str {
        "unpermute"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["y", "rows", "pairs"])?;
        let dtype = check.same_float(&[0])?;
        let y = check.rank(0, 2)?;
        check_maps(&check, 1)?;
        check.shape(2, &Shape(vec![y[0]]))?;
        let tokens = check.rank(1, 2)?[0];
        Ok(vec![like_rows(Shape(vec![tokens, y[1]]), dtype)])
    }

    /// One addition per element of each pair.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[1]) * shapes[0][1] as u64
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let inputs = [dout, node.inputs[1], node.inputs[2]];
        let dy = context.emit_fresh(Permute {}, "", &inputs)?[0];
        context.contribute(node.inputs[0], dy)
    }
}

/// y, z `[R, D]`, rows i32 `[T, K]`, pairs i32 `[R]` → `[T, D]`: [`Unpermute`] of y + z, rounded to
/// storage precision but not stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddUnpermute {}

impl OpRule for AddUnpermute {
    fn name(&self) -> &'static str {
        "add_unpermute"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["y", "z", "rows", "pairs"])?;
        let dtype = check.same_float(&[0, 1])?;
        let y = check.rank(0, 2)?;
        check.shape(1, &inputs[0].shape)?;
        check_maps(&check, 2)?;
        check.shape(3, &Shape(vec![y[0]]))?;
        let tokens = check.rank(2, 2)?[0];
        Ok(vec![like_rows(Shape(vec![tokens, y[1]]), dtype)])
    }

    /// The sum, and one addition per element of each pair.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0]) + product(&shapes[2]) * shapes[0][1] as u64
    }
}

/// Permuted activations are activations; permuted gates stay in FP32.
fn like_rows(shape: Shape, dtype: DType) -> OutputType {
    OutputType { suffix: "".into(), shape, dtype, kind: OutputKind::SameAsInput }
}

/// Checks that inputs `first` and `first + 1` are `rows` and `pairs`.
pub(super) fn check_maps(check: &Check<'_>, first: usize) -> Result<(), OpError> {
    check.dtype(first, DType::I32)?;
    check.rank(first, 2)?;
    check.fixed(first, 1)?;
    check.dtype(first + 1, DType::I32)?;
    check.rank(first + 1, 1)?;
    Ok(())
}
