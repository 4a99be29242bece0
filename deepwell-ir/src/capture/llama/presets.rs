//! Configurations known by name.

use crate::capture::{
    ExpertsConfig, HiddenAct, LatentConfig, LlamaConfig, ModelFamily, Rope, RopeScaling,
    StoredDType, YarnScaling,
};
use crate::ops::{ExpertActivation, RouteGroups};

impl LlamaConfig {
    /// Names that [`LlamaConfig::preset`] knows.
    pub const PRESETS: [&'static str; 22] = [
        "llama-micro",
        "parity-600k",
        "parity-2m",
        "parity-3m",
        "llama-134m",
        "tinyllama-1.1b",
        "llama-1.1b",
        "llama-7b",
        "llama-3-8b",
        "llama-3-70b",
        "qwen3-micro",
        "qwen3-600k",
        "qwen3-0.6b",
        "moe-micro",
        "moe-tiny",
        "moe-1b-a300m",
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "deepseek-micro",
        "deepseek-v3",
        "gpt-oss-micro",
        "gpt-oss-20b",
    ];

    /// A configuration by name; `None` for an unknown name.
    ///
    /// The published configurations are `tinyllama-1.1b` (also `llama-1.1b`,
    /// TinyLlama-1.1B-Chat-v1.0), `llama-7b` (Llama-2-7B), `llama-3-8b` (Meta-Llama-3-8B),
    /// `llama-3-70b` (Meta-Llama-3-70B), `qwen3-0.6b` (Qwen3-0.6B), `qwen3-30b-a3b`
    /// (Qwen3-30B-A3B), `mixtral-8x7b` (Mixtral-8x7B-v0.1), and, with unpacked weights,
    /// `deepseek-v3` (DeepSeek-V3) and `gpt-oss-20b` (gpt-oss-20b). The others are sizes for tests
    /// and measurements; names that begin with `moe` are Qwen 3 with experts.
    ///
    /// ```
    /// use deepwell_ir::capture::LlamaConfig;
    ///
    /// let config = LlamaConfig::preset("tinyllama-1.1b").unwrap();
    /// assert_eq!(config.parameter_count(), 1_100_048_384);
    /// assert!(LlamaConfig::preset("tinylama").is_none());
    /// ```
    pub fn preset(name: &str) -> Option<LlamaConfig> {
        match name {
            "llama-micro" => Some(plain_llama(256, 64, 160, 2, 2, 1)),
            "parity-600k" => Some(plain_llama(256, 128, 320, 3, 2, 1)),
            "parity-2m" => Some(plain_llama(256, 256, 512, 3, 4, 2)),
            "parity-3m" => Some(plain_llama(256, 256, 704, 4, 4, 2)),
            "llama-134m" => Some(plain_llama(32000, 768, 2048, 12, 12, 12)),
            "tinyllama-1.1b" | "llama-1.1b" => Some(LlamaConfig {
                torch_dtype: Some(StoredDType::Bf16),
                ..plain_llama(32000, 2048, 5632, 22, 32, 4)
            }),
            "llama-7b" => Some(LlamaConfig {
                max_position_embeddings: 4096,
                torch_dtype: Some(StoredDType::Bf16),
                ..plain_llama(32000, 4096, 11008, 32, 32, 32)
            }),
            "llama-3-8b" => Some(LlamaConfig {
                max_position_embeddings: 8192,
                rope: Rope { theta: 500_000.0, scaling: RopeScaling::None },
                torch_dtype: Some(StoredDType::Bf16),
                ..plain_llama(128_256, 4096, 14336, 32, 32, 8)
            }),
            "llama-3-70b" => Some(LlamaConfig {
                max_position_embeddings: 8192,
                rope: Rope { theta: 500_000.0, scaling: RopeScaling::None },
                torch_dtype: Some(StoredDType::Bf16),
                ..plain_llama(128_256, 8192, 28672, 80, 64, 8)
            }),
            "qwen3-micro" => Some(qwen3(plain_llama(256, 64, 160, 2, 2, 1), 32)),
            "qwen3-600k" => Some(LlamaConfig {
                rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
                ..qwen3(plain_llama(256, 128, 320, 3, 2, 1), 64)
            }),
            "qwen3-0.6b" => Some(LlamaConfig {
                max_position_embeddings: 40960,
                tie_word_embeddings: true,
                torch_dtype: Some(StoredDType::Bf16),
                ..qwen3(plain_llama(151_936, 1024, 3072, 28, 16, 8), 128)
            }),
            "moe-micro" => {
                Some(qwen3_moe(qwen3(plain_llama(256, 64, 160, 2, 2, 1), 32), [8, 2, 64]))
            }
            "moe-tiny" => {
                Some(qwen3_moe(qwen3(plain_llama(256, 256, 704, 4, 4, 2), 64), [8, 2, 256]))
            }
            "moe-1b-a300m" => {
                Some(qwen3_moe(qwen3(plain_llama(32000, 1024, 2816, 16, 16, 4), 64), [32, 4, 512]))
            }
            "qwen3-30b-a3b" => Some(LlamaConfig {
                max_position_embeddings: 40960,
                torch_dtype: Some(StoredDType::Bf16),
                ..qwen3_moe(qwen3(plain_llama(151_936, 2048, 6144, 48, 32, 4), 128), [128, 8, 768])
            }),
            "mixtral-8x7b" => Some(LlamaConfig {
                family: ModelFamily::Mixtral,
                experts: Some(experts([8, 2, 14336])),
                rope: Rope { theta: 1_000_000.0, scaling: RopeScaling::None },
                max_position_embeddings: 32768,
                torch_dtype: Some(StoredDType::Bf16),
                ..plain_llama(32000, 4096, 14336, 32, 32, 8)
            }),
            "deepseek-micro" | "deepseek-v3" => Some(deepseek_v3(name == "deepseek-micro")),
            "gpt-oss-micro" | "gpt-oss-20b" => Some(gpt_oss(name == "gpt-oss-micro")),
            _ => None,
        }
    }
}

/// DeepSeek-V3, or a small model with the same structure.
fn deepseek_v3(is_micro: bool) -> LlamaConfig {
    let (plain, sizes, dense_layers, groups) = if is_micro {
        (plain_llama(256, 64, 160, 3, 2, 2), [8, 2, 64], 1, (4, 2))
    } else {
        (plain_llama(129_280, 7168, 18432, 61, 128, 128), [256, 8, 2048], 3, (8, 4))
    };
    let yarn = YarnScaling {
        factor: 40.0,
        original_max_position_embeddings: 4096,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: Some(1.0),
        mscale_all_dim: Some(1.0),
        truncate: true,
    };
    let (count, chosen) = groups;
    LlamaConfig {
        family: ModelFamily::DeepseekV3,
        head_dim: if is_micro { 32 } else { 64 },
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::Yarn(yarn) },
        latent: Some(LatentConfig {
            q_rank: Some(if is_micro { 32 } else { 1536 }),
            kv_rank: if is_micro { 32 } else { 512 },
            plain_dim: if is_micro { 32 } else { 128 },
            value_dim: if is_micro { 48 } else { 128 },
            interleaved: true,
        }),
        experts: Some(ExpertsConfig {
            shared_experts: 1,
            dense_layers: (0..dense_layers).collect(),
            gate_scaling: 2.5,
            groups: Some(RouteGroups { count, chosen }),
            ..experts(sizes)
        }),
        max_position_embeddings: 163_840,
        torch_dtype: Some(StoredDType::Bf16),
        ..plain
    }
}

/// gpt-oss-20b, or a small model with the same structure.
fn gpt_oss(is_micro: bool) -> LlamaConfig {
    let (plain, sizes) = if is_micro {
        (plain_llama(256, 64, 96, 2, 4, 2), [8, 2, 96])
    } else {
        (plain_llama(201_088, 2880, 2880, 24, 64, 8), [32, 4, 2880])
    };
    let yarn = YarnScaling {
        factor: 32.0,
        original_max_position_embeddings: 4096,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        truncate: false,
    };
    LlamaConfig {
        family: ModelFamily::GptOss,
        head_dim: if is_micro { 32 } else { 64 },
        attention_bias: true,
        rope: Rope { theta: 150_000.0, scaling: RopeScaling::Yarn(yarn) },
        sliding_window: Some(if is_micro { 16 } else { 128 }),
        padding_row: (!is_micro).then_some(199_999),
        full_attention_layers: (1..plain.num_layers).step_by(2).collect(),
        experts: Some(ExpertsConfig {
            activation: ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 },
            ..experts(sizes)
        }),
        max_position_embeddings: 131_072,
        torch_dtype: Some(StoredDType::Bf16),
        ..plain
    }
}

/// Experts per layer, experts per token, and their width; normalized gates, no shared experts.
fn experts([num_experts, experts_per_token, intermediate_size]: [usize; 3]) -> ExpertsConfig {
    ExpertsConfig {
        num_experts,
        experts_per_token,
        intermediate_size,
        shared_experts: 0,
        dense_layers: Vec::new(),
        normalize_gates: true,
        gate_scaling: 1.0,
        groups: None,
        activation: ExpertActivation::SwiGlu,
    }
}

/// Replaces feed-forward blocks by experts in each layer.
fn qwen3_moe(dense: LlamaConfig, sizes: [usize; 3]) -> LlamaConfig {
    LlamaConfig { family: ModelFamily::Qwen3Moe, experts: Some(experts(sizes)), ..dense }
}

/// Common settings of the Qwen3 presets: a separate head width, theta 1e6, epsilon 1e-6.
fn qwen3(plain: LlamaConfig, head_dim: usize) -> LlamaConfig {
    LlamaConfig {
        family: ModelFamily::Qwen3,
        head_dim,
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 1_000_000.0, scaling: RopeScaling::None },
        ..plain
    }
}

/// Common settings of the presets: 2048 positions, theta 10000, epsilon 1e-5, untied, no biases.
fn plain_llama(
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
) -> LlamaConfig {
    LlamaConfig {
        family: ModelFamily::Llama,
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim: hidden_size / num_heads,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        attention_bias: false,
        mlp_bias: false,
        sliding_window: None,
        full_attention_layers: Vec::new(),
        latent: None,
        experts: None,
        packing: None,
        padding_row: None,
        tie_word_embeddings: false,
        max_position_embeddings: 2048,
        initializer_range: 0.02,
        hidden_act: HiddenAct::Silu,
        torch_dtype: None,
    }
}
