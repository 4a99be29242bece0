//! Attention in which each head may look at nothing.

use serde::{Deserialize, Serialize};

use super::Check;
use super::attention::{AttentionHeads, causal_scores};
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, OpError, Shape};

/// q `[T, H·D]`, k, v `[T, KV·D]`, sinks `[H]` → o `[T, H·D]`, lse f32 `[B, H, S]`.
///
/// A head's sink takes part in the softmax like the score of one more key, whose value is zero; lse
/// counts it. No kernel computes it yet, nor has it a derivative: it holds a model's structure and
/// counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SinkAttention {
    /// Heads and mask.
    pub heads: AttentionHeads,
    /// Tokens that a token sees, itself included; all before it if `None`.
    pub window: Option<usize>,
}

impl OpRule for SinkAttention {
    fn name(&self) -> &'static str {
        "sink_attention"
    }

    fn attributes(&self) -> String {
        match self.window {
            Some(window) => format!("{} window={window}", self.heads.text()),
            None => self.heads.text(),
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["q", "k", "v", "sinks"])?;
        if self.window == Some(0) {
            return Err(check.error("a window of 1 token or more", "0"));
        }
        let dtype = check.same_float(&[0, 1, 2, 3])?;
        self.heads.check(&check, 0, 1, 2)?;
        check.shape(3, &Shape::new([self.heads.heads]))?;
        let lse = Shape(vec![Dim::BATCH, Dim::fixed(self.heads.heads), Dim::SEQ]);
        Ok(vec![
            OutputType::activation("", inputs[0].shape.clone(), dtype),
            OutputType::statistic("lse", lse, DType::F32),
        ])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let (batch, heads, seq) = (shapes[5][0] as u64, shapes[5][1] as u64, shapes[5][2] as u64);
        4 * batch * heads * causal_scores(seq, self.window) * self.heads.head_dim as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }
}
