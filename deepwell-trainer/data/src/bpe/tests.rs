//! Tokenizers from good and bad inputs.

use std::path::Path;

use super::*;
use crate::{DataOptions, Dataset, Split};

fn write(folder: &Path, files: &[(&str, &[u8])]) {
    for (name, content) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

fn options(folder: &Path, inputs: &[&str], vocab_size: u32) -> BpeOptions {
    BpeOptions {
        inputs: inputs.iter().map(|input| folder.join(input)).collect(),
        vocab_size,
        out: folder.join("out/tokenizer.json"),
        ..BpeOptions::default()
    }
}

/// Text of words that come with very different counts, and of many that come equally often.
fn prose(words: usize, seed: u64) -> String {
    let mut state = seed;
    let mut text = String::new();
    for index in 0..words {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (state >> 33) % 4096;
        // Squares: small numbers come more often.
        let word = number * number / 4096;
        text.push_str(&format!("{}{}", ["wa", "te", "dé", "ll"][word as usize % 4], word / 7));
        text.push(if index % 11 == 10 { '\n' } else { ' ' });
    }
    text
}

fn corpus(folder: &Path) {
    for index in 0..30 {
        let name = format!("text/{index}.txt");
        write(folder, &[(&name, prose(400, index).as_bytes())]);
    }
}

#[test]
fn the_same_text_gives_the_same_file_on_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    corpus(folder.path());
    let mut files = Vec::new();
    // Every map of the crate has a seed of its own, so each round has another order of everything
    // that is unordered.
    for round in 0..6 {
        let mut options = options(folder.path(), &["text"], 1500);
        options.force = true;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + round % 3).build().unwrap();
        let summary = pool.install(|| train(&options, &mut |_| {})).unwrap();
        let bytes = std::fs::read(&options.out).unwrap();
        assert_eq!(summary.hash, blake3::hash(&bytes).to_hex().as_str());
        files.push(bytes);
    }
    assert!(files.iter().all(|file| *file == files[0]));
    // Pins the bytes: a tokenizer that silently becomes another one spoils every cache and model.
    assert_eq!(&blake3::hash(&files[0]).to_hex()[..16], PINNED);
}
const PINNED: &str = "cb3075bfb3cc2dd1";

#[test]
fn the_summary_says_what_was_made() {
    let folder = tempfile::tempdir().unwrap();
    corpus(folder.path());
    write(folder.path(), &[("text/image", b"a\0b"), ("text/latin1.txt", b"caf\xe9")]);
    let options = options(folder.path(), &["text"], 700);
    let mut stages = Vec::new();
    let summary = train(&options, &mut |progress| {
        assert!(progress.bytes_done <= progress.bytes_total);
        if stages.last() != Some(&progress.stage) {
            stages.push(progress.stage);
        }
    })
    .unwrap();
    assert_eq!(stages, [Stage::Scan, Stage::Count, Stage::Merge, Stage::Tokenize]);
    assert_eq!((summary.vocab_size, summary.merges), (700, 443));
    assert_eq!((summary.files, summary.files_train + summary.files_heldout), (30, 30));
    assert_eq!(
        summary.skipped.to_string(),
        "1 binary (`text/image`), 1 not UTF-8 (`text/latin1.txt`)"
    );
    let all: usize = (0..30).map(|index| prose(400, index).len()).sum();
    assert_eq!(summary.bytes_train + summary.bytes_heldout, all as u64);
    assert!((2..=3).contains(&summary.files_heldout), "5 % of 30 files: {summary}");

    let tokenizer = Tokenizer::from_file(&options.out).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.separator()), (700, Some(0)));
    let ratio = summary.bytes_per_token.unwrap();
    assert!((ratio - summary.bytes_heldout as f64 / summary.tokens_heldout as f64).abs() < 1e-12);
    assert!((2.0..5.0).contains(&ratio), "{summary}");
    let only = std::fs::read_dir(folder.path().join("out")).unwrap().count();
    assert_eq!(only, 1, "no temporary file is left");
}

#[test]
fn any_text_comes_back_from_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    corpus(folder.path());
    let options = options(folder.path(), &["text"], 600);
    train(&options, &mut |_| {}).unwrap();
    let tokenizer = Tokenizer::from_file(&options.out).unwrap();
    for text in
        ["", "\n\n  \t", "wate wate", "\u{1f4a7}\u{4e95}\u{0}\u{7f}", "a<|endoftext|>b", " x "]
    {
        let tokens = tokenizer.encode("x", text.as_bytes()).unwrap();
        assert_eq!(tokenizer.decode("x", &tokens).unwrap(), text.as_bytes(), "{text:?}");
    }
}

/// What the tokenizer was measured on, no data set of the same files trains on.
#[test]
fn data_sets_hold_out_what_the_tokenizer_did_not_learn_from() {
    let folder = tempfile::tempdir().unwrap();
    let mut words = String::new();
    for index in 0..30 {
        // A word of its own for each file, often enough to become one token if it is learned.
        let word: String = format!("{index:02}").bytes().map(|b| (b + 49) as char).collect();
        let text = format!(" water{word}").repeat(40);
        write(folder.path(), &[(&format!("text/{index}.txt"), text.as_bytes())]);
        words = words + " water" + &word;
    }
    let bpe = options(folder.path(), &["text"], 600);
    let summary = train(&bpe, &mut |_| {}).unwrap();
    let tokenizer = Tokenizer::from_file(&bpe.out).unwrap();
    let options = DataOptions {
        inputs: bpe.inputs.clone(),
        tokenizer: tokenizer.clone(),
        cache_dir: folder.path().join("cache"),
        heldout_tokens_min: 1,
        ..DataOptions::default()
    };
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    assert_eq!(dataset.summary().files_heldout, summary.files_heldout);
    // Files that were learned from are 40 tokens and the separator; the others are more.
    let tokens = dataset.tokens();
    assert_eq!(tokens.len(Split::Train), 41 * summary.files_train);
    assert!(tokens.len(Split::Heldout) >= 81 * summary.files_heldout);
}

#[test]
fn another_tokenizer_of_the_same_name_is_another_cache() {
    let folder = tempfile::tempdir().unwrap();
    corpus(folder.path());
    let prepare = |vocab_size| {
        let bpe = BpeOptions { force: true, ..options(folder.path(), &["text"], vocab_size) };
        train(&bpe, &mut |_| {}).unwrap();
        let options = DataOptions {
            inputs: bpe.inputs.clone(),
            tokenizer: Tokenizer::from_file(&bpe.out).unwrap(),
            cache_dir: folder.path().join("cache"),
            heldout_tokens_min: 100,
            ..DataOptions::default()
        };
        let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
        assert!(dataset.tokens().check_vocab(u64::from(vocab_size)).is_ok());
        (dataset.summary().is_from_cache, dataset.summary().tokens_train)
    };
    let small = prepare(300);
    let large = prepare(900);
    assert_eq!((small.0, large.0), (false, false));
    assert!(small.1 > large.1);
    assert_eq!(prepare(300), (true, small.1));
}

#[test]
fn a_part_of_the_text_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    corpus(folder.path());
    let mut options = options(folder.path(), &["text"], 400);
    options.force = true;
    for (bytes_max, files) in [(1, 1), (1000, 1), (20_000, 9)] {
        options.bytes_max = Some(bytes_max);
        let summary = train(&options, &mut |_| {}).unwrap();
        // To the end of a line of eleven words.
        assert!((bytes_max..bytes_max + 100).contains(&summary.bytes_train), "{summary}");
        assert_eq!(summary.files_train, files, "{summary}");
    }
    // One file: its end is kept aside, and is not what the limit cuts off.
    options.inputs = vec![folder.path().join("text/0.txt")];
    options.bytes_max = Some(500);
    let summary = train(&options, &mut |_| {}).unwrap();
    let bytes = prose(400, 0).len() as u64;
    assert!((500..600).contains(&summary.bytes_train), "{summary}");
    assert!((bytes / 20 - 60..=bytes / 20).contains(&summary.bytes_heldout), "{summary}");
}

/// A merge costs the square of a word's length: this took hours.
#[test]
fn a_megabyte_without_a_space() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("one.txt", "acgt".repeat(1 << 18).as_bytes())]);
    let summary = train(&options(folder.path(), &["one.txt"], 300), &mut |_| {}).unwrap();
    assert!(summary.bytes_per_token > Some(100.0), "{summary}");
}

#[test]
fn bad_requests_are_one_clear_error_each() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write(
        root,
        &[
            ("a.txt", b"water in a deep well"),
            ("empty.txt", b""),
            ("binary", b"a\0b"),
            ("there/tokenizer.json", b"{}"),
            ("other/tokenizer_config.json", br#"{"eos_token": "</s>"}"#),
            ("file", b"x"),
            ("t.bin", &crate::bin::tests::build(20_240_520, 1, 1, &[1, 0])),
        ],
    );
    let check = |change: &dyn Fn(&mut BpeOptions), expected: &str| {
        let mut options = options(root, &["a.txt"], 300);
        change(&mut options);
        let before = std::fs::read(&options.out).ok();
        let message = train(&options, &mut |_| {}).unwrap_err().to_string();
        assert_eq!(message.replace(&format!("{}/", root.display()), ""), expected);
        assert_eq!(std::fs::read(&options.out).ok(), before);
    };
    for found in [0, 256, VOCAB_SIZE_MAX + 1] {
        check(
            &|options| options.vocab_size = found,
            &format!(
                "vocab_size: expected 257 (256 bytes and `<|endoftext|>`) to 1048576, got \
                 {found}\nhint: `--vocab-size 32000`"
            ),
        );
    }
    check(
        &|options| options.out = root.join("there/tokenizer.json"),
        "`there/tokenizer.json` exists already\nhint: `--force` writes over it, `--out` names \
         another file",
    );
    check(
        &|options| options.out = root.join("there"),
        "`there` is a folder, expected the name of a file\nhint: `--out there/tokenizer.json`",
    );
    check(
        &|options| options.out = root.join("other/tokenizer.json"),
        "the `tokenizer_config.json` beside `other/tokenizer.json` names `</s>` as eos, expected \
         `<|endoftext|>`\nhint: `--out` in a folder of its own",
    );
    check(
        &|options| options.inputs = vec![root.join("empty.txt"), root.join("binary")],
        "`binary` is not text: it holds a byte 0 at offset 1\nhint: text, `.jsonl`, `.parquet` and \
         token files (`.bin`) are read",
    );
    check(
        &|options| options.inputs = vec![root.join("none")],
        "no file or folder `none`\nhint: `--data` takes text files, `.jsonl`, `.parquet`, folders \
         of them, patterns such as `texts/**/*.txt` and token files (`.bin`)",
    );
    check(
        &|options| options.inputs = vec![root.join("t.bin")],
        "`t.bin` holds tokens; a tokenizer learns from text\nhint: give the text that the tokens \
         were made of",
    );
    #[cfg(unix)]
    {
        let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
        check(
            &|options| (options.out, options.force) = (root.join("socket"), true),
            "cannot write the tokenizer `socket`: it is not a regular file",
        );
    }
    let mut options = options(root, &["a.txt"], 300);
    options.out = root.join("file/tokenizer.json");
    let message = train(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(message.starts_with("cannot write the tokenizer `"), "{message}");
}

#[test]
fn too_little_text_to_measure_on() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("a.txt", b"deep")]);
    let summary = train(&options(folder.path(), &["a.txt"], 300), &mut |_| {}).unwrap();
    assert_eq!((summary.vocab_size, summary.bytes_per_token), (257, None));
    let table = summary.to_string();
    assert!(table.contains("held-out      nothing: there is too little text"), "{table}");
    assert!(table.contains("300 tokens were asked for; no more pairs come 2"), "{table}");
}
