//! `deepwell tokenizer`.

use super::*;

#[test]
fn a_tokenizer_from_text_to_training() {
    let folder = Folder::new();
    let training = folder.training("unused", "2");
    let data = folder.path("data.txt");
    let train = |out: &str, more: &[&str]| {
        let args = ["tokenizer", "train", "--data", &data, "--vocab-size", "400", "--out", out];
        json_of(&[&args, more, &["--json"]].concat())
    };
    let [first, second] = [folder.path("first/tokenizer.json"), folder.path("second.json")];
    let summary = train(&first, &[]);
    assert_eq!((&summary["vocab_size"], &summary["merges"]), (&json!(400), &json!(143)));
    assert!(summary["bytes_per_token"].as_f64() > Some(1.5), "{summary}");
    assert_eq!(train(&second, &[])["hash"], summary["hash"]);
    let bytes = fs::read(&first).expect("a tokenizer");
    assert!(bytes == fs::read(&second).expect("a tokenizer"), "the same text, the same bytes");

    let again = ["tokenizer", "train", "--data", &data, "--out", &second];
    check_error(&again, 2, &["exists already", "hint: `--force`"]);
    assert!(bytes == fs::read(&second).expect("a tokenizer"), "nothing was written");
    assert_ne!(train(&second, &["--force", "--min-frequency", "50"])["hash"], summary["hash"]);

    // The model must have room for it; then the run has tokens of its own in the cache.
    let run = |tokenizer: &[&str], vocab_size: u32| {
        let config = folder.config("config.json", json!({ "vocab_size": vocab_size }));
        let mut args = training.clone();
        let model = args.iter().position(|arg| arg == "unused").expect("the model");
        args[model] = config;
        args.extend(tokenizer.iter().map(|arg| arg.to_string()));
        args
    };
    let too_small = run(&["--tokenizer", &first], 256);
    let too_small: Vec<&str> = too_small.iter().map(String::as_str).collect();
    check_error(&too_small, 2, &["outside the model's vocabulary of 256", "hint: the model needs"]);
    let cache = folder.path("own-cache");
    let options =
        ["--tokenizer", &first, "--cache-dir", &cache, "--eval-tokens", "256", "--overwrite"];
    let summary = json_of(&run(&options, 400));
    assert_eq!(summary["fit"]["step"], 2);
    assert_eq!(summary["settings"]["eval_tokens"], 256);
    let files = || fs::read_dir(&cache).expect("the cache").count();
    assert_eq!(files(), 2);
    json_of(&run(&options, 400));
    assert_eq!(files(), 2, "found again");
    fs::copy(&second, &first).expect("another tokenizer under the same name");
    json_of(&run(&options, 400));
    assert_eq!(files(), 4, "another tokenizer, other tokens");
}

#[test]
fn tokenizers_that_cannot_be_made() {
    let folder = Folder::new();
    let (text, empty) = (folder.file("a.txt", "deep well"), folder.file("empty", ""));
    let out = folder.path("tokenizer.json");
    let check = |options: &[&str], contains: &[&str]| {
        let args = [&["tokenizer", "train", "--out", &out], options].concat();
        check_error(&args, 2, contains);
        assert!(!Path::new(&out).exists(), "{options:?}");
    };
    check(&["--data", &empty], &["no text in", "1 empty", "hint: "]);
    check(&["--data", &folder.path("*.html")], &["no file or folder", "*.html"]);
    check(&["--data", &text, "--vocab-size", "256"], &["expected 257 (256 bytes and", "got 256"]);
    check(&["--data", &text, "--min-frequency", "0"], &["--min-frequency", "0"]);
    check(&["--data", &text, "--max-bytes", "much"], &["`2GiB`", "`much`"]);
    check_error(
        &["tokenizer", "train", "--data", &text, "--out", &folder.path(".")],
        2,
        &["is a folder"],
    );
}
