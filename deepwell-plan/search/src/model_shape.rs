//! Sizes of a transformer: parameters and FLOPs without a graph.

mod config;

use serde::{Deserialize, Serialize};

/// Latent attention (MLA): low-rank projections of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Rank of the query projection; 0 for a full-rank projection.
    pub q_rank: usize,
    /// Rank of the common projection of keys and values.
    pub kv_rank: usize,
    /// Width of a head's query and key without position.
    pub qk_dim: usize,
    /// Width of the part with rotary position.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub v_dim: usize,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertShape {
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// Total width of the shared experts; 0 without.
    pub shared_ffn: usize,
    /// Number of dense layers before the first layer with experts.
    pub dense_layers: usize,
}

impl ExpertShape {
    /// Rows in a rank's buffers relative to the mean number of rows, with a capacity factor and
    /// experts on `ranks` ranks: the factor, but at most the rows of all tokens choosing this rank.
    pub fn room_over_mean(&self, factor: f64, ranks: usize) -> f64 {
        let of_rank = (self.experts / ranks.max(1)).max(1);
        let wanted = ranks * self.top_k.min(of_rank);
        factor.min(wanted as f64 / self.top_k.max(1) as f64)
    }
}

/// Sizes of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Name.
    pub name: String,
    /// Layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Width of a dense feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rows of the embedding, padding included.
    pub vocab: usize,
    /// Whether the feed-forward layer has a gate (SwiGLU): three matrices instead of two.
    pub gated: bool,
    /// Whether the output head shares the embedding's weight.
    pub tied: bool,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Vectors per norm: 2 for LayerNorm, 1 for RMSNorm.
    pub norm_vectors: usize,
    /// Rows of a learned position embedding; 0 without.
    pub positions: usize,
    /// Whether queries and keys are normalized per head.
    #[serde(default)]
    pub qk_norm: bool,
    /// MLA instead of heads of `head_dim`.
    pub latent: Option<LatentAttention>,
    /// Experts instead of the dense feed-forward layer.
    pub experts: Option<ExpertShape>,
    /// Layers of each chunk of a pipeline, the first chunk of all stages first, if given by a
    /// layout ([`LayerSplit::Given`](crate::LayerSplit::Given)); otherwise empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunk_layers: Vec<usize>,
}

/// Parameters of one layer on one rank, by the ranks splitting the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerParameters {
    /// Parameters used by all tokens, on a rank of the tensor-parallel group.
    pub dense: f64,
    /// Parameters of the rank's routed experts.
    pub routed: f64,
}

impl ModelShape {
    /// A dense model of the GPT family: LayerNorm, biases, learned positions, tied embedding, and a
    /// feed-forward width of four times the hidden size.
    pub fn gpt(layers: usize, hidden: usize, heads: usize, vocab: usize, seq: usize) -> ModelShape {
        ModelShape {
            name: format!("gpt-{layers}x{hidden}"),
            layers,
            hidden,
            ffn: 4 * hidden,
            heads,
            kv_heads: heads,
            head_dim: hidden / heads.max(1),
            vocab,
            gated: false,
            tied: true,
            bias: true,
            norm_vectors: 2,
            positions: seq,
            qk_norm: false,
            latent: None,
            experts: None,
            chunk_layers: Vec::new(),
        }
    }

    /// Number of layers with as many FLOPs as the output head.
    pub fn head_layers(&self) -> usize {
        let layer = self.layer_parameters(self.layers.saturating_sub(1), 1, 1, 1);
        let share =
            self.experts.map_or(0.0, |experts| experts.top_k as f64 / experts.experts as f64);
        let active = layer.dense + layer.routed * share;
        ((self.vocab * self.hidden) as f64 / active.max(1.0)).round() as usize
    }

    /// Whether a layer, from 0, has experts.
    pub fn has_experts(&self, layer: usize) -> bool {
        self.experts.is_some_and(|experts| layer >= experts.dense_layers)
    }

    fn biases(&self, count: f64) -> f64 {
        if self.bias { count } else { 0.0 }
    }

    /// Columns of the first feed-forward GEMM relative to `ffn`.
    pub fn gate_factor(&self) -> f64 {
        if self.gated { 2.0 } else { 1.0 }
    }

    /// Parameters of attention on one of `tp` ranks, without the norm.
    pub fn attention_parameters(&self, tp: usize) -> f64 {
        let (hidden, heads, tp) = (self.hidden as f64, self.heads as f64, tp as f64);
        if let Some(latent) = self.latent {
            let (q, kv) = (latent.q_rank as f64, latent.kv_rank as f64);
            let (qk, rope, v) = (latent.qk_dim as f64, latent.rope_dim as f64, latent.v_dim as f64);
            let (down, q_up) = if latent.q_rank > 0 {
                (hidden * q + self.norm_vectors as f64 * q, q * heads * (qk + rope))
            } else {
                (0.0, hidden * heads * (qk + rope))
            };
            let up = q_up + kv * heads * (qk + v) + heads * v * hidden;
            return down
                + hidden * (kv + rope)
                + self.norm_vectors as f64 * kv
                + up / tp
                + self.biases(hidden);
        }
        let width = self.head_dim as f64;
        let qkv = (heads + 2.0 * self.kv_heads as f64) * width;
        (hidden * qkv + heads * width * hidden + self.biases(qkv)) / tp + self.biases(hidden)
    }

    /// Parameters of a feed-forward layer of width `ffn` on one of `tp` ranks.
    pub fn ffn_parameters(&self, ffn: usize, tp: usize) -> f64 {
        let (hidden, ffn, gate) = (self.hidden as f64, ffn as f64, self.gate_factor());
        (hidden * ffn * (gate + 1.0) + self.biases(gate * ffn)) / tp as f64 + self.biases(hidden)
    }

    /// Parameters of a layer on one of `tp` ranks, and of routed experts on one of `etp` x `ep`
    /// ranks.
    pub fn layer_parameters(
        &self,
        layer: usize,
        tp: usize,
        etp: usize,
        ep: usize,
    ) -> LayerParameters {
        let norms = 2.0 * (self.norm_vectors * self.hidden) as f64;
        let attention = self.attention_parameters(tp) + norms;
        match self.experts.filter(|_| self.has_experts(layer)) {
            None => LayerParameters {
                dense: attention + self.ffn_parameters(self.ffn, tp),
                routed: 0.0,
            },
            Some(experts) => {
                let shared = if experts.shared_ffn > 0 {
                    self.ffn_parameters(experts.shared_ffn, tp)
                } else {
                    0.0
                };
                let router = (self.hidden * experts.experts) as f64;
                let each = self.ffn_parameters(experts.ffn, etp);
                LayerParameters {
                    dense: attention + shared + router,
                    routed: each * experts.experts as f64 / ep as f64,
                }
            }
        }
    }

    /// All parameters.
    pub fn parameters(&self) -> f64 {
        let layers: f64 = (0..self.layers)
            .map(|layer| self.layer_parameters(layer, 1, 1, 1))
            .map(|layer| layer.dense + layer.routed)
            .sum();
        let embeddings = self.vocab * self.hidden * if self.tied { 1 } else { 2 };
        let rest = self.positions * self.hidden + self.norm_vectors * self.hidden;
        layers + (embeddings + rest) as f64
    }

    /// FLOPs of attention's scores and values for `rows` sequences of `seq` tokens, forward, for
    /// the full square.
    pub fn score_flops(&self, rows: f64, seq: usize) -> f64 {
        let width = match self.latent {
            Some(latent) => (latent.qk_dim + latent.rope_dim + latent.v_dim) as f64,
            None => 2.0 * self.head_dim as f64,
        };
        2.0 * rows * (seq as f64).powi(2) * self.heads as f64 * width
    }

    /// Model FLOPs of a training step of `tokens` tokens in sequences of `seq`, by the papers'
    /// convention: three times the GEMMs, the full square of attention, no recomputation.
    pub fn model_flops(&self, tokens: f64, seq: usize) -> f64 {
        let active: f64 = (0..self.layers)
            .map(|layer| {
                let all = self.layer_parameters(layer, 1, 1, 1);
                let share = self
                    .experts
                    .map_or(1.0, |experts| experts.top_k as f64 / experts.experts.max(1) as f64);
                all.dense + all.routed * share
            })
            .sum();
        let head = (self.vocab * self.hidden) as f64;
        let scores = self.score_flops(tokens / seq as f64, seq) * self.layers as f64;
        3.0 * (2.0 * tokens * (active + head) + scores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_published_models() {
        // Billions of parameters from the papers.
        let check = |shape: &ModelShape, billions: f64| {
            let found = shape.parameters() / 1e9;
            assert!((found / billions - 1.0).abs() < 0.01, "{}: {found}", shape.name);
        };
        check(&ModelShape::gpt(96, 12288, 96, 51200, 2048), 174.6);
        check(&ModelShape::gpt(105, 20480, 128, 51200, 2048), 529.6);
    }

    #[test]
    fn shards_add_up() {
        let shape = ModelShape { bias: false, ..ModelShape::gpt(2, 64, 4, 256, 32) };
        let whole = shape.layer_parameters(0, 1, 1, 1).dense;
        let norms = 256.0;
        let half = shape.layer_parameters(0, 2, 2, 1).dense;
        assert_eq!((whole - norms) / 2.0 + norms, half);
    }
}
