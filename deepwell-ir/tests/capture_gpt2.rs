//! GPT-2: published sizes, weight files, and the graph.

use std::fs;

use deepwell_ir::capture::{Gpt2Config, ModelFolder, StoredDType, capture_gpt2};
use deepwell_ir::{Op, Tag, differentiate};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// The keys of openai-community/gpt2 that describe the model, with three sizes open.
fn text(width: usize, layers: usize, heads: usize, changes: Value) -> String {
    let mut object = json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257
    });
    object.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    object.to_string()
}

fn micro() -> String {
    let changes = json!({"vocab_size": 96, "n_positions": 8, "n_ctx": 8});
    text(64, 2, 2, changes)
}

#[test]
fn published_models_count_exactly() {
    for (name, width, layers, heads, count) in [
        ("gpt2", 768, 12, 12, 124_439_808u64),
        ("gpt2-medium", 1024, 24, 16, 354_823_168),
        ("gpt2-large", 1280, 36, 20, 774_030_080),
        ("gpt2-xl", 1600, 48, 25, 1_557_611_200),
    ] {
        let (config, notes) =
            Gpt2Config::from_json(&text(width, layers, heads, json!({})), "c").unwrap();
        assert_eq!(config.parameter_count(), count, "{name}");
        assert_eq!(capture_gpt2(&config).unwrap().parameter_count(), count, "{name}");
        assert_eq!(notes.remarks.len(), 3, "dropout, three times: {:?}", notes.remarks);
    }
}

/// What `GPT2Config.save_pretrained` of transformers 5.23.0 writes beside the keys above.
#[test]
fn keys_of_transformers_5_are_taken() {
    let changes = json!({
        "add_cross_attention": false, "dtype": "float32", "n_inner": null, "pad_token_id": null,
        "reorder_and_upcast_attn": false, "scale_attn_by_inverse_layer_idx": false,
        "scale_attn_weights": true, "tie_word_embeddings": true,
        "transformers_version": "5.23.0", "use_cache": true
    });
    let (config, _) = Gpt2Config::from_json(&text(64, 2, 2, changes), "c").unwrap();
    assert_eq!((config.intermediate_size, config.torch_dtype), (256, Some(StoredDType::F32)));
    // Its table of tokens has no padding row, so that the number is without effect too.
    let (padded, notes) =
        Gpt2Config::from_json(&text(64, 2, 2, json!({"pad_token_id": 7})), "c").unwrap();
    assert_eq!((padded.vocab_size, notes.remarks.len()), (config.vocab_size, 3));
    assert!(notes.without_effect.contains(&"pad_token_id".to_string()), "{notes:?}");
}

#[test]
fn the_graph_has_tags_and_a_backward() {
    let (config, _) = Gpt2Config::from_json(&micro(), "c").unwrap();
    let graph = capture_gpt2(&config).unwrap();
    // Per layer: two norms; three projections, attention, output, residual; up, GELU, down,
    // residual. Around them: two tables, final norm, head.
    for (tag, count) in
        [(Tag::Embed, 2), (Tag::Norm, 5), (Tag::Attn, 12), (Tag::Mlp, 8), (Tag::Head, 1)]
    {
        assert_eq!(graph.nodes.iter().filter(|node| node.tag == tag).count(), count, "{tag}");
    }
    let trained = differentiate(&graph).unwrap();
    assert_eq!(trained.parameter_gradients().len(), config.parameters().len());
    assert!(trained.nodes.iter().any(|node| matches!(node.op, Op::AddPositionsBackward(_))));
}

#[test]
fn bad_values_are_refused_in_these_words() {
    for (changes, expected) in [
        (json!({"n_head": 5}), "c: key `n_head`: expected a divisor of `n_embd` (64), got `5`"),
        (
            // Four times as much, the default of `n_inner`, wrapped around.
            json!({"n_embd": i64::MAX, "n_inner": null}),
            "c: key `n_embd`: expected an integer from 1 to 4194304, got `9223372036854775807`",
        ),
        (json!({"n_ctx": 7}), "c: key `n_ctx`: expected 1024 as in `n_positions`, got `7`"),
        (
            json!({"activation_function": "relu"}),
            "c: key `activation_function`: value `relu` is not supported\n\
             hint: supported: `gelu_new`, `gelu_pytorch_tanh`, `gelu`",
        ),
        (
            json!({"reorder_and_upcast_attn": true}),
            "c: key `reorder_and_upcast_attn`: value `true` is not supported\n\
             hint: supported: `false`",
        ),
        (
            json!({"n_layer": null}),
            "c: key `n_layer` is missing\nhint: transformers would take the size of the smallest \
             GPT-2 in its place; state it",
        ),
        (
            json!({"add_cross_attention": true}),
            "c: key `add_cross_attention`: value `true` is not supported\n\
             hint: only decoders without cross-attention are supported: `false`",
        ),
    ] {
        let error = Gpt2Config::from_json(&text(64, 2, 2, changes), "c").unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

/// A folder whose tensors are named with `prefix` and hold their own index; with a mask.
fn folder(prefix: &str, change: fn(&mut Vec<(String, Vec<usize>)>)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), micro()).unwrap();
    let (config, _) = Gpt2Config::from_json(&micro(), "c").unwrap();
    let mut stored: Vec<(String, Vec<usize>)> = config
        .parameters_and_parts()
        .into_iter()
        .map(|(_, part)| (format!("{prefix}{}", part.name), part.shape))
        .collect();
    stored.dedup();
    stored.push((format!("{prefix}h.0.attn.bias"), vec![1, 1, 8, 8]));
    change(&mut stored);
    stored.sort();
    stored.dedup();
    let zeros = vec![0u8; 4 * 96 * 256];
    let views = stored.iter().map(|(name, shape)| {
        let bytes = 4 * shape.iter().product::<usize>();
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), &zeros[..bytes]).unwrap())
    });
    let path = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).unwrap();
    folder
}

#[test]
fn folders_of_both_namings_open_and_others_are_refused() {
    for prefix in ["", "transformer."] {
        let folder = folder(prefix, |_| {});
        let model = ModelFolder::open(folder.path()).unwrap();
        // Two tables, twelve tensors a layer, two of the final norm.
        let tensors = model.weights.unwrap().tensors;
        assert_eq!(tensors.len(), 2 + 2 * 12 + 2);
        assert!(tensors.iter().all(|tensor| tensor.dtype == Dtype::F32));
        assert_eq!(
            model.notes.remarks.last().unwrap(),
            "1 stored attention masks are ignored: they are fixed"
        );
    }
    type Change = fn(&mut Vec<(String, Vec<usize>)>);
    let rows: [(Change, &str); 3] = [
        (
            |all| all.retain(|tensor| tensor.0 != "wpe.weight"),
            "tensor `wpe.weight`: expected shape [8, 64]",
        ),
        (
            |all| {
                let names = all.iter_mut().filter(|tensor| tensor.0 == "h.1.attn.c_attn.weight");
                names.for_each(|tensor| tensor.1.reverse());
            },
            "tensor `h.1.attn.c_attn.weight` in",
        ),
        (|all| all.push(("h.2.ln_1.bias".to_string(), vec![64])), "tensor `h.2.ln_1.bias` in"),
    ];
    for (change, expected) in rows {
        let error = ModelFolder::open(folder("", change).path()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn parameters_are_cut_out_of_stored_tensors() {
    let (config, _) = Gpt2Config::from_json(&micro(), "c").unwrap();
    for (spec, part) in config.parameters_and_parts() {
        let count: usize = part.shape.iter().product();
        let stored: Vec<f32> = (0..count).map(|index| index as f32).collect();
        let values = part.extract(&stored, &spec.shape).unwrap();
        assert_eq!(values.len() as u64, spec.count(), "{}", spec.name);
        assert_eq!(part.extract(&stored[1..], &spec.shape), None);
        match spec.name.as_str() {
            // Output 3 of keys from input 5: row 5, column 64 + 3 of [64, 192].
            "h.1.attn.k.weight" => assert_eq!(values[3 * 64 + 5], (5 * 192 + 67) as f32),
            "h.1.attn.v.bias" => assert_eq!(values[2], 130.0),
            "h.0.mlp.c_fc.weight" => assert_eq!(values[200 * 64 + 1], (256 + 200) as f32),
            "wte.weight" | "ln_f.bias" => assert_eq!(values, stored),
            _ => {}
        }
    }
}
