//! Which files of a model folder hold its weights, and what is refused in place of fresh weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepwell_ir::capture::{LlamaConfig, ModelConfig, ModelFolder, WeightFiles, Weights};
use serde_json::{Map, Value, json};

/// A safetensors file of F32 zeros.
fn write_safetensors(path: &Path, entries: &[(String, Vec<usize>)]) {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in entries {
        let start = end;
        end += shape.iter().product::<usize>() * 4;
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + end, 0);
    fs::write(path, bytes).unwrap();
}

fn shard(path: &Path, names: &[&str]) {
    let entries: Vec<_> = names.iter().map(|name| (name.to_string(), vec![2])).collect();
    write_safetensors(path, &entries);
}

/// The names of the weights that are found, or the error without the folder's path.
fn found(folder: &Path) -> Result<Option<Vec<String>>, String> {
    let tensors = WeightFiles::find(folder).and_then(|files| {
        let names = |weights: Weights| weights.tensors().map(|it| it.name.clone()).collect();
        files.map(|files| files.open().map(names)).transpose()
    });
    tensors.map_err(|error| error.to_string().replace(&folder.display().to_string(), "DIR"))
}

/// Files that are no weights in a form that is read: refused with their names and this hint, so
/// that no run begins from fresh weights beside them.
#[test]
fn issue_31_weights_in_other_forms_are_refused_by_name() {
    for (files, got, hint) in [
        (&["pytorch_model.bin"][..], "`pytorch_model.bin`", "pickles of PyTorch are not read"),
        (
            &["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            "`pytorch_model-00001-of-00002.bin`, `pytorch_model-00002-of-00002.bin`",
            "pickles of PyTorch are not read",
        ),
        (
            &["pytorch_model.bin.index.json"],
            "`pytorch_model.bin.index.json`",
            "download the shards",
        ),
        (&["weights.safetensors"], "`weights.safetensors`", "rename it to `model.safetensors`"),
        (&["model.fp16.safetensors"], "`model.fp16.safetensors`", "rename it"),
        (&["a.safetensors", "b.safetensors"], "`a.safetensors`, `b.safetensors`", "name shards"),
        (&["llama-2-7b.Q4_K_M.gguf"], "`llama-2-7b.Q4_K_M.gguf`", "GGUF is not read"),
        (&["flax_model.msgpack"], "`flax_model.msgpack`", "Flax and TensorFlow are not read"),
        (&["tf_model.h5"], "`tf_model.h5`", "Flax and TensorFlow are not read"),
        (&["consolidated.00.pth"], "`consolidated.00.pth`", "pickles of PyTorch are not read"),
        (&["model.pt"], "`model.pt`", "pickles of PyTorch are not read"),
        (&["model.ckpt"], "`model.ckpt`", "pickles of PyTorch are not read"),
        (&["model.safetensors.part"], "`model.safetensors.part`", "finish the download"),
        (&["weights.npz"], "`weights.npz`", "convert the weights to `model.safetensors`"),
        (&["model.tar.gz"], "`model.tar.gz`", "unpack the archive"),
        (&["adapter_model.safetensors"], "`adapter_model.safetensors`", "merge it into its model"),
        (&["original/consolidated.00.pth"], "`original/consolidated.00.pth`", "pickles"),
        (
            &["checkpoint-500/model.safetensors"],
            "`checkpoint-500/model.safetensors`",
            "name the folder that holds the weights",
        ),
        (&["1.bin", "2.bin", "3.bin", "4.bin"], "`1.bin`, `2.bin`, `3.bin`, 1 more", "pickles"),
        (
            &["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"],
            "2 of the shards: `model-00001-of-00003.safetensors`, \
             `model-00003-of-00003.safetensors`",
            "download the others",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        let error = found(folder.path()).unwrap_err();
        let expected = format!(
            "`DIR`: expected weights in `model.safetensors`, in `model.safetensors.index.json` \
             with its shards, or in all shards `model-00001-of-0000N.safetensors`, got {got}\n\
             hint: "
        );
        assert!(error.starts_with(&expected), "{files:?}: {error}");
        assert!(error.contains(hint), "{files:?}: {error}");
    }
}

#[test]
fn a_folder_without_weights_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<u8> = [20_240_520_i32, 1, 0].into_iter().flat_map(i32::to_le_bytes).collect();
    for (file, contents) in [
        ("config.json", &b"{}"[..]),
        ("tokenizer.json", b"{}"),
        ("tokenizer.model", b"x"),
        ("README.md", b"x"),
        ("training_args.bin", b"x"),
        ("optimizer.pt", b"x"),
        (".gitattributes", b"x"),
        ("x_train.bin", &tokens),
        ("texts.tar.gz", b"x"),
        ("texts/a.bin", b"x"),
    ] {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    assert_eq!(found(folder.path()), Ok(None));
}

#[test]
fn whole_shards_need_no_index() {
    let folder = tempfile::tempdir().unwrap();
    shard(&folder.path().join("model-00001-of-00002.safetensors"), &["a", "c"]);
    shard(&folder.path().join("model-00002-of-00002.safetensors"), &["b"]);
    let names = ["a", "b", "c"].map(str::to_string).to_vec();
    assert_eq!(found(folder.path()), Ok(Some(names)));
    shard(&folder.path().join("model-00002-of-00002.safetensors"), &["b", "a"]);
    let error = found(folder.path()).unwrap_err();
    assert!(error.contains("tensor `a` is in it and in `model-00001-of-00002"), "{error}");
}

/// An index that is wrong in every way that transformers does not mind.
#[test]
fn issue_31_tensors_are_taken_from_the_shard_that_holds_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = |number| format!("model-0000{number}-of-00003.safetensors");
    shard(&folder.path().join(file(1)), &["a", "b", "unmapped"]);
    shard(&folder.path().join(file(2)), &["c"]);
    shard(&folder.path().join(file(3)), &["elsewhere"]);
    let write = |map: Value| {
        let index = json!({"metadata": {"total_size": "unknown", "more": [1]}, "weight_map": map});
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    };
    // The map has `b` and `c` the wrong way round, leaves one tensor out and one file.
    write(json!({"a": file(1), "b": file(2), "c": file(1)}));
    let names = ["a", "b", "c", "unmapped"].map(str::to_string).to_vec();
    assert_eq!(found(folder.path()), Ok(Some(names)));
    let weights = WeightFiles::find(folder.path()).unwrap().unwrap().open().unwrap();
    assert_eq!(
        weights.remarks,
        [
            "`model-00003-of-00003.safetensors` is ignored: `model.safetensors.index.json` lists \
             no tensor of it",
            "`model.safetensors.index.json` maps 2 tensors to other shards than hold them: they \
             are taken from where they are",
        ]
    );
    write(json!({"a": file(1), "c": file(2), "elsewhere": file(2)}));
    let error = found(folder.path()).unwrap_err();
    assert!(
        error.contains("`elsewhere` is not in it") && error.contains("-00003.safetensors` holds"),
        "{error}"
    );
}

#[cfg(unix)]
#[test]
fn issue_31_links_that_lead_nowhere_are_named() {
    for name in ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::os::unix::fs::symlink("../blobs/0123abcd", &path).unwrap();
        let error = found(folder.path()).unwrap_err();
        let words = if name.ends_with(".bin") { "got `pytorch_model.bin`" } else { "a link to" };
        assert!(error.contains(name) && error.contains(words), "{error}");
    }
}

#[test]
fn a_pointer_of_git_lfs_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 538090408\n",
        "0".repeat(64)
    );
    fs::write(folder.path().join("model.safetensors"), pointer).unwrap();
    let error = found(folder.path()).unwrap_err();
    assert!(error.contains("a pointer of Git LFS") && error.contains("git lfs pull"), "{error}");
}

/// Renames the tensors of a model (`None` leaves one out), opens its folder, and wants as many of
/// its names to differ.
fn check_names(
    config: &ModelConfig,
    rename: impl Fn(&str) -> Option<String>,
    expected: Result<usize, &str>,
) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_json().to_string()).unwrap();
    let mut stored = BTreeMap::new();
    for (_, parts) in config.stored_slices() {
        for part in parts {
            if let Some(name) = rename(&part.name) {
                stored.insert(name, part.shape);
            }
        }
    }
    let stored: Vec<_> = stored.into_iter().collect();
    write_safetensors(&folder.path().join("model.safetensors"), &stored);
    let opened = ModelFolder::open(folder.path());
    match (opened, expected) {
        (Ok(model), Ok(differ)) => {
            let model = model.weights.unwrap();
            assert_eq!(model.stored_names.len(), differ, "{:?}", model.stored_names);
            assert_eq!(model.tensors.len(), stored.len());
            for (_, parts) in config.stored_slices() {
                for part in parts {
                    let name = model.stored_name(&part.name);
                    assert!(model.tensors.iter().any(|tensor| tensor.name == name), "{name}");
                }
            }
        }
        (Err(error), Err(words)) => {
            assert!(error.to_string().contains(words), "`{words}` in `{error}`");
        }
        (opened, expected) => panic!("expected {expected:?}, got {opened:?}"),
    }
}

#[test]
fn issue_31_a_tied_table_is_stored_under_either_name() {
    let tied = |tie_word_embeddings| -> ModelConfig {
        let config = LlamaConfig::preset("llama-micro").unwrap();
        LlamaConfig { tie_word_embeddings, ..config }.into()
    };
    let gpt2 = ModelConfig::preset("gpt2-micro").unwrap();
    let same = |name: &str| Some(name.to_string());
    let headed = |name: &str| match name {
        "model.embed_tokens.weight" | "wte.weight" => Some("lm_head.weight".to_string()),
        _ => Some(name.to_string()),
    };
    let bare = |name: &str| Some(name.trim_start_matches("model.").to_string());
    let count = tied(true).parameters().len();
    check_names(&tied(true), same, Ok(0));
    check_names(&tied(true), headed, Ok(1));
    check_names(&tied(true), bare, Ok(count));
    check_names(&tied(true), |name| headed(name).and_then(|it| bare(&it)), Ok(count));
    // All but the head, which has no prefix either way.
    check_names(&tied(false), bare, Ok(count));
    check_names(&tied(false), headed, Err("tensor `model.embed_tokens.weight`: expected shape"));
    check_names(&gpt2, same, Ok(0));
    check_names(&gpt2, headed, Ok(1));
    let prefixed = |name: &str| match headed(name)?.as_str() {
        "lm_head.weight" => Some("lm_head.weight".to_string()),
        other => Some(format!("transformer.{other}")),
    };
    let names: std::collections::BTreeSet<String> =
        gpt2.stored_slices().into_iter().flat_map(|(_, parts)| parts).map(|it| it.name).collect();
    check_names(&gpt2, prefixed, Ok(names.len()));
    let without = |name: &str| headed(name).filter(|name| name != "lm_head.weight");
    check_names(&tied(true), without, Err("config.json and the weights are of different models"));
}

/// Phi-3 stores the projections of one input below each other.
#[test]
fn phi3_folders_hold_fused_projections() {
    let micro = LlamaConfig::preset("llama-micro").unwrap();
    let text = json!({
        "model_type": "phi3", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 128, "pad_token_id": 255
    });
    let (config, _) = ModelConfig::from_json(&text.to_string(), "c").unwrap();
    assert_eq!(config.parameter_count(), micro.parameter_count());
    check_names(&config, |name| Some(name.to_string()), Ok(0));
    let parts: Vec<_> = config
        .stored_slices()
        .into_iter()
        .filter(|(spec, _)| spec.name.starts_with("model.layers.1."))
        .flat_map(|(spec, parts)| parts.into_iter().map(move |part| (spec.name.clone(), part)))
        .map(|(own, part)| (own, part.name, part.shape, part.start))
        .filter(|(own, stored, ..)| own != stored)
        .collect();
    let row = |own: &str, stored: &str, shape: [usize; 2], start| {
        let named = |name: &str| format!("model.layers.1.{name}.weight");
        (named(own), named(stored), shape.to_vec(), start)
    };
    assert_eq!(
        parts,
        [
            row("self_attn.q_proj", "self_attn.qkv_proj", [128, 64], 0),
            row("self_attn.k_proj", "self_attn.qkv_proj", [128, 64], 64),
            row("self_attn.v_proj", "self_attn.qkv_proj", [128, 64], 96),
            row("mlp.gate_proj", "mlp.gate_up_proj", [320, 64], 0),
            row("mlp.up_proj", "mlp.gate_up_proj", [320, 64], 160),
        ]
    );
}
