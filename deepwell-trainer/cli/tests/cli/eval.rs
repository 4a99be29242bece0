//! `deepwell eval`, and the data of runs: how much is read, and what there is to predict.

use std::fs;

use serde_json::json;

use super::{Folder, check_error, deepwell, json_of, text};

/// Two documents to evaluate on, in a folder.
fn documents(folder: &Folder) -> String {
    let root = folder.path("held");
    fs::create_dir(&root).unwrap();
    for (name, count) in [("a.txt", 40), ("b.txt", 31)] {
        let words = (0..count).map(|index| format!("water {index} in a deep well, "));
        fs::write(format!("{root}/{name}"), words.collect::<String>()).unwrap();
    }
    root
}

#[test]
fn a_model_is_evaluated_as_a_run_evaluates_it() {
    let folder = Folder::new();
    let held = documents(&folder);
    let cache = folder.path("cache");
    let mut args = folder.training("llama-micro", "2");
    // The default of evaluations, which is more than there is.
    fs::write(folder.path("run.toml"), format!("cache_dir = {cache:?}\n")).unwrap();
    args.extend(["--eval-data", &held, "--precision", "f32"].map(String::from));
    let output = deepwell(&args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let metrics = fs::read_to_string(folder.path("out/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(serde_json::from_str::<serde_json::Value>);
    let evaluations: Vec<serde_json::Value> =
        lines.map(Result::unwrap).filter(|line| line["val_loss"].is_number()).collect();
    let summary: serde_json::Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let tokens = summary["data"]["tokens_heldout"].as_u64().unwrap();
    assert!(stderr.contains("each evaluation predicts all of the"), "{stderr}");
    assert!(stderr.contains("256 tokens in 2 steps, "), "{stderr}");

    let options = ["--data", &held, "--seq-len", "32", "--cache-dir", &cache, "--json"];
    let run = folder.path("out");
    for (model, precision, evaluation) in [
        ("llama-micro", &["--precision", "f32"][..], &evaluations[0]),
        (&run, &[], &evaluations[evaluations.len() - 1]),
    ] {
        let report = json_of(&[&["eval", model], &options[..], precision].concat());
        assert_eq!(report["tokens"], json!(tokens));
        assert_eq!(report["tokens_predicted"], json!(tokens - 1));
        assert_eq!(evaluation["val_tokens"], json!(tokens - 1));
        let [own, of_run] =
            [&report["loss"], &evaluation["val_loss"]].map(|it| it.as_f64().unwrap());
        // Means of the same losses, in f32 within a batch.
        assert!((own / of_run - 1.0).abs() < 1e-5, "{own} {of_run}");
        let bits = report["bits_per_byte"].as_f64().unwrap() * report["bytes"].as_f64().unwrap();
        let nats = own * (tokens - 1) as f64;
        assert!((bits * std::f64::consts::LN_2 / nats - 1.0).abs() < 1e-12, "{bits} {nats}");
    }
    // Each token is predicted once, whatever the stride, and from more of the text.
    let strided = [&["eval", run.as_str()], &options[..], &["--stride", "7"]].concat();
    assert_eq!(json_of(&strided)["tokens_predicted"], json!(tokens - 1));
    let wrong = ["eval", &run, "--data", &held, "--cache-dir", &cache, "--stride", "33"];
    check_error(&wrong, 2, &["stride: expected 1 to 32, the tokens of a window, got 33"]);
}

/// A file of 40 kB was refused with default settings.
#[test]
fn issue_31_a_small_text_trains_with_defaults_and_a_wish_stays_one() {
    let folder = Folder::new();
    let data = folder.file("small.txt", "water in a deep well. ".repeat(60));
    let (out, cache) = (folder.path("out"), folder.path("cache"));
    let args = [
        "train",
        "--model",
        "llama-micro",
        "--data",
        &data,
        "--steps",
        "1",
        "--seq-len",
        "32",
        "--cache-dir",
        &cache,
        "--out",
        &out,
        "--overwrite",
    ];
    let output = deepwell(&args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    check_error(&[&args[..], &["--eval-tokens", "5000"]].concat(), 2, &["smaller `eval_tokens`"]);
}

/// An evaluation of nothing had a loss of 0.
#[test]
fn issue_31_an_evaluation_of_nothing_is_refused_before_the_run() {
    let folder = Folder::new();
    // Token 0 ends a document: what follows is nobody's target.
    let mut held = vec![0u8; 1024 + 2 * 65];
    for (place, value) in [20_240_520i32, 1, 65].into_iter().enumerate() {
        held[4 * place..4 * place + 4].copy_from_slice(&value.to_le_bytes());
    }
    let mut train = held.clone();
    train[1024..].iter_mut().step_by(2).for_each(|byte| *byte = 7);
    let (held, train) = (folder.file("x_val.bin", held), folder.file("x_train.bin", train));
    let (out, cache) = (folder.path("out"), folder.path("cache"));
    let tokenizer = folder.file(
        "tokenizer.json",
        r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "unk_token": "a",
        "vocab": {"</s>": 0, "a": 1}}}"#,
    );
    let args = [
        "train",
        "--model",
        "llama-micro",
        "--data",
        &train,
        &held,
        "--tokenizer",
        &tokenizer,
        "--documents",
        "masked",
        "--steps",
        "1",
        "--seq-len",
        "32",
        "--cache-dir",
        &cache,
        "--out",
        &out,
    ];
    check_error(&args, 2, &["65 tokens, and nothing to predict", "--eval-data"]);
    assert!(!fs::exists(&out).unwrap(), "nothing was begun");
}
