//! Learned positions.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError, Shape};

/// `out[t, :] = x[t, :] + table[t mod S, :]` for sequence length `S`: x `[T, D]`, table `[P, D]`
/// with `P >= S` → `[T, D]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddPositions {}

impl OpRule for AddPositions {
    fn name(&self) -> &'static str {
        "add_positions"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        infer_sum(self.name(), inputs)
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, table) = (node.inputs[0], node.inputs[1]);
        let dtable = context.parameter_gradient(table);
        let op = AddPositionsBackward { positions: context.shape(table).0[0].as_fixed() };
        context.emit(op, "", &[dout], &[dtable])?;
        context.contribute(x, dout)
    }
}

/// `dtable[s, :] (+)= sum of dout[t, :] over t mod S = s`: dout → dtable f32 `[P, D]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddPositionsBackward {
    /// Rows of the table.
    pub positions: Option<usize>,
}

impl OpRule for AddPositionsBackward {
    fn name(&self) -> &'static str {
        "add_positions_backward"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        infer_table_gradient(self.name(), self.positions, inputs)
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }
}

/// [`AddPositions`] for one of `ranks` equal parts of a micro-batch's tokens: row `r` of part `p`
/// is token `p · T + r`. x `[T, D]`, table `[P, D]` → `[T, D]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddPositionsOfPart {
    /// Index of the part, counted from 0.
    pub place: usize,
    /// Number of parts.
    pub ranks: usize,
}

impl OpRule for AddPositionsOfPart {
    fn name(&self) -> &'static str {
        "add_positions_of_part"
    }

    fn attributes(&self) -> String {
        format!("part={} of {}", self.place, self.ranks)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        infer_sum(self.name(), inputs)
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (x, table) = (node.inputs[0], node.inputs[1]);
        let dtable = context.parameter_gradient(table);
        let op = AddPositionsOfPartBackward {
            positions: context.shape(table).0[0].as_fixed(),
            place: self.place,
            ranks: self.ranks,
        };
        context.emit(op, "", &[dout], &[dtable])?;
        context.contribute(x, dout)
    }
}

/// `dtable[s, :] (+)= sum of dout[r, :] over (p · T + r) mod S = s`, for part `p`: dout `[T,
/// D]` → dtable f32 `[P, D]`. The gradient is the sum over ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddPositionsOfPartBackward {
    /// Rows of the table.
    pub positions: Option<usize>,
    /// Index of the part, counted from 0.
    pub place: usize,
    /// Number of parts.
    pub ranks: usize,
}

impl OpRule for AddPositionsOfPartBackward {
    fn name(&self) -> &'static str {
        "add_positions_of_part_backward"
    }

    fn attributes(&self) -> String {
        format!("part={} of {}", self.place, self.ranks)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        infer_table_gradient(self.name(), self.positions, inputs)
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }
}

/// Output type for x `[T, D]` and a table `[P, D]`: the type of x.
fn infer_sum(name: &'static str, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
    let check = Check::count(name, inputs, &["x", "table"])?;
    let dtype = check.same_float(&[0, 1])?;
    let x = check.rank(0, 2)?;
    let positions = check.rank(1, 2)?[0];
    check.shape(1, &Shape(vec![positions, x[1]]))?;
    Ok(vec![OutputType::activation("", inputs[0].shape.clone(), dtype)])
}

/// Gradient type for dout `[T, D]`: `[positions, D]`.
fn infer_table_gradient(
    name: &'static str,
    positions: Option<usize>,
    inputs: &[TensorType],
) -> Result<Vec<OutputType>, OpError> {
    let check = Check::count(name, inputs, &["dout"])?;
    check.same_float(&[0])?;
    let width = check.rank(0, 2)?[1];
    let positions =
        positions.ok_or_else(|| check.error("a table of known height", "an open one"))?;
    Ok(vec![OutputType::accumulator("dtable", Shape::new([positions.into(), width]))])
}
