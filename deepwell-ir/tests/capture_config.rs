//! `config.json` of the llama family: what is read, what is refused and in which words.

use deepwell_ir::capture::{
    CaptureNotes, HiddenAct, LlamaConfig, ModelFamily, Rope, RopeScaling, StoredDType, YarnScaling,
    capture,
};
use deepwell_ir::{Op, differentiate};
use serde_json::{Value, json};

/// The keys and values of the config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0.
const TINYLLAMA: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 5632, "max_position_embeddings": 2048, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.35.0",
  "use_cache": true, "vocab_size": 32000
}"#;

/// The keys and values of the config.json of meta-llama/Meta-Llama-3-8B.
const LLAMA_3_8B: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256
}"#;

/// A small valid config, changed by `changes`: `null` removes a key, anything else sets it.
fn changed(changes: &Value) -> String {
    let mut object = json!({
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 88,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0
    });
    let map = object.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() {
            map.remove(key);
        } else {
            map.insert(key.clone(), value.clone());
        }
    }
    object.to_string()
}

fn read(changes: Value) -> (LlamaConfig, CaptureNotes) {
    LlamaConfig::from_json(&changed(&changes), "c").unwrap()
}

#[test]
fn published_configs_are_the_presets_and_count_exactly() {
    for (text, preset, count) in
        [(TINYLLAMA, "tinyllama-1.1b", 1_100_048_384u64), (LLAMA_3_8B, "llama-3-8b", 8_030_261_248)]
    {
        let (config, notes) = LlamaConfig::from_json(text, "config.json").unwrap();
        assert_eq!(config, LlamaConfig::preset(preset).unwrap());
        assert_eq!(config.parameter_count(), count);
        assert!(notes.remarks.is_empty(), "{notes:?}");
    }
}

#[test]
fn presets_pass_their_own_check_and_count_exactly() {
    for (name, count) in [
        // As llama-micro below: 2 · 256 · 256, 256, and per layer 2 · 256², 2 · 128 · 256,
        // 3 · 256 · 512, 2 · 256, 3 layers; half of each, and 320 for 256, in parity-600k.
        ("parity-600k", 582_528u64),
        // The same with norms of 64 for queries and for keys in each of 3 layers.
        ("qwen3-600k", 582_912),
        ("parity-2m", 1_902_336),
        ("parity-3m", 3_082_496),
        // Table and head 2 · 256 · 64, final norm 64, and per layer q, o 64 · 64, k, v 32 · 64,
        // three 64 · 160, two norms 64.
        ("llama-micro", 119_104),
        // The same sum at 2 · 32000 · 768, 768, 4 · 768², 3 · 768 · 2048, 2 · 768, 12 layers.
        ("llama-134m", 134_105_856),
        ("llama-1.1b", 1_100_048_384),
    ] {
        let config = LlamaConfig::preset(name).unwrap();
        config.check(name).unwrap();
        assert_eq!(config.parameter_count(), count, "{name}");
    }
    for name in LlamaConfig::PRESETS {
        assert!(LlamaConfig::preset(name).is_some(), "{name}");
    }
    assert_eq!(LlamaConfig::preset("parity-3M"), None);
}

#[test]
fn every_config_survives_the_way_to_json_and_back() {
    let yarn = |attention_factor, mscale| {
        RopeScaling::Yarn(YarnScaling {
            factor: 4.0,
            original_max_position_embeddings: 16,
            attention_factor,
            beta_fast: 32.0,
            beta_slow: 1.5,
            mscale,
            mscale_all_dim: mscale,
            truncate: false,
        })
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    for scaling in [
        RopeScaling::None,
        RopeScaling::Linear { factor: 2.5 },
        RopeScaling::Dynamic { factor: 2.0 },
        llama3,
        yarn(Some(1.25), None),
        yarn(None, Some(0.707)),
    ] {
        for torch_dtype in [None, Some(StoredDType::F16)] {
            let config = LlamaConfig {
                rope: Rope { theta: 12345.5, scaling: scaling.clone() },
                head_dim: 24,
                attention_bias: true,
                tie_word_embeddings: true,
                initializer_range: 0.05,
                torch_dtype,
                ..LlamaConfig::preset("llama-micro").unwrap()
            };
            let text = config.to_json().to_string();
            assert_eq!(LlamaConfig::from_json(&text, "round trip").unwrap().0, config);
        }
    }
}

#[test]
fn defaults_are_those_of_transformers() {
    let (config, notes) = read(json!({
        "num_key_value_heads": null, "max_position_embeddings": null, "rms_norm_eps": null,
        "rope_theta": null
    }));
    let expected = LlamaConfig {
        family: ModelFamily::Llama,
        vocab_size: 97,
        hidden_size: 32,
        intermediate_size: 88,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 10000.0, scaling: RopeScaling::None },
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
    };
    assert_eq!(config, expected);
    assert_eq!(
        notes.remarks,
        [
            "`max_position_embeddings` is not stated: 2048, the default of transformers",
            "`rms_norm_eps` is not stated: 1e-6, the default of transformers",
            "`rope_theta` is not stated: 10000, the default of transformers",
        ]
    );
}

#[test]
fn old_and_new_spellings_mean_the_same() {
    let llama3 = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    });
    let with = |extra: Value| {
        let mut object = llama3.clone();
        object.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        object
    };
    let old = with(json!({"type": "llama3"}));
    let old_both = with(json!({"type": "llama3", "rope_type": "llama3"}));
    let new = with(json!({"rope_type": "llama3", "rope_theta": 500000.0}));
    let first = read(json!({"rope_theta": 5e5, "rope_scaling": old, "torch_dtype": "bfloat16"})).0;
    for changes in [
        json!({"rope_theta": 5e5, "rope_scaling": old_both, "torch_dtype": "bfloat16"}),
        json!({"rope_theta": null, "rope_parameters": new, "dtype": "bfloat16"}),
        json!({"rope_theta": 5e5, "rope_parameters": new, "dtype": "bfloat16",
               "torch_dtype": "bfloat16"}),
    ] {
        assert_eq!(read(changes).0, first);
    }
}

#[test]
fn the_padding_token_has_a_row_that_lookups_do_not_train() {
    for (value, expected) in [(json!(null), None), (json!(0), Some(0)), (json!(-1), Some(96))] {
        let (config, _) = read(json!({"pad_token_id": value}));
        assert_eq!(config.padding_row, expected, "{value}");
        let read_back = LlamaConfig::from_json(&config.to_json().to_string(), "back").unwrap().0;
        assert_eq!(read_back, config, "{value}");
        let graph = capture(&config).unwrap();
        let graph = differentiate(&graph).unwrap();
        let paddings = graph.nodes.iter().filter_map(|node| match &node.op {
            Op::Embedding(op) => Some(op.padding),
            Op::EmbeddingBackward(op) => Some(op.padding),
            _ => None,
        });
        assert_eq!(paddings.collect::<Vec<_>>(), [expected; 2], "{value}");
    }
}

#[test]
fn harmless_keys_are_listed_and_others_remarked() {
    let (_, notes) = read(json!({
        "_name_or_path": "x", "use_cache": true, "bos_token_id": 1, "attention_dropout": 0,
        "pretraining_tp": 1, "layer_types": ["full_attention", "full_attention"],
        "architectures": ["LlamaForCausalLM"], "pad_token_id": 0
    }));
    let expected = [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "layer_types",
        "pretraining_tp",
        "use_cache",
    ];
    assert_eq!(notes.without_effect, expected);
    assert_eq!(notes.remarks, [""; 0]);
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16});
    let (_, notes) = read(json!({"rope_scaling": yarn}));
    assert_eq!(notes.remarks.len(), 1);
    assert!(notes.remarks[0].starts_with("yarn: `factor` is 2 but"), "{}", notes.remarks[0]);
}

/// Each row: what is changed in a valid config, and the whole error.
#[test]
fn bad_values_are_refused_in_these_words() {
    for (changes, expected) in [
        // Sizes.
        (
            json!({"hidden_size": null}),
            "c: key `hidden_size` is missing\n\
             hint: transformers would take the size of Llama-2-7B in its place; state it",
        ),
        (
            json!({"hidden_size": 0}),
            "c: key `hidden_size`: expected an integer of 1 or more, got `0`",
        ),
        (
            json!({"num_hidden_layers": -2}),
            "c: key `num_hidden_layers`: expected an integer of 1 or more, got `-2`",
        ),
        (
            json!({"vocab_size": 0}),
            "c: key `vocab_size`: expected an integer of 1 or more, got `0`",
        ),
        (
            json!({"vocab_size": 97.0}),
            "c: key `vocab_size`: expected an integer of 1 or more, got `97.0`\n\
             hint: write it without a decimal point",
        ),
        (
            json!({"vocab_size": "97"}),
            "c: key `vocab_size`: expected an integer of 1 or more, got `97`\n\
             hint: write it without quotes",
        ),
        (
            json!({"vocab_size": 1e30}),
            "c: key `vocab_size`: expected an integer of 1 or more, got `1e+30`\n\
             hint: write it without a decimal point",
        ),
        (
            json!({"vocab_size": 1u64 << 40}),
            "c: key `vocab_size`: expected an integer from 1 to 4194304, got `1099511627776`",
        ),
        (
            json!({"num_attention_heads": 1 << 20, "head_dim": 1 << 20, "num_key_value_heads": 1}),
            "c: key `num_attention_heads * head_dim`: expected an integer from 1 to 4194304, \
             got `1099511627776`",
        ),
        (
            json!({"num_attention_heads": 5, "num_key_value_heads": 5}),
            "c: key `hidden_size`: expected a multiple of `num_attention_heads` (5), got `32`\n\
             hint: or state `head_dim`",
        ),
        (
            json!({"num_key_value_heads": 3}),
            "c: key `num_key_value_heads`: expected a divisor of `num_attention_heads` (4), \
             got `3`\nhint: each key/value head serves the same number of query heads",
        ),
        (
            json!({"head_dim": 7}),
            "c: key `head_dim`: expected an even number, got `7`\n\
             hint: RoPE turns elements in pairs; head_dim is hidden_size / num_attention_heads \
             unless stated",
        ),
        // Numbers, booleans, strings.
        (
            json!({"rms_norm_eps": 0.0}),
            "c: key `rms_norm_eps`: expected a number greater than 0, got `0.0`",
        ),
        (
            json!({"rms_norm_eps": "1e-5"}),
            "c: key `rms_norm_eps`: expected a number greater than 0, got `1e-5`\n\
             hint: write it without quotes",
        ),
        (
            json!({"initializer_range": -0.02}),
            "c: key `initializer_range`: expected a number greater than 0, got `-0.02`",
        ),
        (
            json!({"rope_theta": 1}),
            "c: key `rope_theta`: expected a number greater than 1, got `1`",
        ),
        (
            json!({"pad_token_id": 97}),
            "c: key `pad_token_id`: expected a token below `vocab_size` (97), got `97`\n\
             hint: PyTorch refuses such a table; remove the key if no token is padding",
        ),
        (
            json!({"pad_token_id": -98}),
            "c: key `pad_token_id`: expected a token below `vocab_size` (97), got `-98`\n\
             hint: PyTorch refuses such a table; remove the key if no token is padding",
        ),
        (json!({"mlp_bias": 1}), "c: key `mlp_bias`: expected `true` or `false`, got `1`"),
        (
            json!({"tie_word_embeddings": "false"}),
            "c: key `tie_word_embeddings`: expected `true` or `false`, got `false`\n\
             hint: write it without quotes",
        ),
        (
            json!({"attention_bias": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                   12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]}),
            "c: key `attention_bias`: expected `true` or `false`, got \
             `[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,...`",
        ),
        (
            json!({"hidden_act": ["silu"]}),
            "c: key `hidden_act`: expected a string, got `[\"silu\"]`",
        ),
        // Other mathematics.
        (
            json!({"model_type": "mamba"}),
            "c: key `model_type`: value `mamba` is not supported\n\
             hint: supported: `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral`, `qwen3_moe`, \
             `deepseek_v3`, `gpt_oss`, `phi3`",
        ),
        (
            json!({"model_type": null}),
            "c: key `model_type` is missing\n\
             hint: supported: `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral`, `qwen3_moe`, \
             `deepseek_v3`, `gpt_oss`, `phi3`",
        ),
        (
            json!({"architectures": ["LlamaForSequenceClassification"]}),
            "c: key `architectures`: value `[\"LlamaForSequenceClassification\"]` is not \
             supported\n\
             hint: supported: [\"LlamaForCausalLM\"]",
        ),
        (
            json!({"hidden_act": "gelu"}),
            "c: key `hidden_act`: value `gelu` is not supported\nhint: supported: `silu`",
        ),
        (
            json!({"attention_dropout": 0.1}),
            "c: key `attention_dropout`: value `0.1` is not supported\n\
             hint: dropout is not supported; set it to 0 to train without",
        ),
        (
            json!({"pretraining_tp": 2}),
            "c: key `pretraining_tp`: value `2` is not supported\n\
             hint: supported: 1; other values only split the GEMMs in another way, so that 1 \
             trains the same model up to rounding",
        ),
        (
            json!({"sliding_window": 4096}),
            "c: key `sliding_window`: value `4096` is not supported\n\
             hint: only full causal attention is supported: `null`",
        ),
        (
            json!({"quantization_config": {"modules_to_not_convert": ["lm_head", "a", "b", "c"]}}),
            "c: key `quantization_config`: value \
             `{\"modules_to_not_convert\":[\"lm_head\",\"a\",\"b\",\"c\"]}` is not supported\n\
             hint: start from weights in BF16, F16 or F32; the precision of training is set by \
             the precision policy",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "c: key `partial_rotary_factor`: value `0.5` is not supported\n\
             hint: supported: 1, a rotation of the whole head",
        ),
        (
            json!({"torch_dtype": "float64"}),
            "c: key `torch_dtype`: value `float64` is not supported\n\
             hint: supported: `float32`, `bfloat16`, `float16`",
        ),
        (
            json!({"dtype": "float32", "torch_dtype": "float16"}),
            "c: key `torch_dtype`: expected `float32` as in `dtype`, got `float16`\n\
             hint: keep one of the two keys",
        ),
        // Unknown keys.
        (
            json!({"attention_biass": true}),
            "c: unknown key `attention_biass` with value `true`\nhint: did you mean \
             `attention_bias`?",
        ),
        (
            json!({"residual_multiplier": 0.22}),
            "c: unknown key `residual_multiplier` with value `0.22`\n\
             hint: it may change what the model computes; remove it if it does not",
        ),
    ] {
        let error = LlamaConfig::from_json(&changed(&changes), "c").unwrap_err();
        assert_eq!(error.to_string(), expected, "{changes}");
    }
}

/// transformers writes `null` for what is not set, in whatever class of configuration.
#[test]
fn null_means_absent_for_any_key() {
    let text = changed(&json!({}));
    let plain = LlamaConfig::from_json(&text, "c").unwrap().0;
    for changes in [
        json!({"pad_token_id": null, "summary_activation": null, "a_key_of_tomorrow": null}),
        json!({"architectures": null, "quantization_config": null, "layer_types": null}),
        json!({"rope_parameters": {"rope_theta": plain.rope.theta, "factor": null},
               "rope_theta": null, "rope_scaling": null}),
    ] {
        let mut object: Value = serde_json::from_str(&text).unwrap();
        object.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let (config, _) = LlamaConfig::from_json(&object.to_string(), "c").unwrap();
        assert_eq!(config, plain, "{changes}");
    }
}

#[test]
fn bad_rope_is_refused_in_these_words() {
    for (changes, expected) in [
        (
            json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
            "c: key `rope_scaling.rope_type`: value `longrope` is not supported\n\
             hint: factors for each pair of a head are not supported; the variants of the model \
             for its original length (`4k`) have none",
        ),
        (
            json!({"rope_scaling": "linear"}),
            "c: key `rope_scaling`: expected an object, got `a string`\n\
             hint: for example {\"rope_type\": \"linear\", \"factor\": 2.0}",
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear"}}),
            "c: key `rope_scaling.factor` is missing\n\
             hint: this rope_type cannot do without it",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 0.5}}),
            "c: key `rope_scaling.factor`: expected a number of 1 or more, got `0.5`",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2}}),
            "c: key `rope_scaling.type`: expected `dynamic` as in `rope_type`, got `linear`\n\
             hint: keep one of the two keys",
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2, "low_freq_factor": 1}}),
            "c: unknown key `rope_scaling.low_freq_factor` with value `1`\n\
             hint: rope_type `linear` takes `factor`, `partial_rotary_factor`, `rope_theta`, \
             `rope_type`, `type`",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                                    "high_freq_factor": 4,
                                    "original_max_position_embeddings": 32}}),
            "c: key `rope_scaling.high_freq_factor`: expected a number greater than \
             `low_freq_factor` (4), got `4.0`\nhint: the rule interpolates between the two",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1,
                                    "beta_slow": 2}}),
            "c: key `rope_scaling.beta_fast`: expected a number of `beta_slow` (2) or more, got \
             `1.0`\nhint: pairs that turn more often than `beta_fast` times are kept as they are",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
            "c: key `rope_parameters.partial_rotary_factor`: value `0.5` is not supported\n\
             hint: supported: 1, a rotation of the whole head",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
            "c: key `rope_theta`: expected the same as `rope_parameters.rope_theta` (20000), got \
             `10000.0`\nhint: keep one of the two keys",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default"},
                   "rope_scaling": {"factor": 2, "type": "linear"}}),
            "c: key `rope_scaling`: expected one of the two keys, got \
             `{\"factor\":2,\"type\":\"linear\"}`\n\
             hint: `rope_parameters` is there too, the newer name; keep one of them",
        ),
        (
            json!({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}),
            "c: key `head_dim`: expected 4 or more with rope_type `dynamic`, got `2`\n\
             hint: the rule divides by head_dim - 2",
        ),
    ] {
        let error = LlamaConfig::from_json(&changed(&changes), "c").unwrap_err();
        assert_eq!(error.to_string(), expected, "{changes}");
    }
}

#[test]
fn text_that_is_no_config_is_refused() {
    for (text, expected) in [
        ("", "c:1:0: not valid JSON: EOF while parsing a value"),
        ("[]", "c: expected a JSON object, got an array"),
        ("{\"vocab_size\": NaN}", "c:1:16: not valid JSON: expected value"),
        (
            "{}",
            "c: key `model_type` is missing\n\
             hint: supported: `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral`, `qwen3_moe`, \
             `deepseek_v3`, `gpt_oss`, `phi3`",
        ),
    ] {
        assert_eq!(LlamaConfig::from_json(text, "c").unwrap_err().to_string(), expected);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let error = LlamaConfig::from_path(folder.path()).unwrap_err().to_string();
    let hint = "hint: give a Hugging Face model folder or its config.json";
    assert_eq!(error, format!("`{}`: expected a config.json\n{hint}", file.display()));
    std::fs::write(&file, [0xff, 0xfe]).unwrap();
    let error = LlamaConfig::from_path(&file).unwrap_err().to_string();
    assert_eq!(error, format!("{}: expected UTF-8 text, got other bytes", file.display()));
}

#[test]
fn a_config_made_by_hand_is_checked_too() {
    let mut config = LlamaConfig::preset("llama-micro").unwrap();
    config.num_kv_heads = 0;
    assert_eq!(
        config.check("mine").unwrap_err().to_string(),
        "mine: key `num_key_value_heads`: expected an integer from 1 to 4194304, got `0`"
    );
    config.num_kv_heads = 1;
    config.rms_norm_eps = f64::NAN;
    assert_eq!(
        deepwell_ir::capture::capture(&config).unwrap_err().to_string(),
        "configuration: key `rms_norm_eps`: expected a number greater than 0, got `NaN`"
    );
}

#[test]
fn llama_7b_has_its_published_size() {
    // Llama 2 (arXiv 2307.09288): 6.74 billion.
    assert_eq!(LlamaConfig::preset("llama-7b").unwrap().parameter_count(), 6_738_415_616);
}
