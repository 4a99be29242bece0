//! Scaled dot-product attention with grouped query heads.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::autodiff::BackwardContext;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// Heads of an attention and its mask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionHeads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies the scores, `1/sqrt(head_dim)` as a rule.
    pub scale: f64,
    /// Whether a token sees only itself and what came before.
    pub causal: bool,
}

impl AttentionHeads {
    pub(super) fn text(&self) -> String {
        format!(
            "heads={} kv_heads={} head_dim={}{}",
            self.heads,
            self.kv_heads,
            self.head_dim,
            if self.causal { " causal" } else { "" }
        )
    }

    pub(super) fn check(
        &self,
        check: &Check<'_>,
        q: usize,
        k: usize,
        v: usize,
    ) -> Result<(), OpError> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(check.error(
                "query heads a multiple of key/value heads",
                format!("{} and {}", self.heads, self.kv_heads),
            ));
        }
        let tokens = check.rank(q, 2)?[0];
        check.shape(q, &Shape(vec![tokens, Dim::fixed(self.heads * self.head_dim)]))?;
        let kv_shape = Shape(vec![tokens, Dim::fixed(self.kv_heads * self.head_dim)]);
        check.shape(k, &kv_shape)?;
        check.shape(v, &kv_shape)
    }

    /// Multiply-adds of one `[S, S] x D` GEMM over all heads, from the shape of lse.
    fn gemm_flops(&self, lse: &[usize]) -> u64 {
        let (batch, heads, seq) = (lse[0] as u64, lse[1] as u64, lse[2] as u64);
        let scores = if self.causal { causal_scores(seq, None) } else { seq * seq };
        2 * batch * heads * scores * self.head_dim as u64
    }
}

/// Scores that a causal mask leaves of one head's, in windows of at most `window` tokens.
pub(super) fn causal_scores(seq: u64, window: Option<usize>) -> u64 {
    let window = window.map_or(seq, |window| (window as u64).min(seq));
    // The first tokens see 1, 2, ... tokens, all others a whole window.
    window * (window + 1) / 2 + (seq - window) * window
}

/// q `[T, H·D]`, k, v `[T, KV·D]` → o `[T, H·D]`, lse f32 `[B, H, S]` (natural logarithm of the
/// sum of exponentials of the scaled scores).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Heads and mask.
    pub heads: AttentionHeads,
}

impl OpRule for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn attributes(&self) -> String {
        self.heads.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["q", "k", "v"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        self.heads.check(&check, 0, 1, 2)?;
        let lse = Shape(vec![Dim::BATCH, Dim::fixed(self.heads.heads), Dim::SEQ]);
        Ok(vec![
            OutputType::activation("", inputs[0].shape.clone(), dtype),
            OutputType::statistic("lse", lse, DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * self.heads.gemm_flops(&shapes[4])
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (q, k, v) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let inputs = [dout, q, k, v, node.outputs[0], node.outputs[1]];
        let op = AttentionBackward { heads: self.heads.clone() };
        let gradients = context.emit_fresh(op, "", &inputs)?;
        for (tensor, gradient) in [q, k, v].into_iter().zip(gradients) {
            context.contribute(tensor, gradient)?;
        }
        Ok(())
    }
}

/// [`Attention`] in which a token sees itself and the `window - 1` tokens before it. No kernel
/// computes it yet, nor has it a derivative: it holds a model's structure and counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowAttention {
    /// Heads and mask.
    pub heads: AttentionHeads,
    /// Tokens that a token sees, itself included.
    pub window: usize,
}

impl OpRule for WindowAttention {
    fn name(&self) -> &'static str {
        "window_attention"
    }

    fn attributes(&self) -> String {
        format!("{} window={}", self.heads.text(), self.window)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check { op: self.name(), inputs };
        if self.window == 0 {
            return Err(check.error("a window of 1 token or more", "0"));
        }
        let check = Check::count(self.name(), inputs, &["q", "k", "v"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        self.heads.check(&check, 0, 1, 2)?;
        let lse = Shape(vec![Dim::BATCH, Dim::fixed(self.heads.heads), Dim::SEQ]);
        Ok(vec![
            OutputType::activation("", inputs[0].shape.clone(), dtype),
            OutputType::statistic("lse", lse, DType::F32),
        ])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let (batch, heads, seq) = (shapes[4][0] as u64, shapes[4][1] as u64, shapes[4][2] as u64);
        let scores = causal_scores(seq, Some(self.window));
        4 * batch * heads * scores * self.heads.head_dim as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }
}

/// do, q, k, v, o, lse → dq, dk, dv.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionBackward {
    /// Heads and mask of the forward.
    pub heads: AttentionHeads,
}

impl OpRule for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn attributes(&self) -> String {
        self.heads.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dout", "q", "k", "v", "o", "lse"])?;
        let dtype = check.same_float(&[0, 1, 2, 3, 4])?;
        check.dtype(5, DType::F32)?;
        self.heads.check(&check, 1, 2, 3)?;
        check.shape(0, &inputs[1].shape)?;
        check.shape(4, &inputs[1].shape)?;
        check.shape(5, &Shape(vec![Dim::BATCH, Dim::fixed(self.heads.heads), Dim::SEQ]))?;
        Ok(vec![
            OutputType::activation("dq", inputs[1].shape.clone(), dtype),
            OutputType::activation("dk", inputs[2].shape.clone(), dtype),
            OutputType::activation("dv", inputs[3].shape.clone(), dtype),
        ])
    }

    fn result_count(&self) -> usize {
        3
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Five GEMMs: the scores again, dP, dQ, dK, dV.
        5 * self.heads.gemm_flops(&shapes[5])
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }
}
