//! Models that up to eight ranks can split.

use deepwell_ir::Graph;
use deepwell_ir::capture::{Gpt2Config, LlamaConfig, capture, capture_gpt2};
use deepwell_moe::{RouterTraining, with_router_training};

/// A model by name.
pub(crate) fn model(name: &str) -> Graph {
    let preset = |name| LlamaConfig::preset(name).expect("a preset");
    // Slices of four ranks are whole blocks of 32.
    let wide = |name, num_kv_heads| LlamaConfig {
        num_heads: 4,
        num_kv_heads,
        head_dim: 32,
        intermediate_size: 128,
        ..preset(name)
    };
    let mixture =
        LlamaConfig { num_layers: 4, num_heads: 4, num_kv_heads: 4, ..preset("moe-micro") };
    let config = match name {
        "dense" => {
            let (num_layers, num_heads, head_dim) = (4, 8, 16);
            LlamaConfig { num_layers, num_heads, head_dim, ..wide("llama-micro", 8) }
        }
        // A table that is both ends of the model.
        "tied" => {
            let (num_layers, tie_word_embeddings) = (4, true);
            LlamaConfig { num_layers, tie_word_embeddings, ..wide("llama-micro", 2) }
        }
        "llama" => wide("llama-micro", 4),
        "llama with biases" => {
            let (attention_bias, mlp_bias, tie_word_embeddings) = (true, true, true);
            let config = wide("llama-micro", 2);
            LlamaConfig { attention_bias, mlp_bias, tie_word_embeddings, ..config }
        }
        "qwen3" => wide("qwen3-micro", 2),
        "gpt2" => {
            let micro = Gpt2Config::preset("gpt2-micro").expect("a preset");
            let config = Gpt2Config { num_heads: 4, hidden_size: 128, ..micro };
            return capture_gpt2(&config).expect("a graph");
        }
        "experts" => mixture,
        "balanced" => {
            let training = RouterTraining { balance: 0.05, z: 0.01, capacity_factor: None };
            return trained(&mixture, training);
        }
        // Windows in every second layer that begin within a chunk of a sequence, and sinks.
        "windows and sinks" => LlamaConfig { sliding_window: Some(5), ..preset("gpt-oss-micro") },
        // A rank adds up what some of its experts give a token.
        "four of eight" => four_of_eight(),
        // Nothing is dropped, and rows are sent.
        "four of eight, sent" => {
            let capacity_factor = Some(64.0);
            let training = RouterTraining { capacity_factor, ..RouterTraining::default() };
            return trained(&four_of_eight(), training);
        }
        preset_name => preset(preset_name),
    };
    capture(&config).expect("a graph")
}

fn four_of_eight() -> LlamaConfig {
    let mut config = LlamaConfig::preset("moe-micro").expect("a preset");
    config.experts.as_mut().expect("experts").experts_per_token = 4;
    config
}

fn trained(config: &LlamaConfig, training: RouterTraining) -> Graph {
    let graph = capture(config).expect("a graph");
    with_router_training(&graph, &training).expect("a mixture")
}
