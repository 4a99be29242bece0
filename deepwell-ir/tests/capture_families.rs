//! Families beside llama: published configurations, exact counts, and what their graphs hold.

use deepwell_ir::capture::{LlamaConfig, ModelFamily, capture, capture_for_sequence};
use deepwell_ir::{Op, Tag, differentiate};
use serde_json::{Value, json};

/// Sizes of a published `config.json`: vocab, hidden, ffn, layers, heads, kv heads.
fn config(family: ModelFamily, sizes: [usize; 6], more: Value) -> LlamaConfig {
    let mut object = json!({
        "architectures": [family.architecture()], "model_type": family.model_type(),
        "vocab_size": sizes[0], "hidden_size": sizes[1], "intermediate_size": sizes[2],
        "num_hidden_layers": sizes[3], "num_attention_heads": sizes[4],
        "num_key_value_heads": sizes[5], "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "torch_dtype": "bfloat16", "use_cache": true,
        "max_position_embeddings": 32768
    });
    object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (config, notes) = LlamaConfig::from_json(&object.to_string(), "c").unwrap();
    assert_eq!(notes.remarks, Vec::<String>::new());
    config
}

fn qwen_window() -> Value {
    json!({"sliding_window": 32768, "max_window_layers": 28, "use_sliding_window": false})
}

/// Sizes are those of the `config.json` of each model on Hugging Face; a tied head counts once.
#[test]
fn published_models_count_exactly() {
    use ModelFamily as F;
    let tied = json!({"tie_word_embeddings": true});
    let mistral = |window: Value| json!({"sliding_window": window, "rms_norm_eps": 1e-5});
    let heads_of_128 = json!({"head_dim": 128, "attention_bias": false});
    let small = json!({"head_dim": 128, "tie_word_embeddings": true});
    for (name, family, sizes, more, count) in [
        (
            "Meta-Llama-3-70B",
            F::Llama,
            [128_256, 8192, 28672, 80, 64, 8],
            json!({}),
            70_553_706_496u64,
        ),
        (
            "Mistral-7B-v0.1",
            F::Mistral,
            [32000, 4096, 14336, 32, 32, 8],
            mistral(json!(4096)),
            7_241_732_096,
        ),
        (
            "Mistral-7B-v0.3",
            F::Mistral,
            [32768, 4096, 14336, 32, 32, 8],
            mistral(Value::Null),
            7_248_023_552,
        ),
        ("Qwen2-7B", F::Qwen2, [152_064, 3584, 18944, 28, 28, 4], qwen_window(), 7_615_616_512),
        ("Qwen2-0.5B", F::Qwen2, [151_936, 896, 4864, 24, 14, 2], tied, 494_032_768),
        ("Qwen3-8B", F::Qwen3, [151_936, 4096, 12288, 36, 32, 8], heads_of_128, 8_190_735_360),
        ("Qwen3-0.6B", F::Qwen3, [151_936, 1024, 3072, 28, 16, 8], small, 596_049_920),
    ] {
        let config = config(family, sizes, more);
        assert_eq!(config.parameter_count(), count, "{name}");
        let graph = capture(&config).unwrap();
        assert_eq!(graph.parameter_count(), count, "{name}");
        assert_eq!(graph.name, family.model_type());
        let text = config.to_json().to_string();
        assert_eq!(LlamaConfig::from_json(&text, "again").unwrap().0, config, "{name}");
    }
    let preset = LlamaConfig::preset("llama-3-70b").unwrap();
    assert_eq!(preset.parameter_count(), 70_553_706_496);
    let preset = LlamaConfig::preset("qwen3-0.6b").unwrap();
    assert_eq!(preset.parameter_count(), 596_049_920);
}

fn micro(family: ModelFamily, more: Value) -> LlamaConfig {
    config(family, [96, 64, 96, 2, 4, 2], more)
}

fn ops_of(graph: &deepwell_ir::Graph, name: &str) -> usize {
    graph.nodes.iter().filter(|node| node.op.name() == name).count()
}

#[test]
fn qwen2_has_biases_on_three_projections() {
    let graph = capture(&micro(ModelFamily::Qwen2, qwen_window())).unwrap();
    for (part, expected) in [("q", true), ("k", true), ("v", true), ("o", false)] {
        for layer in 0..2 {
            let name = format!("model.layers.{layer}.self_attn.{part}_proj.bias");
            assert_eq!(graph.find(&name).is_some(), expected, "{name}");
        }
    }
    differentiate(&graph).unwrap();
}

#[test]
fn qwen3_normalizes_queries_and_keys_by_head() {
    let graph = capture(&micro(ModelFamily::Qwen3, json!({"head_dim": 32}))).unwrap();
    let norms: Vec<_> =
        graph.nodes.iter().filter(|node| matches!(node.op, Op::HeadRmsNorm(_))).collect();
    assert_eq!(norms.len(), 4);
    assert!(norms.iter().all(|node| node.tag == Tag::Norm));
    let rstd = &graph.tensor(norms[0].outputs[1]).shape;
    assert_eq!(
        (norms[0].name.as_str(), rstd.to_string().as_str()),
        ("layers.0.self_attn.q_norm", "[4*B*S]")
    );
    // The gradients of both gains come from one pass each.
    assert_eq!(ops_of(&differentiate(&graph).unwrap(), "head_rms_norm_backward"), 4);
}

#[test]
fn a_window_matters_to_longer_sequences_only() {
    let config = micro(ModelFamily::Mistral, json!({"sliding_window": 16}));
    for (seq, expected) in [(15, None), (16, None), (17, Some(16))] {
        let graph = differentiate(&capture_for_sequence(&config, seq).unwrap()).unwrap();
        let windows = graph.nodes.iter().filter_map(|node| match &node.op {
            Op::Attention(op) => Some(op.heads.window),
            Op::AttentionBackward(op) => Some(op.heads.window),
            _ => None,
        });
        assert_eq!(windows.collect::<Vec<_>>(), [expected; 4]);
    }
    // A key that is not there at all is 4096 tokens.
    assert_eq!(micro(ModelFamily::Mistral, json!({})).sliding_window, Some(4096));
    assert_eq!(micro(ModelFamily::Mistral, json!({"sliding_window": null})).sliding_window, None);
}

#[test]
fn what_a_family_fixes_is_checked() {
    let read = |changes: Value| {
        let mut object = micro(ModelFamily::Qwen2, json!({})).to_json();
        object.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        LlamaConfig::from_json(&object.to_string(), "c").unwrap_err().to_string()
    };
    for (changes, expected) in [
        (
            json!({"use_sliding_window": true}),
            "c: key `use_sliding_window`: value `true` is not supported\n\
             hint: only full causal attention is supported: `false`",
        ),
        (
            json!({"num_key_value_heads": null}),
            "c: key `num_key_value_heads` is missing\n\
             hint: transformers would take that of one published size; state it",
        ),
        (
            json!({"architectures": ["LlamaForCausalLM"]}),
            "c: key `architectures`: value `[\"LlamaForCausalLM\"]` is not supported\n\
             hint: supported: [\"Qwen2ForCausalLM\"]",
        ),
        (
            json!({"max_position_embeddings": null}),
            "c: key `max_position_embeddings` is missing\n\
             hint: the default depends on the family; state it",
        ),
    ] {
        assert_eq!(read(changes), expected);
    }
    let unbiased = LlamaConfig { attention_bias: false, ..micro(ModelFamily::Qwen2, json!({})) };
    assert_eq!(
        capture(&unbiased).unwrap_err().to_string(),
        "configuration: key `attention_bias`: expected `true` with qwen2, got `false`"
    );
    let windowed = LlamaConfig { sliding_window: Some(8), ..micro(ModelFamily::Qwen3, json!({})) };
    assert_eq!(
        capture(&windowed).unwrap_err().to_string(),
        "configuration: key `sliding_window`: expected `null` in any family but mistral, \
         mixtral, gpt_oss and phi3, and 1 or more, got `8`"
    );
}
