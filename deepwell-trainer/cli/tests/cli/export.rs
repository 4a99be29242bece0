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

/// Quantized folders of a run: the activations of its last steps give input scales, and the
/// folder that is read back has the loss of the run within 0.1 %, the bar of exported folders.
#[test]
fn quantized_folders_have_the_loss_of_the_run() {
    let folder = Folder::new();
    let mut args = folder.training("llama-micro", "4");
    args.extend(["--precision", "nvfp4"].map(str::to_string));
    stdout_of(&args);
    let (run, data) = (folder.path("out"), folder.path("data.txt"));
    let cache = folder.path("cache");
    let loss = |model: &str, precision: &str| {
        let options = ["--data", &data, "--seq-len", "32", "--cache-dir", &cache, "--json"];
        let args = ["eval", model, "--precision", precision];
        json_of(&[&args[..], &options].concat())["loss"].as_f64().unwrap()
    };
    for (quantize, format, activations) in [
        ("nvfp4", "modelopt", "static"),
        ("nvfp4", "compressed-tensors", "static"),
        ("mxfp8", "compressed-tensors", "dynamic"),
    ] {
        let small = folder.path(&format!("{quantize}-{format}"));
        let back = folder.path(&format!("{quantize}-{format}-back"));
        let export = ["export", "hf", &run, "--to", &small, "--quantize", quantize];
        let report = json_of(&[&export[..], &["--format", format, "--json"]].concat());
        let expected = (&json!(4), &json!(format), &json!(activations));
        assert_eq!((&report["step"], &report["convention"], &report["activations"]), expected);
        let remarks = report["remarks"].as_array().unwrap();
        // The policy keeps the first tensor, a query projection, in BF16.
        assert!(remarks[0].as_str().unwrap().contains("2 weights that engines merge"), "{report}");
        let config = read_json(&Path::new(&small).join("config.json"));
        let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
        for module in ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.k_proj"] {
            assert!(ignored.contains(&json!(module)), "{module} in {ignored:?}");
        }
        stdout_of(&["quantize", &small, &back, "--dequantize"]);
        let (got, expected) = (loss(&back, "bf16"), loss(&run, quantize));
        assert!((got / expected - 1.0).abs() < 1e-3, "{quantize} {format}: {got} {expected}");
    }
    let small = folder.path("nvfp4-modelopt");
    let export = ["export", "hf", &run, "--to", &small, "--quantize", "nvfp4"];
    check_error(&export, 2, &["expected no such file or folder"]);
    // A folder knows no activations.
    let again = folder.path("again");
    let from = folder.path("mxfp8-compressed-tensors-back");
    let export = ["export", "hf", &from, "--to", &again, "--quantize", "nvfp4"];
    let report = json_of(&[&export[..], &["--json"]].concat());
    assert_eq!(report["activations"], json!("none"));
    check_error(&[&export[..], &["--model", "llama-micro"]].concat(), 2, &["a checkpoint", "hint"]);
    check_error(&["export", "hf", &from, "--to", &again], 2, &["expected a checkpoint"]);
    check_error(
        &["export", "hf", &small, "--to", &folder.path("twice"), "--quantize", "mxfp8"],
        2,
        &["already", "`--dequantize`"],
    );
}

#[test]
fn a_policy_selects_the_weights_of_an_export() {
    let folder = Folder::new();
    stdout_of(&folder.training("llama-micro", "2"));
    let (run, to) = (folder.path("out"), folder.path("to"));
    let rules = "[[rule]]\ntensors = \"*.mlp.*\"\nformat = \"bf16\"\n";
    let policy = folder.file("policy.toml", format!("keep_first_last_bf16 = false\n{rules}"));
    let export = ["export", "hf", &run, "--to", &to, "--quantize", "nvfp4", "--json"];
    let report = json_of(&[&export[..], &["--policy", &policy]].concat());
    let quantized: Vec<&str> = report["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|tensor| !tensor["quality"].is_null())
        .map(|tensor| tensor["name"].as_str().unwrap())
        .collect();
    assert_eq!(quantized.len(), 8, "{quantized:?}");
    assert!(quantized.iter().all(|name| name.contains("self_attn")), "{quantized:?}");
    check_error(&["export", "hf", &run, "--to", &to, "--policy", &policy], 2, &["--quantize"]);
}

#[test]
fn families_without_quantized_folders_are_refused() {
    let folder = Folder::new();
    let (out, to) = (folder.path("out"), folder.path("to"));
    stdout_of(&folder.training("gpt2-micro", "1"));
    let export = ["export", "hf", &out, "--to", &to, "--quantize", "mxfp8"];
    check_error(&export, 2, &["cannot be exported quantized", "Conv1D"]);
    assert!(!Path::new(&to).exists());
}
