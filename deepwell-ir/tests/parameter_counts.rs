//! Four models that everyone counts: their published `config.json`, and the exact number of
//! parameters from three sides.

use deepwell_ir::capture::ModelConfig;

/// `config.json` of openai-community/gpt2.
const GPT2: &str = r#"{
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
  "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
  "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
  "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
  "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
  "vocab_size": 50257
}"#;

/// `config.json` of meta-llama/Llama-2-7b-hf.
const LLAMA_2_7B: &str = r#"{
  "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
  "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
  "use_cache": true, "vocab_size": 32000
}"#;

/// `config.json` of meta-llama/Meta-Llama-3-70B.
const LLAMA_3_70B: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 8192,
  "initializer_range": 0.02, "intermediate_size": 28672, "max_position_embeddings": 8192,
  "model_type": "llama", "num_attention_heads": 64, "num_hidden_layers": 80,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256
}"#;

/// `config.json` of mistralai/Mixtral-8x7B-v0.1.
const MIXTRAL_8X7B: &str = r#"{
  "architectures": ["MixtralForCausalLM"], "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
  "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000
}"#;

/// The count of each; the same as a sum over layers, written down from the architecture; and where
/// others print it. `transformers` is `num_parameters()` of the model made of that file; an index
/// is `total_size`, in bytes of two for each parameter, of `model.safetensors.index.json`.
#[test]
fn four_models_count_exactly() {
    // Of a llama: table and head, final norm, and per layer queries and outputs, keys and values,
    // the MLP (or router and experts), two norms.
    let llama = |vocab: u64, width: u64, keys: u64, layers: u64, mlp: u64| {
        2 * vocab * width
            + width
            + layers * (2 * width * width + 2 * width * keys + mlp + 2 * width)
    };
    let rows = [
        (
            "gpt2",
            GPT2,
            124_439_808,
            // Two tables, of which the first is the head too, final norm (gain and bias), and per
            // layer two norms, four GEMMs of 12 width² together, and 9 width biases.
            (50_257 + 1024) * 768 + 2 * 768 + 12 * (12 * 768 * 768 + 13 * 768),
            "transformers",
        ),
        (
            "Llama-2-7B",
            LLAMA_2_7B,
            6_738_415_616,
            llama(32_000, 4096, 4096, 32, 3 * 4096 * 11_008),
            "transformers",
        ),
        (
            "Llama-3-70B",
            LLAMA_3_70B,
            70_553_706_496,
            llama(128_256, 8192, 1024, 80, 3 * 8192 * 28_672),
            "index: 141107412992",
        ),
        (
            "Mixtral-8x7B",
            MIXTRAL_8X7B,
            46_702_792_704,
            llama(32_000, 4096, 1024, 32, 8 * 4096 + 8 * 3 * 4096 * 14_336),
            "index: 93405585408",
        ),
    ];
    for (name, text, count, by_hand, source) in rows {
        let (config, _) = ModelConfig::from_json(text, "config.json").unwrap();
        assert_eq!(config.parameter_count(), count, "{name}, by its parameters");
        assert_eq!(config.capture(None).unwrap().parameter_count(), count, "{name}, by its graph");
        assert_eq!(by_hand, count, "{name}, by hand");
        if let Some(bytes) = source.strip_prefix("index: ") {
            assert_eq!(bytes.parse::<u64>().unwrap(), 2 * count, "{name}, by its weight files");
        }
    }
}
