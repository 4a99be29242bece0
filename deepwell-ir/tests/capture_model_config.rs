//! Configurations of any family: which reader they get, and what all of them can do.

use std::fs;

use deepwell_ir::capture::{Gpt2Config, LlamaConfig, ModelConfig, ModelFolder};
use deepwell_ir::{Op, differentiate};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

#[test]
fn presets_of_all_families_are_captured_and_read_back() {
    let names: Vec<&str> = ModelConfig::presets().collect();
    assert!(names.contains(&"gpt2") && names.contains(&"llama-micro"), "{names:?}");
    for name in names {
        let config = ModelConfig::preset(name).unwrap();
        let again = ModelConfig::from_json(&config.to_json().to_string(), name).unwrap();
        assert_eq!(again.0, config, "{name}");
        assert!(ModelConfig::model_types().any(|family| family == config.family()), "{name}");
        if config.num_layers() <= 12 {
            let graph = config.capture(Some(64)).unwrap();
            assert_eq!(graph.parameter_count(), config.parameter_count(), "{name}");
            // Experts become ops with derivatives before, by `expand` of deepwell-moe.
            if graph.nodes.iter().all(|node| !matches!(node.op, Op::Experts(_))) {
                differentiate(&graph).unwrap();
            }
        }
    }
    assert!(ModelConfig::preset("gpt3").is_none());
    let gpt2 = ModelConfig::preset("gpt2-micro").unwrap();
    assert_eq!((gpt2.vocab_size(), gpt2.max_position_embeddings()), (256, 1024));
    assert_eq!(
        gpt2.capture(Some(1025)).unwrap_err().to_string(),
        "configuration: key `n_positions`: expected 1025 or more for sequences of 1025 tokens, got \
         `1024`\nhint: each position has a row of its own; shorten the sequences"
    );
}

#[test]
fn an_unknown_type_is_refused_with_all_that_are_known() {
    assert_eq!(
        ModelConfig::from_json(r#"{"model_type": "mamba"}"#, "c").unwrap_err().to_string(),
        "c: key `model_type`: value `mamba` is not supported\n\
         hint: supported: `gpt2`, `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral`, `qwen3_moe`, \
         `deepseek_v3`, `gpt_oss`, `phi3`"
    );
}

#[test]
fn parts_say_where_parameters_are_stored() {
    let llama = ModelConfig::from(LlamaConfig::preset("llama-micro").unwrap());
    for (spec, parts) in llama.stored_slices() {
        assert_eq!(parts.iter().map(|part| &part.name).collect::<Vec<_>>(), [&spec.name]);
    }
    let gpt2 = ModelConfig::from(Gpt2Config::preset("gpt2-micro").unwrap());
    let parts = gpt2.stored_slices();
    let key = parts.iter().find(|(spec, _)| spec.name == "h.1.attn.k.weight").unwrap();
    let part = &key.1[0];
    assert_eq!((part.name.as_str(), part.start), ("h.1.attn.c_attn.weight", 64));
}

#[test]
fn folders_of_both_kinds_open() {
    for name in ["llama-micro", "gpt2-micro"] {
        let config = ModelConfig::preset(name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config.to_json().to_string()).unwrap();
        let zeros = vec![0u8; 4 * 1024 * 256];
        let mut stored: Vec<_> = config
            .stored_slices()
            .into_iter()
            .flat_map(|(_, parts)| parts.into_iter().map(|part| (part.name, part.shape)))
            .collect();
        stored.dedup();
        stored.sort();
        stored.dedup();
        let views = stored.iter().map(|(name, shape)| {
            let bytes = 4 * shape.iter().product::<usize>();
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), &zeros[..bytes]).unwrap())
        });
        let path = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &path).unwrap();
        let model = ModelFolder::open(folder.path()).unwrap();
        assert_eq!(model.config, config, "{name}");
        assert_eq!(model.weights.unwrap().tensors.len(), stored.len(), "{name}");
    }
}
