//! Model sizes from a configuration, and of well-known models.

use deepwell_ir::capture::{Gpt2Config, LlamaConfig, ModelConfig, ModelFamily};

use super::{ExpertShape, LatentAttention, ModelShape};

impl ModelShape {
    /// Names known to [`ModelShape::known`] besides the presets of [`ModelConfig`]: models too
    /// large for one machine.
    pub const LARGE: [&'static str; 3] = ["llama-3.1-405b", "deepseek-v3", "gpt3-175b"];

    /// A model by name: a preset of [`ModelConfig`], or a name of [`ModelShape::LARGE`] with the
    /// sizes of the model card or paper.
    ///
    /// ```
    /// use deepwell_search::ModelShape;
    ///
    /// let shape = ModelShape::known("llama-3.1-405b").unwrap();
    /// assert_eq!((shape.parameters() / 1e9).round(), 406.0);
    /// assert!(ModelShape::known("llama-4").is_none());
    /// ```
    pub fn known(name: &str) -> Option<ModelShape> {
        if let Some(config) = ModelConfig::preset(name) {
            return ModelShape::of(name, &config);
        }
        let gated = |layers, hidden, ffn, heads, vocab| ModelShape {
            name: name.to_string(),
            ffn,
            kv_heads: 8,
            gated: true,
            tied: false,
            bias: false,
            norm_vectors: 1,
            positions: 0,
            ..ModelShape::gpt(layers, hidden, heads, vocab, 0)
        };
        Some(match name {
            "llama-3.1-405b" => gated(126, 16384, 53248, 128, 128_256),
            "deepseek-v3" => ModelShape {
                kv_heads: 128,
                latent: Some(LatentAttention {
                    q_rank: 1536,
                    kv_rank: 512,
                    qk_dim: 128,
                    rope_dim: 64,
                    v_dim: 128,
                }),
                experts: Some(ExpertShape {
                    experts: 256,
                    top_k: 8,
                    ffn: 2048,
                    shared_ffn: 2048,
                    dense_layers: 3,
                }),
                ..gated(61, 7168, 18432, 128, 129_280)
            },
            "gpt3-175b" => {
                ModelShape { name: name.to_string(), ..ModelShape::gpt(96, 12288, 96, 51200, 2048) }
            }
            _ => return None,
        })
    }

    /// The sizes of a configuration. Biases of some projections, and windows and sinks of
    /// attention, are left out: they are well below 1 % of parameters and time, or make attention
    /// cheaper than counted. `None` for an unsupported family.
    pub fn of(name: &str, config: &ModelConfig) -> Option<ModelShape> {
        match config {
            ModelConfig::Llama(config) => Some(of_llama(name, config)),
            ModelConfig::Gpt2(config) => Some(of_gpt2(name, config)),
            _ => None,
        }
    }
}

fn of_llama(name: &str, config: &LlamaConfig) -> ModelShape {
    let experts = config.experts.as_ref().map(|experts| ExpertShape {
        experts: experts.num_experts,
        top_k: experts.experts_per_token,
        ffn: experts.intermediate_size,
        shared_ffn: experts.shared_experts * experts.intermediate_size,
        dense_layers: experts.dense_layers.len(),
    });
    let latent = config.latent.as_ref().map(|latent| LatentAttention {
        q_rank: latent.q_rank.unwrap_or(0),
        kv_rank: latent.kv_rank,
        qk_dim: latent.plain_dim,
        rope_dim: config.head_dim,
        v_dim: latent.value_dim,
    });
    let family = config.family;
    ModelShape {
        name: name.to_string(),
        layers: config.num_layers,
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        vocab: config.vocab_size,
        gated: true,
        tied: config.tie_word_embeddings,
        // gpt-oss has biases in its experts, too.
        bias: (config.attention_bias && config.mlp_bias) || family.has_sinks(),
        norm_vectors: 1,
        positions: 0,
        qk_norm: matches!(family, ModelFamily::Qwen3 | ModelFamily::Qwen3Moe),
        latent,
        experts,
        chunk_layers: Vec::new(),
    }
}

fn of_gpt2(name: &str, config: &Gpt2Config) -> ModelShape {
    let positions = config.max_position_embeddings;
    ModelShape {
        name: name.to_string(),
        ffn: config.intermediate_size,
        tied: config.tie_word_embeddings,
        ..ModelShape::gpt(
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.vocab_size,
            positions,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formulas agree with the tensors of a configuration. Norms of heads are left out: up to
    /// 0.11 %, in the smallest preset.
    #[test]
    fn parameters_are_those_of_the_configurations() {
        for name in ModelConfig::presets() {
            let config = ModelConfig::preset(name).unwrap();
            let shape = ModelShape::known(name).unwrap();
            let expected = config.parameter_count() as f64;
            let error = shape.parameters() / expected - 1.0;
            assert!(error.abs() < 0.0012, "{name}: {} {expected}", shape.parameters());
        }
    }

    #[test]
    fn large_models_are_known() {
        let check = |name: &str, billions: f64| {
            let found = ModelShape::known(name).unwrap().parameters() / 1e9;
            assert!((found / billions - 1.0).abs() < 0.01, "{name}: {found}");
        };
        check("llama-3.1-405b", 405.9);
        check("deepseek-v3", 671.0);
        check("gpt3-175b", 174.6);
        assert_eq!(ModelShape::LARGE.map(|name| ModelShape::known(name).is_some()), [true; 3]);
    }
}
