//! Model folders: headers compared with the configuration, weights never read.

use std::fs;
use std::path::Path;

use deepwell_ir::capture::{LlamaConfig, ModelFolder, StoredDType};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

/// One header entry: name, element type, shape.
type Entry = (String, &'static str, Vec<usize>);

/// A safetensors file whose data are zeros.
fn write_safetensors(path: &Path, entries: &[Entry]) {
    let mut header = Map::new();
    let mut end = 0usize;
    for (name, dtype, shape) in entries {
        let width = match *dtype {
            "F32" => 4,
            "BF16" | "F16" => 2,
            "I8" | "F8_E4M3" => 1,
            other => panic!("no width for {other}"),
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

fn micro(tied: bool) -> LlamaConfig {
    LlamaConfig { tie_word_embeddings: tied, ..LlamaConfig::preset("llama-micro").unwrap() }
}

fn entries(config: &LlamaConfig) -> Vec<Entry> {
    config.parameters().into_iter().map(|spec| (spec.name, "BF16", spec.shape)).collect()
}

fn write_config(folder: &Path, config: &LlamaConfig) {
    fs::write(folder.join("config.json"), config.to_json().to_string()).unwrap();
}

#[test]
fn a_folder_that_fits_opens_in_the_order_of_the_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let config = micro(false);
    write_config(folder.path(), &config);
    let mut stored = entries(&config);
    stored.reverse();
    stored.push(("model.layers.0.self_attn.rotary_emb.inv_freq".to_string(), "F32", vec![16]));
    write_safetensors(&folder.path().join("model.safetensors"), &stored);
    let model = ModelFolder::open(folder.path()).unwrap();
    assert_eq!(model.config, config.clone().into());
    let weights = model.weights.unwrap();
    let names: Vec<&str> = weights.tensors.iter().map(|t| t.name.as_str()).collect();
    let specs = config.parameters();
    assert_eq!(names, specs.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>());
    assert!(weights.tensors.iter().all(|t| t.dtype == Dtype::BF16));
    let head = weights.tensors.last().unwrap();
    assert_eq!(head.size_bytes, 2 * 256 * 64);
    assert_eq!(
        model.notes.remarks,
        ["`model.layers.0.self_attn.rotary_emb.inv_freq` is a stored buffer, not a weight: it is \
          computed from the config"]
    );
    // Header entries stand in the order of names, and the head is the first of them here.
    let header = fs::read(folder.path().join("model.safetensors")).unwrap();
    let header_bytes = u64::from_le_bytes(header[..8].try_into().unwrap());
    let first = weights.tensors.iter().map(|t| t.offset_bytes).min().unwrap();
    assert_eq!(first, 8 + header_bytes);
}

#[test]
fn a_stored_copy_of_a_tied_head_and_another_dtype_are_remarked() {
    let folder = tempfile::tempdir().unwrap();
    let config = LlamaConfig { torch_dtype: Some(StoredDType::F32), ..micro(true) };
    write_config(folder.path(), &config);
    let mut stored = entries(&config);
    stored.push(("lm_head.weight".to_string(), "BF16", vec![256, 64]));
    write_safetensors(&folder.path().join("model.safetensors"), &stored);
    let model = ModelFolder::open(folder.path()).unwrap();
    assert_eq!(model.weights.unwrap().tensors.len(), config.parameters().len());
    assert_eq!(
        model.notes.remarks,
        [
            "`lm_head.weight` is stored but tied: the token table is used for it",
            "weights are stored as BF16, config.json says F32: taken as stored",
        ]
    );
}

/// A run takes fresh weights for a folder without any, and for a configuration that is named.
#[test]
fn weights_are_absent_or_not_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let config = micro(false);
    write_config(folder.path(), &config);
    let file = folder.path().join("config.json");
    let check = |path: &Path| {
        let model = ModelFolder::open(path).unwrap();
        assert_eq!((&model.config_file, model.config), (&file, config.clone().into()));
        assert_eq!(model.json["hidden_size"], 64);
        assert!(model.weights.is_none(), "{}", path.display());
    };
    check(folder.path());
    check(&file);
    write_safetensors(&folder.path().join("model.safetensors"), &entries(&config));
    check(&file);
    assert!(ModelFolder::open(folder.path()).unwrap().weights.is_some());
}

/// Writes two shards and their index; gives the index for tests that damage it.
fn write_shards(folder: &Path, config: &LlamaConfig) -> Value {
    let all = entries(config);
    let (first, second) = all.split_at(5);
    let mut map = Map::new();
    for (file, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        write_safetensors(&folder.join(file), part);
        for (name, _, _) in part {
            map.insert(name.clone(), json!(file));
        }
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    write_config(folder, config);
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    index
}

#[test]
fn shards_are_read_through_their_index() {
    let folder = tempfile::tempdir().unwrap();
    let config = micro(false);
    write_shards(folder.path(), &config);
    let model = ModelFolder::open(folder.path()).unwrap();
    let tensors = model.weights.unwrap().tensors;
    let files: Vec<_> = tensors.iter().map(|t| t.file.file_name().unwrap()).collect();
    assert_eq!(files[0], "a.safetensors");
    assert_eq!(files[5], "b.safetensors");
}

/// Each row: a change of the entries that fit, and the whole error (`DIR` for the folder).
#[test]
fn tensors_that_do_not_fit_are_named() {
    type Change = fn(&mut Vec<Entry>);
    let rows: [(Change, &str); 7] = [
        (
            |all| all.retain(|entry| entry.0 != "model.layers.1.mlp.up_proj.weight"),
            "tensor `model.layers.1.mlp.up_proj.weight`: expected shape [160, 64], found in no \
             file of `DIR`\nhint: config.json and the weights are of different models, or a file \
             is incomplete",
        ),
        (
            |all| all[1].2 = vec![65],
            "tensor `model.layers.0.input_layernorm.weight` in `DIR/model.safetensors`: expected \
             shape [64], got shape [65]\nhint: config.json and the weights are of different models",
        ),
        (
            |all| all[2].1 = "F8_E4M3",
            "tensor `model.layers.0.self_attn.q_proj.weight` in `DIR/model.safetensors`: expected \
             F32, BF16 or F16, got F8_E4M3\nhint: save the model unquantized, in one of \
             these types",
        ),
        (
            |all| all.push(("model.layers.2.input_layernorm.weight".to_string(), "F32", vec![64])),
            "tensor `model.layers.2.input_layernorm.weight` in `DIR/model.safetensors`: not part \
             of the model that config.json describes\n\
             hint: config.json and the weights are of different models",
        ),
        (
            |all| all.push(("model.layers.0.mlp.up_proj.bias".to_string(), "F32", vec![160])),
            "tensor `model.layers.0.mlp.up_proj.bias` in `DIR/model.safetensors`: not part of the \
             model that config.json describes\n\
             hint: set `attention_bias` or `mlp_bias` in config.json if the model has biases",
        ),
        (
            |all| all.iter_mut().for_each(|e| e.0 = format!("_orig_mod.{}", e.0)),
            "tensor `model.embed_tokens.weight`: expected shape [256, 64], found in no file of \
             `DIR`\nhint: the files hold `_orig_mod.model.embed_tokens.weight`: take what stands \
             before its name off all names",
        ),
        (
            |all| all.retain(|entry| entry.0 != "lm_head.weight"),
            "tensor `lm_head.weight`: expected shape [256, 64], found in no file of `DIR`\n\
             hint: the files hold no output head: if it is the token table, set \
             `tie_word_embeddings` to true in config.json, else save the model with its head",
        ),
    ];
    for (change, expected) in rows {
        let folder = tempfile::tempdir().unwrap();
        let config = micro(false);
        write_config(folder.path(), &config);
        let mut stored = entries(&config);
        change(&mut stored);
        write_safetensors(&folder.path().join("model.safetensors"), &stored);
        let error = ModelFolder::open(folder.path()).unwrap_err().to_string();
        assert_eq!(error.replace(&folder.path().display().to_string(), "DIR"), expected);
    }
}

/// Each row: damage to a folder of shards, and the whole error.
#[test]
fn damaged_files_are_named() {
    type Damage = fn(&Path, Value);
    let index_name = "model.safetensors.index.json";
    let rows: [(Damage, &str); 8] = [
        (
            |folder, _| fs::remove_file(folder.join("b.safetensors")).unwrap(),
            "`DIR/b.safetensors`: expected a shard listed in `model.safetensors.index.json`\n\
             hint: download the missing shard",
        ),
        (
            |folder, _| {
                let path = folder.join("a.safetensors");
                let bytes = fs::read(&path).unwrap();
                fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            },
            "`DIR/a.safetensors`: expected 49784 bytes from its header, got 49783\n\
             hint: download or save the file again",
        ),
        (
            |folder, _| fs::write(folder.join("a.safetensors"), b"").unwrap(),
            "`DIR/a.safetensors`: expected a safetensors file, got 0 bytes\n\
             hint: download or save the file again",
        ),
        (
            |folder, _| fs::write(folder.join("a.safetensors"), [0xff; 16]).unwrap(),
            "`DIR/a.safetensors`: expected a safetensors header, got a length of \
             18446744073709551615 bytes in a file of 16\nhint: download or save the file again",
        ),
        (
            |folder, mut index| {
                index["weight_map"]["lm_head.weight"] = json!("../a.safetensors");
                fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
            },
            "`DIR/model.safetensors.index.json`: tensor `lm_head.weight`: expected a file name, \
             got \"../a.safetensors\"\nhint: download the file again",
        ),
        (
            |folder, mut index| {
                index["weight_map"]["lm_head.bias"] = json!("a.safetensors");
                fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
            },
            "`DIR/a.safetensors`: tensor `lm_head.bias` is not in it, though \
             `model.safetensors.index.json` says so, nor in another listed file\n\
             hint: index and shards are from different versions of the model",
        ),
        (
            |folder, _| {
                fs::write(folder.join("model.safetensors.index.json"), "[1]").unwrap();
            },
            "`DIR/model.safetensors.index.json`: expected an object `weight_map` of tensor to \
             file\nhint: download the file again",
        ),
        (
            |folder, _| {
                fs::write(folder.join("model.safetensors.index.json"), "{").unwrap();
            },
            "`DIR/model.safetensors.index.json`: not JSON: EOF while parsing an object at line 1 \
             column 1\nhint: download the file again",
        ),
    ];
    for (damage, expected) in rows {
        let folder = tempfile::tempdir().unwrap();
        let index = write_shards(folder.path(), &micro(false));
        assert!(folder.path().join(index_name).is_file());
        damage(folder.path(), index);
        let error = ModelFolder::open(folder.path()).unwrap_err().to_string();
        assert_eq!(error.replace(&folder.path().display().to_string(), "DIR"), expected);
    }
}
