//! Attention over keys and values that come from one narrow latent (multi-head latent attention:
//! DeepSeek-V2, arXiv 2405.04434, section 2.1).

use serde::{Deserialize, Serialize};

use super::Check;
use super::attention::causal_scores;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, OpError, Shape};

/// q `[T, H·(N+R)]`, kv `[T, H·(N+V)]`, k_rope `[T, R]` → o `[T, H·V]`, lse f32 `[B, H, S]`.
///
/// A head's query is `N` plain columns and `R` that are rotated; its key is its `N` columns of kv
/// beside the `R` rotated columns that all heads share; its value is its last `V` columns of kv.
/// The rotation is part of the op. Causal. No kernel computes it yet, nor has it a derivative: it
/// holds a model's structure and counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Heads, `H`.
    pub heads: usize,
    /// Columns of a query and a key that are not rotated, `N`.
    pub plain_dim: usize,
    /// Columns that are rotated, `R`; even.
    pub rope_dim: usize,
    /// Columns of a value, `V`.
    pub value_dim: usize,
    /// Multiplies the scores.
    pub scale: f64,
    /// Radians per position of the `R/2` pairs.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies sine and cosine.
    pub attention_factor: f32,
    /// Whether a pair is two neighbours, not an element of each half.
    pub interleaved: bool,
}

impl OpRule for LatentAttention {
    fn name(&self) -> &'static str {
        "latent_attention"
    }

    fn attributes(&self) -> String {
        format!(
            "heads={} plain_dim={} rope_dim={} value_dim={}{} causal",
            self.heads,
            self.plain_dim,
            self.rope_dim,
            self.value_dim,
            if self.interleaved { " interleaved" } else { "" }
        )
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["q", "kv", "k_rope"])?;
        let dtype = check.same_float(&[0, 1, 2])?;
        if !self.rope_dim.is_multiple_of(2) || self.inverse_frequencies.len() * 2 != self.rope_dim {
            return Err(check.error(
                format!("{} frequencies for {} columns", self.rope_dim / 2, self.rope_dim),
                self.inverse_frequencies.len().to_string(),
            ));
        }
        let tokens = check.rank(0, 2)?[0];
        let columns = |columns| Shape(vec![tokens, Dim::fixed(columns)]);
        check.shape(0, &columns(self.heads * (self.plain_dim + self.rope_dim)))?;
        check.shape(1, &columns(self.heads * (self.plain_dim + self.value_dim)))?;
        check.shape(2, &columns(self.rope_dim))?;
        let lse = Shape(vec![Dim::BATCH, Dim::fixed(self.heads), Dim::SEQ]);
        Ok(vec![
            OutputType::activation("", columns(self.heads * self.value_dim), dtype),
            OutputType::statistic("lse", lse, DType::F32),
        ])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let (batch, heads, seq) = (shapes[4][0] as u64, shapes[4][1] as u64, shapes[4][2] as u64);
        let width = (self.plain_dim + self.rope_dim + self.value_dim) as u64;
        2 * batch * heads * causal_scores(seq, None) * width
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }
}
