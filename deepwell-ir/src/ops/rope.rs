//! Rotary position embedding (Su et al., arXiv 2104.09864), by default in the half-split convention
//! of Hugging Face's llama: element `i` of a head rotates with element `i + head_dim / 2`.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, IrError, Node, OpError, Shape};

/// Rotates each head of x `[T, heads · head_dim]`; token `t` has position `t mod S`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Number of heads in a row.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Leading columns of a head that are not rotated; an even number of columns follows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub plain_dim: usize,
    /// Whether adjacent elements form a pair (DeepSeek-V3), rather than elements of the two halves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interleaved: bool,
    /// Radians per position for each pair, `(head_dim - plain_dim) / 2` values, scaling included.
    pub inverse_frequencies: Vec<f32>,
    /// Factor on sine and cosine; 1 if the scaling rule sets none.
    pub attention_factor: f32,
}

fn is_zero(size: &usize) -> bool {
    *size == 0
}

impl Rope {
    pub(super) fn check(
        &self,
        name: &'static str,
        inputs: &[TensorType],
    ) -> Result<Shape, OpError> {
        let check = Check::count(name, inputs, &["x"])?;
        check.same_float(&[0])?;
        check.rank(0, 2)?;
        let width = check.fixed(0, 1)?;
        if width != self.heads * self.head_dim {
            return Err(check.error(
                format!("rows of {} heads x {}", self.heads, self.head_dim),
                width.to_string(),
            ));
        }
        if self.inverse_frequencies.len() * 2 + self.plain_dim != self.head_dim {
            return Err(check.error(
                "an even head_dim with head_dim/2 inverse frequencies",
                match self.plain_dim {
                    0 => format!("{} with {}", self.head_dim, self.inverse_frequencies.len()),
                    plain => format!(
                        "{} of which {plain} do not turn with {}",
                        self.head_dim,
                        self.inverse_frequencies.len()
                    ),
                },
            ));
        }
        Ok(inputs[0].shape.clone())
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("heads={} head_dim={}", self.heads, self.head_dim);
        if self.plain_dim > 0 {
            text.push_str(&format!(" plain_dim={}", self.plain_dim));
        }
        if self.interleaved {
            text.push_str(" interleaved");
        }
        text
    }
}

impl OpRule for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn attributes(&self) -> String {
        self.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let shape = self.check(self.name(), inputs)?;
        Ok(vec![OutputType::activation("", shape, inputs[0].dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let dx = context.emit_fresh(RopeBackward { forward: self.clone() }, "", &[dy])?[0];
        context.contribute(node.inputs[0], dx)
    }
}

/// Rotation by the negative angle: the transpose of a rotation is its inverse.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeBackward {
    /// The forward rotation.
    pub forward: Rope,
}

impl OpRule for RopeBackward {
    fn name(&self) -> &'static str {
        "rope_backward"
    }

    fn attributes(&self) -> String {
        self.forward.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let shape = self.forward.check(self.name(), inputs)?;
        Ok(vec![OutputType::activation("", shape, inputs[0].dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }
}

/// Rotates each head of x `[T, heads · head_dim]` by angles of a table `[P, head_dim]` (F32): of
/// row `t mod P`, cosines and then sines of the pairs, which are half a head apart. For tokens
/// whose positions are data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeByTable {
    /// Number of heads in a row.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether to rotate by the negative angle, as the gradient does.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub back: bool,
}

impl OpRule for RopeByTable {
    fn name(&self) -> &'static str {
        "rope_by_table"
    }

    fn attributes(&self) -> String {
        let back = if self.back { " back" } else { "" };
        format!("heads={} head_dim={}{back}", self.heads, self.head_dim)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "table"])?;
        check.same_float(&[0])?;
        check.dtype(1, DType::F32)?;
        check.rank(0, 2)?;
        check.rank(1, 2)?;
        let (width, angles) = (check.fixed(0, 1)?, check.fixed(1, 1)?);
        if width != self.heads * self.head_dim || angles != self.head_dim || angles % 2 != 0 {
            return Err(check.error(
                format!(
                    "rows of {} heads x {}, even, and a table as wide as a head",
                    self.heads, self.head_dim
                ),
                format!("rows of {width} and a table of {angles}"),
            ));
        }
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), inputs[0].dtype)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let op = RopeByTable { back: !self.back, ..self.clone() };
        let dx = context.emit_fresh(op, "", &[dy, node.inputs[1]])?[0];
        context.contribute(node.inputs[0], dx)
    }
}
