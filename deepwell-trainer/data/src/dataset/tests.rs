//! Data sets from good and bad inputs.

mod formats;

use std::path::Path;

use super::*;
use crate::bin::tests::build as build_bin;
use crate::tokenizer::tests::write_word_level;

fn options(folder: &Path, inputs: &[&str]) -> DataOptions {
    DataOptions {
        inputs: inputs.iter().map(|input| folder.join(input)).collect(),
        cache_dir: folder.join("cache"),
        heldout_tokens_min: 8,
        ..DataOptions::default()
    }
}

fn write(folder: &Path, files: &[(&str, &[u8])]) {
    for (name, content) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

fn all(dataset: &Dataset, split: Split) -> Vec<i32> {
    let mut tokens = vec![0; dataset.tokens().len(split) as usize];
    dataset.tokens().copy_i32(split, 0, &mut tokens);
    tokens
}

fn text(dataset: &Dataset, split: Split) -> String {
    all(dataset, split).into_iter().map(|token| token as u8 as char).collect()
}

#[test]
fn bad_inputs_are_one_clear_error_each() {
    let check = |files: &[(&str, &[u8])], inputs: &[&str], expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), files);
        let error = Dataset::prepare(&options(folder.path(), inputs), &mut |_| {}).unwrap_err();
        let message = error.to_string().replace(&format!("{}/", folder.path().display()), "");
        assert_eq!(message, expected);
        // Nothing is left of an attempt that failed.
        let left = std::fs::read_dir(folder.path().join("cache"));
        assert_eq!(left.map_or(0, |left| left.count()), 0);
    };
    check(
        &[],
        &["nothing"],
        "no file or folder `nothing`\nhint: `--data` takes text files, `.jsonl`, `.parquet`, \
         folders of them, patterns such as `texts/**/*.txt` and token files (`.bin`)",
    );
    check(
        &[("empty.txt", b"")],
        &["empty.txt"],
        "no text in `empty.txt`: 1 empty (`empty.txt`)\nhint: give a file or folder of UTF-8 text",
    );
    check(
        &[("d/.hidden", b"x"), ("d/image", b"a\0b"), ("d/sub/empty", b"")],
        &["d"],
        "no text in `d`: 1 hidden (`d/.hidden`), 1 binary (`d/image`), 1 empty (`d/sub/empty`)\n\
         hint: give a file or folder of UTF-8 text",
    );
    check(
        &[("one.txt", b"x")],
        &["one.txt"],
        "the data has 1 tokens in all; a training part and a held-out part need at least 4\nhint: \
         give more data",
    );
    check(
        &[("file", b"x")],
        &["file/below"],
        "cannot read `file/below`: Not a directory (os error 20)",
    );
    let bin = build_bin(20_240_520, 1, 2, &[1, 0, 2, 0]);
    check(
        &[("text.txt", b"text"), ("tokens.bin", &bin)],
        &["text.txt", "tokens.bin"],
        "`tokens.bin` holds tokens and `text.txt` holds text; give either text or token files",
    );
    check(
        &[("tokens.bin", &bin[..1027])],
        &["tokens.bin"],
        "token file `tokens.bin`: the header says 2 tokens of 2 bytes, so 1028 bytes in all, but \
         the file has 1027\nhint: the file is cut short or damaged; write it again",
    );
    let large = build_bin(20_240_801, 1, 1, &[0, 0, 0, 0x80]);
    check(
        &[("tokens.bin", &large)],
        &["tokens.bin"],
        "token file `tokens.bin`: expected tokens below 2147483648, got 2147483648",
    );
}

/// A regular file whose reading fails: the memory of this process, whose page 0 is not mapped.
#[cfg(target_os = "linux")]
#[test]
fn an_unreadable_file_is_one_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path(), &[]);
    options.inputs = vec!["/proc/self/mem".into()];
    let error = Dataset::prepare(&options, &mut |_| {}).unwrap_err();
    assert_eq!(error.to_string(), "cannot read `/proc/self/mem`: Input/output error (os error 5)");
}

#[test]
fn whole_files_are_held_out_and_separated() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..40).map(|i| format!("d/{i:02}.txt")).collect();
    for name in &names {
        write(folder.path(), &[(name, format!("<{name}>").as_bytes())]);
    }
    let mut options = options(folder.path(), &["d"]);
    // Each file is 12 tokens: `<d/00.txt>` and the separator.
    options.heldout_tokens_min = 30;
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    let train = text(&dataset, Split::Train);
    let heldout = text(&dataset, Split::Heldout);
    assert!(train.ends_with('\0') && heldout.ends_with('\0'));
    let mut documents: Vec<&str> = train.split_terminator('\0').collect();
    assert!(documents.is_sorted(), "training files come in the order of their names");
    let heldout: Vec<&str> = heldout.split_terminator('\0').collect();
    assert_eq!(heldout.len(), 3, "2 files are 5 %, 3 files have 30 tokens");
    documents.extend(heldout);
    documents.sort_unstable();
    let expected: Vec<String> = names.iter().map(|name| format!("<{name}>")).collect();
    assert_eq!(documents, expected, "every file is in one part, whole");
    let summary = dataset.summary();
    assert_eq!((summary.files, summary.files_train, summary.files_heldout), (40, 37, 3));
    assert_eq!(summary.notes, Vec::<String>::new());
}

#[test]
fn the_place_of_the_folder_and_the_order_of_inputs_do_not_matter() {
    let make = |inputs: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        for i in 0..30 {
            write(folder.path(), &[(&format!("d/{i}.txt"), format!("text {i}").as_bytes())]);
            write(folder.path(), &[(&format!("e/{i}.txt"), format!("more {i}").as_bytes())]);
        }
        let dataset = Dataset::prepare(&options(folder.path(), inputs), &mut |_| {}).unwrap();
        let parts = (all(&dataset, Split::Train), all(&dataset, Split::Heldout));
        (dataset.summary().content_hash.clone(), parts)
    };
    let first = make(&["d", "e"]);
    assert_eq!(first, make(&["e", "d"]));
}

#[test]
fn one_file_is_split_by_position_with_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..1000).map(|i| b'a' + (i % 23) as u8).collect();
    write(folder.path(), &[("one.txt", &content)]);
    for (heldout_tokens_min, heldout) in [(8, 50), (200, 200), (100_000, 500)] {
        let mut options = options(folder.path(), &["one.txt"]);
        options.heldout_tokens_min = heldout_tokens_min;
        let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
        let expected = str::from_utf8(&content).unwrap().split_at(1000 - heldout);
        assert_eq!(text(&dataset, Split::Train), expected.0);
        assert_eq!(text(&dataset, Split::Heldout), expected.1);
        let notes = &dataset.summary().notes;
        assert_eq!(
            notes[0],
            "split by position, not by file: no choice of whole files holds out 5 to 50 % of the \
             text"
        );
        let short = "the held-out part has 500 tokens, 100000 were asked for: there is too little \
                     text";
        assert_eq!(notes.get(1).map(String::as_str), (heldout == 500).then_some(short));
    }
}

#[test]
fn the_cache_is_found_again_and_made_again_when_damaged() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("one.txt", b"water in a deep well")]);
    let options = options(folder.path(), &["one.txt"]);
    let mut stages = Vec::new();
    let prepare = |stages: &mut Vec<Progress>| {
        stages.clear();
        Dataset::prepare(&options, &mut |progress| stages.push(progress)).unwrap()
    };
    let first = prepare(&mut stages);
    assert!(!first.summary().is_from_cache);
    let last = *stages.last().unwrap();
    assert_eq!(last, Progress { stage: crate::Stage::Tokenize, bytes_done: 20, bytes_total: 20 });
    let second = prepare(&mut stages);
    assert!(second.summary().is_from_cache);
    assert!(stages.iter().all(|progress| progress.stage == crate::Stage::Scan));
    assert_eq!(all(&first, Split::Train), all(&second, Split::Train));

    for entry in std::fs::read_dir(&options.cache_dir).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        // As damage comes: another file under the name, so that open maps keep their bytes.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let again = prepare(&mut stages);
        assert!(!again.summary().is_from_cache);
        assert_eq!(all(&first, Split::Heldout), all(&again, Split::Heldout));
    }

    write(folder.path(), &[("one.txt", b"water in a deep hole")]);
    let changed = prepare(&mut stages);
    assert!(!changed.summary().is_from_cache, "other content, other key");
    assert_ne!(first.summary().content_hash, changed.summary().content_hash);
}

#[test]
fn a_hugging_face_tokenizer_takes_utf8_only() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::from_file(&write_word_level(folder.path())).unwrap();
    write(
        folder.path(),
        &[
            ("d/a.txt", b"let deep water"),
            ("d/b.txt", b"deep well water"),
            ("d/latin1.txt", b"caf\xe9"),
        ],
    );
    let mut options = options(folder.path(), &["d"]);
    options.tokenizer = tokenizer;
    options.heldout_tokens_min = 1;
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    let mut parts = [all(&dataset, Split::Train), all(&dataset, Split::Heldout)];
    parts.sort();
    assert_eq!(parts, [vec![1, 3, 4, 5], vec![3, 2, 4, 5]]);
    assert_eq!(dataset.vocab_size(), 6);
    assert_eq!(dataset.summary().skipped.to_string(), "1 not UTF-8 (`d/latin1.txt`)");

    options.tokenizer = Tokenizer::bytes();
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    assert_eq!(dataset.summary().skipped.total(), 0, "bytes are bytes");
}

#[test]
fn token_files_are_taken_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let train: Vec<u8> = (0u16..6).flat_map(|i| (i * 1000).to_le_bytes()).collect();
    let val: Vec<u8> = [70_000u32, 1].into_iter().flat_map(u32::to_le_bytes).collect();
    write(
        folder.path(),
        &[
            ("d/x_train.bin", &build_bin(20_240_520, 1, 6, &train)),
            ("d/x_val.bin", &build_bin(20_240_801, 1, 2, &val)),
        ],
    );
    let dataset = Dataset::prepare(&options(folder.path(), &["d"]), &mut |_| {}).unwrap();
    assert_eq!(all(&dataset, Split::Train), [0, 1000, 2000, 3000, 4000, 5000]);
    assert_eq!(all(&dataset, Split::Heldout), [70_000, 1]);
    assert_eq!(dataset.vocab_size(), 70_001);
    assert!(dataset.tokens().check_vocab(70_000).is_err());

    let one = options(folder.path(), &["d/x_train.bin"]);
    let dataset = Dataset::prepare(&one, &mut |_| {}).unwrap();
    assert_eq!(all(&dataset, Split::Heldout), [3000, 4000, 5000], "half at most");
    assert_eq!(dataset.vocab_size(), 5001);
}

#[test]
fn the_default_corpus_is_this_workspace_s_locked_dependencies() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path(), &[]);
    options.workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    options.heldout_tokens_min = HELDOUT_TOKENS_MIN;
    let dataset = Dataset::prepare(&options, &mut |_| {}).unwrap();
    let summary = dataset.summary();
    assert!(summary.source.starts_with("default corpus: Rust sources of "), "{}", summary.source);
    assert!(summary.tokens_train > 1_000_000, "{summary}");
    assert!(summary.tokens_heldout >= HELDOUT_TOKENS_MIN, "{summary}");
    let share =
        summary.tokens_heldout as f64 / (summary.tokens_train + summary.tokens_heldout) as f64;
    // 5 % and at most one file of 256 KiB more.
    assert!((0.049..0.075).contains(&share), "{summary}");
    let again = Dataset::prepare(&options, &mut |_| {}).unwrap();
    assert!(again.summary().is_from_cache);
}
