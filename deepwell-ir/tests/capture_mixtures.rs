//! Mixtures of experts: published configurations, graphs, weight folders, refusals.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepwell_ir::capture::{
    LlamaConfig, ModelFamily, ModelFolder, StoredElement, WeightPacking, capture,
    capture_for_sequence,
};
use deepwell_ir::{Graph, Op, Tag, differentiate};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

/// The keys and values of the config.json of mistralai/Mixtral-8x7B-v0.1.
const MIXTRAL_8X7B: &str = r#"{
  "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
  "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000
}"#;

/// The keys and values of the config.json of Qwen/Qwen3-30B-A3B.
const QWEN3_30B_A3B: &str = r#"{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
  "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
  "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
  "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"#;

/// The keys and values of the config.json of deepseek-ai/DeepSeek-V3.
const DEEPSEEK_V3: &str = r#"{
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
  "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
  "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
  "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
  "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
  "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 4,
  "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
  "use_cache": true, "v_head_dim": 128, "vocab_size": 129280
}"#;

/// The keys and values of the config.json of openai/gpt-oss-20b, but for `layer_types`, which is
/// the default.
const GPT_OSS_20B: &str = r#"{
  "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
  "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
  "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
  "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
  "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
  "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert":
    ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0,
    "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
  "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
  "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
}"#;

/// `text` with some keys changed; `null` removes one.
fn changed(text: &str, changes: Value) -> String {
    let mut object: Map<String, Value> = serde_json::from_str(text).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(object.remove(key)),
            value => drop(object.insert(key.clone(), value.clone())),
        }
    }
    Value::Object(object).to_string()
}

fn read(text: &str, changes: Value) -> LlamaConfig {
    LlamaConfig::from_json(&changed(text, changes), "c").unwrap().0
}

/// Counts are those of the models that transformers 5.23 makes of the same sizes, without memory
/// for weights (`torch.device("meta")`); DeepSeek-V3's with its 58 selection biases of 256, which
/// are buffers there and tensors of the checkpoint. Mixtral-8x22B's is also half of the
/// 281241268224 bytes in the index of its weight files.
#[test]
fn published_models_count_exactly() {
    let large_qwen = json!({
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64, "moe_intermediate_size": 1536
    });
    let large_mixtral = json!({
        "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48
    });
    let large_oss = json!({"num_hidden_layers": 36, "num_local_experts": 128});
    for (name, text, changes, count) in [
        ("Mixtral-8x7B-v0.1", MIXTRAL_8X7B, json!({}), 46_702_792_704u64),
        ("Mixtral-8x22B-v0.1", MIXTRAL_8X7B, large_mixtral, 281_241_268_224 / 2),
        ("Qwen3-30B-A3B", QWEN3_30B_A3B, json!({}), 30_532_122_624),
        ("Qwen3-235B-A22B", QWEN3_30B_A3B, large_qwen, 235_093_634_560),
        ("DeepSeek-V3", DEEPSEEK_V3, json!({}), 671_026_404_352 + 58 * 256),
        ("gpt-oss-20b", GPT_OSS_20B, json!({}), 20_914_757_184),
        ("gpt-oss-120b", GPT_OSS_20B, large_oss, 116_829_156_672),
    ] {
        let config = read(text, changes);
        assert_eq!(config.parameter_count(), count, "{name}");
        let graph = capture(&config).unwrap();
        assert_eq!(graph.parameter_count(), count, "{name}");
        assert_eq!(graph.name, config.family.model_type());
        let again = LlamaConfig::from_json(&config.to_json().to_string(), "again").unwrap().0;
        assert_eq!(again, config, "{name}");
        let size = |shape: &[usize]| shape.iter().map(|&n| n as u64).product::<u64>();
        let stored: u64 = config
            .stored_tensors()
            .iter()
            // Scales stand beside the values, and a byte of blocks holds two of them.
            .filter(|spec| !spec.name.ends_with("_scales") && !spec.name.ends_with("_scale_inv"))
            .map(|spec| size(&spec.shape) * if spec.name.ends_with("_blocks") { 2 } else { 1 })
            .sum();
        assert_eq!(stored, count, "{name}");
    }
}

/// The presets are the published configurations, but for the packing of their weights.
#[test]
fn presets_are_the_published_models() {
    for (name, text) in [
        ("mixtral-8x7b", MIXTRAL_8X7B),
        ("qwen3-30b-a3b", QWEN3_30B_A3B),
        ("deepseek-v3", DEEPSEEK_V3),
        ("gpt-oss-20b", GPT_OSS_20B),
    ] {
        let preset = LlamaConfig::preset(name).unwrap();
        let torch_dtype = preset.torch_dtype;
        let published = LlamaConfig { packing: None, torch_dtype, ..read(text, json!({})) };
        assert_eq!(preset, published, "{name}");
    }
    for name in ["deepseek-micro", "gpt-oss-micro"] {
        let preset = LlamaConfig::preset(name).unwrap();
        preset.check(name).unwrap();
        capture_for_sequence(&preset, 32).unwrap();
    }
}

#[test]
fn notes_tell_what_is_left_out() {
    let notes = |text: &str| LlamaConfig::from_json(text, "c").unwrap().1;
    let notes_of_v3 = notes(DEEPSEEK_V3);
    assert_eq!(
        notes_of_v3.remarks,
        [
            "weights are packed as E4M3 with factors for blocks of 128x128: counted as if they \
             were not",
            "`num_nextn_predict_layers`: the layers that predict further tokens are left out",
        ]
    );
    for key in ["aux_loss_alpha", "ep_size", "seq_aux"] {
        assert!(notes_of_v3.without_effect.contains(&key.to_string()), "{key}");
    }
    let notes_of_oss = notes(GPT_OSS_20B);
    assert_eq!(notes_of_oss.remarks[0], "weights are packed as MXFP4: counted as if they were not");
    assert!(notes_of_oss.without_effect.contains(&"initial_context_length".to_string()));
    assert_eq!(notes(MIXTRAL_8X7B).remarks, Vec::<String>::new());
}

/// Small models of each family with every part: in deepseek_v3 and qwen3_moe a dense layer.
fn micro(family: ModelFamily) -> (LlamaConfig, String) {
    let sizes = json!({
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2
    });
    let (text, more) = match family {
        ModelFamily::Mixtral => (MIXTRAL_8X7B, json!({"num_local_experts": 4})),
        ModelFamily::Qwen3Moe => (
            QWEN3_30B_A3B,
            json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                "head_dim": 16, "mlp_only_layers": [1]}),
        ),
        ModelFamily::DeepseekV3 => (
            DEEPSEEK_V3,
            json!({"n_routed_experts": 8, "moe_intermediate_size": 32, "q_lora_rank": 48,
                "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                "v_head_dim": 24, "num_key_value_heads": 4, "first_k_dense_replace": 1,
                "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
                "weight_block_size": null}),
        ),
        _ => (GPT_OSS_20B, json!({"num_local_experts": 4, "head_dim": 16, "pad_token_id": 95})),
    };
    let text = changed(&changed(text, sizes), more);
    (LlamaConfig::from_json(&text, "c").unwrap().0, text)
}

const FAMILIES: [ModelFamily; 4] =
    [ModelFamily::Mixtral, ModelFamily::Qwen3Moe, ModelFamily::DeepseekV3, ModelFamily::GptOss];

fn tags(graph: &Graph) -> BTreeMap<String, usize> {
    let mut tags = BTreeMap::new();
    for node in &graph.nodes {
        *tags.entry(node.tag.to_string()).or_insert(0) += 1;
    }
    tags
}

#[test]
fn every_part_is_tagged() {
    // Per layer: attention 7 nodes (q, k, v, two rotations, attention, output, residual are 8);
    // a mixture routes with 2 nodes and is 2 more (experts, residual), a dense block is 5.
    for (family, expected) in [
        (ModelFamily::Mixtral, "attn 24 embed 1 experts 6 head 1 norm 7 router 6"),
        // Norms of heads; layer 1 is dense.
        (ModelFamily::Qwen3Moe, "attn 24 embed 1 experts 4 head 1 mlp 5 norm 13 router 4"),
        // Latent: q_a, q_b, kv_a, its cut, kv_b, two rotations, keys and values, attention, output,
        // residual; shared experts are four nodes and a sum.
        (ModelFamily::DeepseekV3, "attn 33 embed 1 experts 14 head 1 mlp 5 norm 13 router 4"),
        (ModelFamily::GptOss, "attn 24 embed 1 experts 6 head 1 norm 7 router 6"),
    ] {
        let graph = capture(&micro(family).0).unwrap();
        let found: Vec<String> =
            tags(&graph).into_iter().map(|(tag, count)| format!("{tag} {count}")).collect();
        assert_eq!(found.join(" "), expected, "{family:?}");
        for node in &graph.nodes {
            let is_router = matches!(node.op, Op::Route(_));
            assert!(!is_router || node.tag == Tag::Router, "{}", node.name);
        }
        // What is there goes through JSON, is verified again, and is text and a drawing.
        assert_eq!(Graph::from_json(&graph.to_json()).unwrap(), graph);
        assert!(graph.to_string().contains("= route("));
        assert!(graph.to_dot().contains("experts"));
    }
}

#[test]
fn windows_of_gpt_oss_alternate() {
    let (config, _) = micro(ModelFamily::GptOss);
    assert_eq!(config.full_attention_layers, [1]);
    for (seq, expected) in [(128, [None; 3]), (129, [Some(128), None, Some(128)])] {
        let graph = capture_for_sequence(&config, seq).unwrap();
        let windows: Vec<Option<usize>> = graph
            .nodes
            .iter()
            .filter_map(|node| match &node.op {
                Op::Attention(op) if op.heads.sinks => Some(op.heads.window),
                _ => None,
            })
            .collect();
        assert_eq!(windows, expected);
    }
}

/// The scale is `DeepseekV3Attention.scaling` of transformers 5.23 for this configuration:
/// (0.1 ln 40 + 1)^2 over the root of 128 + 64. Its norms of latents are made with the default
/// epsilon, whatever the configuration says.
#[test]
fn latent_attention_of_deepseek_v3_has_its_scale() {
    let graph = capture(&read(DEEPSEEK_V3, json!({}))).unwrap();
    let heads = graph.nodes.iter().find_map(|node| match &node.op {
        Op::Attention(op) => Some(op.heads.clone()),
        _ => None,
    });
    let heads = heads.unwrap();
    assert!((heads.scale - 0.135_233_778_860_880_1).abs() < 1e-15, "{}", heads.scale);
    assert_eq!((heads.heads, heads.kv_heads), (128, 128));
    assert_eq!((heads.head_dim, heads.value_dim), (192, Some(128)));
    let rotations = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::Rope(op) => Some(op),
        _ => None,
    });
    let rotations: Vec<_> = rotations.take(2).collect();
    for (rotation, heads, plain_dim) in [(rotations[0], 128, 128), (rotations[1], 1, 0)] {
        assert_eq!((rotation.heads, rotation.plain_dim), (heads, plain_dim));
        assert_eq!((rotation.attention_factor, rotation.interleaved), (1.0, true));
        assert_eq!(rotation.inverse_frequencies.len(), 32);
    }
    let graph = capture(&read(DEEPSEEK_V3, json!({"rms_norm_eps": 1e-5}))).unwrap();
    for node in &graph.nodes {
        if let Op::RmsNorm(norm) = &node.op {
            let of_latent = node.name.contains("_a_layernorm");
            assert_eq!(norm.eps, if of_latent { 1e-6 } else { 1e-5 }, "{}", node.name);
        }
    }
}

#[test]
fn a_mixture_is_not_trained_and_says_so() {
    for family in FAMILIES {
        let graph = capture(&micro(family).0).unwrap();
        let error = differentiate(&graph).unwrap_err().to_string();
        let block = if family == ModelFamily::Mixtral { "block_sparse_moe" } else { "mlp" };
        assert_eq!(
            error,
            format!(
                "node `layers.2.{block}.experts`: op `experts` has no backward rule\n\
                 hint: a model that holds this op can be captured and counted, not trained yet"
            )
        );
    }
}

#[test]
fn bad_values_are_refused_in_these_words() {
    for (text, changes, expected) in [
        (
            MIXTRAL_8X7B,
            json!({"num_experts_per_tok": 9}),
            "c: key `num_experts_per_tok`: expected 1 to 8 experts for each token, got `9`",
        ),
        (
            MIXTRAL_8X7B,
            json!({"output_router_logits": true}),
            "c: key `output_router_logits`: value `true` is not supported\n\
             hint: it adds a balancing loss, which is not supported: `false`",
        ),
        (
            MIXTRAL_8X7B,
            json!({"router_jitter_noise": 0.1}),
            "c: key `router_jitter_noise`: value `0.1` is not supported\n\
             hint: noise on the router's input is not supported; set it to 0",
        ),
        (
            MIXTRAL_8X7B,
            json!({"num_local_experts": null}),
            "c: key `num_local_experts` is missing\n\
             hint: transformers would take that of one published size; state it",
        ),
        (
            MIXTRAL_8X7B,
            json!({"quantization_config": {"quant_method": "gptq"}}),
            "c: key `quantization_config`: value `{\"quant_method\":\"gptq\"}` is not supported\n\
             hint: start from weights in BF16, F16 or F32; the precision of training is set by the \
             precision policy",
        ),
        (
            QWEN3_30B_A3B,
            json!({"mlp_only_layers": [48]}),
            "c: key `mlp_only_layers`: expected a list of layers, got `[48]`",
        ),
        (
            QWEN3_30B_A3B,
            json!({"n_group": 8}),
            "c: unknown key `n_group` with value `8`\n\
             hint: it may change what the model computes; remove it if it does not",
        ),
        // Lists of layers this long were an allocation that ends the process.
        (
            QWEN3_30B_A3B,
            json!({"num_hidden_layers": 1u64 << 50}),
            "c: key `num_hidden_layers`: expected an integer from 1 to 16384, got \
             `1125899906842624`",
        ),
        (
            DEEPSEEK_V3,
            json!({"first_k_dense_replace": u64::MAX, "num_hidden_layers": 3}),
            "c: key `dense layers`: expected ascending layers under 3, got `[0, 1, 2, 3]`",
        ),
        (
            DEEPSEEK_V3,
            json!({"n_routed_experts": 1 << 20, "moe_intermediate_size": 1}),
            "c: key `num_experts`: expected at most 1048576 experts in all layers, got `63963136`",
        ),
        (
            DEEPSEEK_V3,
            json!({"scoring_func": "softmax"}),
            "c: key `scoring_func`: value `softmax` is not supported\nhint: supported: `sigmoid`",
        ),
        (
            DEEPSEEK_V3,
            json!({"topk_group": 9}),
            "c: key `num_experts_per_tok`: expected 1 to 8 chosen groups with 8 experts, got `9`",
        ),
        (
            DEEPSEEK_V3,
            json!({"num_key_value_heads": 64}),
            "c: key `num_key_value_heads`: expected 128 as in `num_attention_heads`, got `64`\n\
             hint: every head of latent attention has its own key",
        ),
        (
            DEEPSEEK_V3,
            json!({"auto_map": {"AutoModel": "modeling_other.Model"}}),
            "c: key `auto_map`: value `{\"AutoModel\":\"modeling_other.Model\"}` is not supported\n\
             hint: the model brings code of its own, which may compute anything; if it is a plain \
             model of its type, remove the key",
        ),
        (
            GPT_OSS_20B,
            json!({"experts_per_token": 3}),
            "c: key `experts_per_token`: expected 4 as in `num_experts_per_tok`, got `3`\n\
             hint: keep one of the two keys",
        ),
        (
            GPT_OSS_20B,
            json!({"layer_types": ["full_attention"]}),
            "c: key `layer_types`: expected a list of 24 kinds, one for each layer, got \
             `[\"full_attention\"]`",
        ),
        (
            GPT_OSS_20B,
            json!({"rope_scaling": null}),
            "c: key `rope_scaling` is missing\n\
             hint: transformers would take that of the published sizes; state it",
        ),
        (
            GPT_OSS_20B,
            json!({"quantization_config": {"quant_method": "mxfp4", "group_size": 32}}),
            "c: unknown key `quantization_config.group_size` with value `32`\n\
             hint: quant_method `mxfp4` takes `activation_scheme`, `dequantize`, \
             `modules_to_not_convert`, `quant_method`",
        ),
    ] {
        let error = LlamaConfig::from_json(&changed(text, changes), "c").unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    let config = LlamaConfig { experts: None, ..micro(ModelFamily::Mixtral).0 };
    assert_eq!(
        capture(&config).unwrap_err().to_string(),
        "configuration: key `experts`: expected settings of it with mixtral, got `none`"
    );
}

type Entry = (String, &'static str, Vec<usize>);

fn entries(config: &LlamaConfig) -> Vec<Entry> {
    let dtype = |element| match element {
        StoredElement::Float => "BF16",
        StoredElement::Exactly(dtype) => dtype.safetensors_name(),
    };
    let stored = config.stored_tensors().into_iter();
    stored.map(|spec| (spec.name, dtype(spec.element), spec.shape)).collect()
}

/// A safetensors file whose data are zeros.
fn write_safetensors(path: &Path, entries: &[Entry]) {
    let mut header = Map::new();
    let mut end = 0usize;
    for (name, dtype, shape) in entries {
        let width = match *dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        let start = end;
        end += shape.iter().product::<usize>() * width;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + end, 0);
    fs::write(path, bytes).unwrap();
}

#[test]
fn folders_of_one_file_and_of_shards_open() {
    for family in FAMILIES {
        let (config, text) = micro(family);
        let stored = entries(&config);
        for shards in [1, 2] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("config.json"), &text).unwrap();
            if shards == 1 {
                write_safetensors(&folder.path().join("model.safetensors"), &stored);
            } else {
                let mut map = Map::new();
                for (part, chunk) in stored.chunks(stored.len().div_ceil(2)).enumerate() {
                    let file = format!("model-{part}.safetensors");
                    write_safetensors(&folder.path().join(&file), chunk);
                    map.extend(chunk.iter().map(|entry| (entry.0.clone(), json!(file))));
                }
                let index = json!({"metadata": {}, "weight_map": map}).to_string();
                fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
            }
            let model = ModelFolder::open(folder.path()).unwrap();
            assert_eq!(model.config, config.clone().into());
            assert_eq!(model.weights.unwrap().tensors.len(), stored.len(), "{family:?}");
        }
    }
}

#[test]
fn stored_names_are_those_of_the_checkpoints() {
    let names = |family| -> Vec<String> {
        entries(&micro(family).0).into_iter().map(|entry| entry.0).collect()
    };
    for (family, expected) in [
        (ModelFamily::Mixtral, "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        (ModelFamily::Mixtral, "model.layers.2.block_sparse_moe.gate.weight"),
        (ModelFamily::Qwen3Moe, "model.layers.0.mlp.experts.7.gate_proj.weight"),
        (ModelFamily::Qwen3Moe, "model.layers.1.mlp.down_proj.weight"),
        (ModelFamily::DeepseekV3, "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"),
        (ModelFamily::DeepseekV3, "model.layers.1.mlp.gate.e_score_correction_bias"),
        (ModelFamily::DeepseekV3, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        (ModelFamily::DeepseekV3, "model.layers.2.mlp.shared_experts.down_proj.weight"),
        (ModelFamily::GptOss, "model.layers.0.mlp.experts.gate_up_proj_blocks"),
        (ModelFamily::GptOss, "model.layers.0.mlp.experts.down_proj_bias"),
        (ModelFamily::GptOss, "model.layers.2.self_attn.sinks"),
        (ModelFamily::GptOss, "model.layers.1.mlp.router.bias"),
    ] {
        assert!(names(family).contains(&expected.to_string()), "{expected}");
    }
    // Not packed, gpt-oss stores its projections with inputs first.
    let plain = LlamaConfig { packing: None, ..micro(ModelFamily::GptOss).0 };
    let stored = plain.stored_tensors();
    let fused = stored.iter().find(|spec| spec.name.ends_with("1.mlp.experts.gate_up_proj"));
    assert_eq!(fused.unwrap().shape, [4, 64, 192]);
    assert_eq!(micro(ModelFamily::GptOss).0.packing, Some(WeightPacking::Mxfp4));
}

#[test]
fn folders_that_do_not_fit_are_refused() {
    type Change = fn(&mut Vec<Entry>);
    let rows: [(ModelFamily, Change, &str); 4] = [
        (
            ModelFamily::Mixtral,
            |all| all.retain(|entry| !entry.0.contains("experts.2.w3")),
            "tensor `model.layers.0.block_sparse_moe.experts.2.w3.weight`: expected shape [96, 64]",
        ),
        (
            ModelFamily::DeepseekV3,
            |all| all.iter_mut().for_each(|entry| entry.1 = "BF16"),
            "tensor `model.layers.0.self_attn.q_a_proj.weight` in",
        ),
        (
            ModelFamily::GptOss,
            |all| {
                let blocks = all.iter_mut().find(|entry| entry.0.ends_with("_blocks"));
                blocks.unwrap().2.swap(1, 2);
            },
            "tensor `model.layers.0.mlp.experts.gate_up_proj_blocks` in",
        ),
        (
            ModelFamily::Qwen3Moe,
            |all| all.push(("model.layers.3.mlp.gate.weight".to_string(), "BF16", vec![8, 64])),
            "tensor `model.layers.3.mlp.gate.weight` in",
        ),
    ];
    for (family, change, expected) in rows {
        let (config, text) = micro(family);
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), text).unwrap();
        let mut stored = entries(&config);
        change(&mut stored);
        write_safetensors(&folder.path().join("model.safetensors"), &stored);
        let error = ModelFolder::open(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn layers_that_predict_further_tokens_are_ignored() {
    let (config, text) = micro(ModelFamily::DeepseekV3);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), text).unwrap();
    let mut stored = entries(&config);
    stored.push(("model.layers.3.eh_proj.weight".to_string(), "BF16", vec![64, 128]));
    write_safetensors(&folder.path().join("model.safetensors"), &stored);
    let model = ModelFolder::open(folder.path()).unwrap();
    let last = model.notes.remarks.last().unwrap();
    assert_eq!(last, "1 tensors of layers that predict further tokens are ignored");
    let tensors = model.weights.unwrap().tensors;
    assert!(tensors.iter().any(|tensor| tensor.dtype == Dtype::F8_E4M3));
}
