//! Rotary position embedding (Su et al., arXiv 2104.09864), as a rule in the half-split convention
//! of Hugging Face's llama: element `i` of a head turns with element `i + head_dim / 2`.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{IrError, Node, OpError, Shape};

/// Rotates each head of x `[T, heads · head_dim]`; token `t` stands at position `t mod S`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Heads side by side in a row.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Columns at the beginning of a head that do not turn; an even number follows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub plain_dim: usize,
    /// Whether a pair is two neighbors (DeepSeek-V3), not an element of each half.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interleaved: bool,
    /// Radians per position of each pair, `(head_dim - plain_dim) / 2` values, any scaling
    /// included.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies sine and cosine; 1 unless the scaling rule says otherwise.
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

/// The rotation by the negative angle: a rotation's transpose is its inverse.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeBackward {
    /// The rotation of the forward.
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
