//! `deepwell export hf`: what is written is what was trained, and what it refuses.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Folder, check_error, deepwell, json_of, stdout_of, text};

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn an_exported_model_goes_on_as_the_checkpoint_does() {
    let folder = Folder::new();
    stdout_of(&folder.training("gpt2-micro", "4"));
    let (run, to) = (folder.path("out"), folder.path("exported"));
    let report = json_of(&["export", "hf", &run, "--to", &to, "--shard-size", "200kB", "--json"]);
    assert_eq!((&report["step"], &report["dtype"]), (&json!(4), &json!("F32")));
    let to_path = Path::new(&to);
    let config = read_json(&to_path.join("config.json"));
    let expected = (&json!("float32"), &json!(0), &json!(["GPT2LMHeadModel"]));
    assert_eq!((&config["dtype"], &config["eos_token_id"], &config["architectures"]), expected);
    let index = read_json(&to_path.join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], report["tensor_bytes"]);
    let first = &index["weight_map"]["transformer.wte.weight"];
    let count = report["files"].as_array().unwrap().iter();
    let count = count.filter(|file| file.as_str().unwrap().starts_with("model-")).count();
    assert!(count > 1);
    assert_eq!(*first, json!(format!("model-00001-of-{count:05}.safetensors")));

    let generate = |path: &str| {
        let prompt = ["--prompt", "let x", "--max-tokens", "12", "--greedy"];
        let precision = ["--precision", "f32", "--window", "32", "--json"];
        json_of(&[&["generate", path][..], &prompt, &precision].concat())["tokens"].clone()
    };
    assert_eq!(generate(&run), generate(&to));
    // The run's folder says which model it trained.
    let summary = json_of(&["capture", &folder.path("out/model"), "--summary", "--json"]);
    assert_eq!((&summary["family"], &summary["layers"]), (&json!("gpt2"), &json!(2)));

    check_error(&["export", "hf", &run, "--to", &to], 2, &["expected no such file or folder"]);
    let half = folder.path("half");
    let table = stdout_of(&["export", "hf", &run, "--to", &half, "--dtype", "bf16"]);
    assert!(
        table.contains("tensors in BF16") && table.contains("  model.safetensors\n"),
        "{table}"
    );
    let config = read_json(&Path::new(&half).join("config.json"));
    assert_eq!(config["dtype"], json!("bfloat16"));
}

#[test]
fn what_export_refuses() {
    let folder = Folder::new();
    let (none, to) = (folder.path("none"), folder.path("to"));
    check_error(&["export", "hf", &none, "--to", &to], 2, &["no checkpoint at `", "hint: "]);
    stdout_of(&folder.training("llama-micro", "2"));
    let run = folder.path("out");
    let other = ["export", "hf", &run, "--to", &to, "--model"];
    check_error(&[&other[..], &["gpt2-micro"]].concat(), 2, &["`wte.weight`"]);
    check_error(&[&other[..], &["nothing"]].concat(), 2, &["a preset (", "no such file"]);
    assert!(!Path::new(&to).exists());
    // Nothing half-written is left beside it either.
    let left = fs::read_dir(folder.path(".")).unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.contains(".tmp-").then_some(name)
    });
    assert_eq!(left.collect::<Vec<_>>(), Vec::<String>::new());
    let output = deepwell(&["export", "hf", &run, "--to", &to, "--shard-size", "none"]);
    assert!(text(&output.stderr).contains("expected bytes such as"), "{}", text(&output.stderr));
}
