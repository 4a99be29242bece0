//! The `config.json` of published models: all of their keys are accounted for, and parameters are
//! counted as published.

use deepwell_ir::capture::ModelConfig;
use serde_json::{Value, json};

/// Keys and values as in the repository of that name, and the number of its parameters.
const PUBLISHED: &[(&str, u64, &str)] = &[
    (
        "Qwen/Qwen2.5-0.5B",
        494_032_768,
        r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
        "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}"#,
    ),
    (
        "Qwen/Qwen2.5-7B-Instruct",
        7_615_616_512,
        r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768,
        "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 152064}"#,
    ),
    (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        1_777_088_000,
        r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536,
        "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 131072,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12,
        "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.44.0", "use_cache": true,
        "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}"#,
    ),
    (
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        8_030_261_248,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256}"#,
    ),
    (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        134_515_008,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}"#,
    ),
    (
        "HuggingFaceTB/SmolLM2-1.7B",
        1_711_376_384,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 130000,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": true, "vocab_size": 49152}"#,
    ),
    (
        "meta-llama/Llama-2-7b-hf",
        6_738_415_616,
        r#"{"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}"#,
    ),
    (
        "meta-llama/Llama-3.2-1B-Instruct",
        1_235_814_400,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"#,
    ),
    (
        "mistralai/Mistral-7B-v0.1",
        7_241_732_096,
        r#"{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}"#,
    ),
    (
        "mistralai/Mistral-Nemo-Base-2407",
        12_247_782_400,
        r#"{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": true,
        "vocab_size": 131072}"#,
    ),
    (
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        r#"{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}"#,
    ),
    (
        "Qwen/Qwen3-8B",
        8_190_735_360,
        r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
        "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}"#,
    ),
    (
        "Qwen/Qwen3-30B-A3B",
        30_532_122_624,
        r#"{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151936}"#,
    ),
    (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        30_532_122_624,
        r#"{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "decoder_sparse_step": 1, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": false, "qkv_bias": false, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_qk_norm": true,
        "use_sliding_window": false, "vocab_size": 151936}"#,
    ),
    (
        "openai-community/gpt2",
        124_439_808,
        r#"{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257}"#,
    ),
    (
        "microsoft/Phi-3-mini-4k-instruct",
        3_821_079_552,
        r#"{"_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
        "attention_bias": false, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "bos_token_id": 1,
        "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": true,
        "vocab_size": 32064}"#,
    ),
    (
        "01-ai/Yi-6B",
        6_061_035_520,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 5000000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0", "use_cache": true, "vocab_size": 64000}"#,
    ),
];

#[test]
fn published_configs_are_captured_and_count_as_published() {
    for (name, count, text) in PUBLISHED {
        let (config, _) = ModelConfig::from_json(text, name).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.parameter_count(), *count, "{name}");
        let written = config.to_json().to_string();
        let read = ModelConfig::from_json(&written, name).unwrap_or_else(|e| panic!("{e}")).0;
        assert_eq!(read, config, "{name}");
    }
}

/// Reads a small llama with one more key.
fn read_with(key: &str, value: &Value) -> Result<Vec<String>, String> {
    let mut object = json!({
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 88,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64
    });
    object[key] = value.clone();
    let read = ModelConfig::from_json(&object.to_string(), "c");
    read.map(|(_, notes)| notes.without_effect).map_err(|error| error.to_string())
}

/// As published configurations have them, and as the next ones will.
#[test]
fn a_value_that_says_off_has_no_effect() {
    for (key, value) in [
        ("use_mrope", json!(false)),
        ("rope_interleaved", json!(false)),
        ("is_llama_config", json!(true)),
        ("transformers.js_config", json!({"dtype": "q4"})),
        ("task_specific_params", json!({"text-generation": {"max_length": 50}})),
        ("_attn_implementation", json!("sdpa")),
        ("pretraining_tp", json!(1)),
        ("hidden_dropout", json!(0.0)),
        ("use_qk_norm", json!(false)),
        ("attn_logit_softcapping", Value::Null),
        ("mlp_only_layers", json!([])),
        ("no_rope_layers", json!([0, 0])),
        ("vision_config", json!({})),
        ("experts_config", json!({"shared": false, "count": 0, "names": []})),
        ("quantization_config", json!({})),
        ("swin_norm", json!(false)),
        ("clip_qkv", Value::Null),
        ("adapter", json!("")),
    ] {
        let keys = read_with(key, &value).unwrap_or_else(|error| panic!("{key}: {error}"));
        assert!(keys.iter().any(|known| known == key), "{key} in {keys:?}");
    }
}

#[test]
fn a_value_that_says_more_is_refused_by_name() {
    for (key, value) in [
        ("use_mrope", json!(true)),
        ("rope_interleaved", json!(true)),
        ("is_llama_config", json!(false)),
        ("pretraining_tp", json!(2)),
        ("hidden_dropout", json!(0.1)),
        ("use_qk_norm", json!(true)),
        ("attn_logit_softcapping", json!(50.0)),
        ("mlp_only_layers", json!([3])),
        ("no_rope_layers", json!([0, 1])),
        ("vision_config", json!({"hidden_size": 1024})),
        ("quantization_config", json!({"quant_method": "awq"})),
        // Off takes away here what every model of the family has.
        ("is_causal", json!(false)),
        ("use_rope", json!(false)),
        ("use_rms_norm", json!(0)),
        ("residual_multiplier", json!(0.0)),
        ("logit_scale", json!(0)),
        // A slip in a key that is read.
        ("tie_word_embedding", json!(false)),
        ("atention_bias", json!(false)),
    ] {
        let error = read_with(key, &value).expect_err(key);
        assert!(error.contains(&format!("key `{key}`")), "{key}: {error}");
    }
}

#[test]
fn families_that_are_refused_say_what_is_missing() {
    for (model_type, words) in [
        ("gemma", "GELU (tanh), norms that multiply by 1 + w and the scale of its embeddings"),
        ("gemma2", "soft caps of its scores and logits"),
        ("gemma3_text", "layers with a window and a rotation of their own"),
        ("phi", "rotation of a part of each head"),
        ("rwkv", "supported: `gpt2`, `llama`"),
    ] {
        let text = json!({ "model_type": model_type }).to_string();
        let error = ModelConfig::from_json(&text, "c").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let (_, _, phi) = PUBLISHED.iter().find(|row| row.0.contains("Phi-3")).unwrap();
    let mut long: Value = serde_json::from_str(phi).unwrap();
    long["rope_scaling"] = json!({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]});
    let error = ModelConfig::from_json(&long.to_string(), "c").unwrap_err().to_string();
    assert!(error.contains("factors for each pair of a head are not supported"), "{error}");
}
