//! `deepwell generate`: the same text for the same seed, and what it refuses.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::json;

use super::{Folder, check_error, deepwell, json_of, stdout_of, text};

/// A tokenizer of six words.
const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 5, "content": "</s>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
    "decoder": null, "model": {"type": "WordLevel", "unk_token": "[UNK]",
        "vocab": {"[UNK]": 0, "let": 1, "well": 2, "deep": 3, "water": 4}}}"#;

/// Trains a few steps and gives the output folder.
fn trained(folder: &Folder, model: &str) -> String {
    stdout_of(&folder.training(model, "4"));
    folder.path("out")
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let folder = Folder::new();
    let run = trained(&folder, "llama-micro");
    let generate = |options: &[&str]| {
        let args = [&["generate", &run, "--prompt", "12 34", "--max-tokens", "40"], options];
        let output = deepwell(&args.concat());
        assert_eq!(output.status.code(), Some(0), "{options:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(" tokens/s"), "{}", text(&output.stderr));
        output.stdout
    };
    let first = generate(&["--seed", "3"]);
    // Byte-level tokens, one byte each; no model of four steps knows where a text ends.
    assert_eq!(first.len(), 40);
    assert_eq!(first, generate(&["--seed", "3"]));
    assert_ne!(first, generate(&["--seed", "4"]));
    assert_eq!(generate(&["--greedy"]), generate(&["--temperature", "0", "--seed", "9"]));
    assert_eq!(generate(&["--greedy"]), generate(&["--top-k", "1"]));
    assert_eq!(generate(&["--greedy"]), generate(&["--top-p", "0.000001", "--seed", "5"]));
    let echoed = generate(&["--seed", "3", "--echo"]);
    assert_eq!(echoed, [b"12 34", first.as_slice()].concat());
    let prompt = folder.file("prompt.txt", "12 34");
    let args = ["generate", &run, "--prompt-file", &prompt, "--max-tokens", "40", "--seed", "3"];
    assert_eq!(deepwell(&args).stdout, first);

    let report = json_of(&[&args[..], &["--json"]].concat());
    assert_eq!(report["text"], String::from_utf8_lossy(&first).into_owned());
    let tokens: Vec<u8> = serde_json::from_value(report["tokens"].clone()).unwrap();
    assert_eq!(tokens, first);
    assert_eq!((&report["step"], &report["window"]), (&json!(4), &json!(32)));
    assert_eq!((&report["stop"], &report["precision"]), (&json!("tokens_max"), &json!("mxfp8")));
    assert_eq!(report["prompt_tokens"], json!([49, 50, 32, 51, 52]));
    // Without a prompt a document begins.
    let report = json_of(&["generate", &run, "--max-tokens", "3", "--ignore-end", "--json"]);
    assert_eq!((&report["prompt_tokens"], &report["prompt"]), (&json!([0]), &json!("")));
    assert_eq!(report["tokens"].as_array().unwrap().len(), 3);
}

/// A model folder as Hugging Face has them, with a tokenizer of its own.
#[test]
fn a_hugging_face_folder() {
    let folder = Folder::new();
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/oracle");
    fs::copy(oracle.join("case_00.config.json"), folder.path("config.json")).unwrap();
    let bytes = fs::read(oracle.join("case_00.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let weights = stored
        .iter()
        .filter_map(|(name, view)| Some((name.strip_prefix("weight.")?.to_string(), view)));
    let to = folder.path("model.safetensors");
    safetensors::serialize_to_file(weights, None, Path::new(&to)).unwrap();
    let here = folder.path(".");
    check_error(&["generate", &here], 2, &["tokenizer: expected a tokenizer.json", "hint: "]);
    folder.file("tokenizer.json", WORDS);
    let args = ["generate", &here, "--prompt", "deep water", "--max-tokens", "5", "--json"];
    let report = json_of(&args);
    assert_eq!((&report["precision"], &report["step"]), (&json!("bf16"), &json!(null)));
    assert_eq!(report["prompt_tokens"], json!([3, 4]));
    assert_eq!(json_of(&args)["tokens"], report["tokens"]);
}

#[test]
fn what_generate_refuses() {
    let folder = Folder::new();
    let run = trained(&folder, "llama-micro");
    let none = folder.path("none");
    check_error(&["generate", &none], 2, &["no checkpoint at `", "hint: `deepwell train`"]);
    check_error(&["generate", &folder.path(".")], 2, &["found neither", "hint: "]);
    let check = |options: &[&str], contains: &[&str]| {
        check_error(&[&["generate", &run], options].concat(), 2, contains);
    };
    let long = "x".repeat(33);
    check(&["--prompt", &long], &["at most 32 tokens, the window, got 33", "`--window 64`"]);
    check(&["--temperature", "-1"], &["temperature: expected 0 or more, got -1"]);
    check(&["--top-k", "0"], &["top-k: expected at least 1", "hint: "]);
    check(&["--top-p", "0"], &["top-p: expected above 0", "hint: "]);
    check(&["--window", "0"], &["window: expected at least 1 token, got 0"]);
    check(&["--greedy", "--top-k", "3"], &["cannot be used with"]);
    check(&["--prompt-file", &none], &["cannot read the prompt", "none"]);
    check(&["--tokenizer", &none], &["no tokenizer", "hint: "]);
    check(&["--model", &none], &["model: expected a preset", "hint: "]);
    check(&["--model", "parity-3m"], &["tensor", "expected"]);
    check(&["--device", "cuda"], &["expected a GPU for", "`--device cpu` needs none"]);
    let large = folder.file("large.json", WORDS.replace("\"water\": 4", "\"water\": 400"));
    let prompt = ["--tokenizer", &large, "--prompt", "deep water"];
    check(&prompt, &["prompt: expected tokens below 256", "got token 400, `water`", "hint: "]);
}

/// A run's tokenizer that is no longer there is named, with what to do.
#[test]
fn a_tokenizer_that_has_moved() {
    let folder = Folder::new();
    let mut args = folder.training("llama-micro", "2");
    let tokenizer = folder.file("tokenizer.json", WORDS);
    args.extend(["--tokenizer".to_string(), tokenizer.clone()]);
    stdout_of(&args);
    let run = folder.path("out");
    let report = json_of(&["generate", &run, "--prompt", "deep", "--max-tokens", "4", "--json"]);
    assert_eq!(report["prompt_tokens"], json!([3]));
    let moved = folder.path("moved.json");
    fs::rename(&tokenizer, &moved).unwrap();
    let expected = ["tokenizer.json`, which the run used, got no such file", "`--tokenizer`"];
    check_error(&["generate", &run], 2, &expected);
    let args = ["generate", &run, "--tokenizer", &moved, "--prompt", "deep", "--max-tokens", "4"];
    let again = json_of(&[&args[..], &["--json"]].concat());
    assert_eq!(again["tokens"], report["tokens"]);
}
