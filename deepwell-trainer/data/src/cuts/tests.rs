//! Tokens of parts beside tokens of the whole.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn tokenizer(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

fn added(content: &str, id: usize, changes: &Value) -> Value {
    let mut token = json!({"id": id, "content": content, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    for (key, value) in changes.as_object().into_iter().flatten() {
        token[key] = value.clone();
    }
    token
}

fn file(added: &[Value], normalizer: &Value, pre_tokenizer: &Value, model: &Value) -> Value {
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null,
        "decoder": null, "model": model})
}

fn byte_level(prefix: bool, regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true,
        "use_regex": regex})
}

fn split(pattern: &str) -> Value {
    let pattern = json!({"Regex": pattern});
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false},
        byte_level(false, false)]})
}

fn metaspace(scheme: &str, splits: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme,
        "split": splits})
}

/// A BPE model of bytes, with merges of letters, of spaces and of both.
fn bytes_bpe() -> Value {
    let keep = (33..127).chain(161..173).chain(174..256);
    let letters: Vec<u32> = keep.collect();
    let mut names: Vec<String> = Vec::new();
    let mut next = 256;
    for byte in 0..256u32 {
        let letter = if letters.contains(&byte) { byte } else { next };
        next += u32::from(letter != byte);
        names.push(char::from_u32(letter).unwrap().to_string());
    }
    let merges = [
        ["t", "h"],
        ["\u{120}", "t"],
        ["\u{120}", "th"],
        ["i", "s"],
        ["\u{120}", "is"],
        ["\u{120}", "\u{120}"],
        ["\u{10a}", "\u{10a}"],
        ["\u{120}", "\u{10a}"],
    ];
    bpe(names, &merges, false)
}

/// A BPE model of characters with a piece for each byte.
fn pieces_bpe(more: &[[&str; 2]]) -> Value {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let letters = "\u{2581}abehist".chars().map(String::from);
    let mut merges = vec![
        ["t", "h"],
        ["\u{2581}", "t"],
        ["\u{2581}", "th"],
        ["i", "s"],
        ["\u{2581}", "is"],
        ["\u{2581}", "\u{2581}"],
        ["\u{2581}\u{2581}", "\u{2581}"],
    ];
    merges.extend(more);
    bpe(["<unk>".to_owned()].into_iter().chain(bytes).chain(letters).collect(), &merges, true)
}

fn bpe(names: Vec<String>, merges: &[[&str; 2]], falls_back: bool) -> Value {
    let mut vocab: Vec<String> = names;
    for merge in merges {
        let token = merge.concat();
        if !vocab.contains(&token) {
            vocab.push(token);
        }
    }
    let vocab: serde_json::Map<String, Value> =
        vocab.into_iter().enumerate().map(|(id, name)| (name, json!(id))).collect();
    json!({"type": "BPE", "dropout": null, "unk_token": falls_back.then_some("<unk>"),
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
        "byte_fallback": falls_back, "ignore_merges": false, "vocab": vocab, "merges": merges})
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})
}

fn llama_2() -> Value {
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    json!({"type": "Sequence", "normalizers": [prepend, replace()]})
}

fn word_piece() -> Value {
    json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 20,
        "vocab": {"[UNK]": 0, "t": 1, "##h": 2, "is": 3, "a": 4, "b": 5, "##s": 6, "i": 7, "##e": 8,
            "\u{5b57}": 9, "\u{3002}": 10, "th": 11}})
}

fn unigram() -> Value {
    json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": [["<unk>", 0.0],
        ["\u{2581}", -2.0], ["\u{2581}th", -3.0], ["t", -4.0], ["h", -4.1], ["is", -3.5],
        ["i", -4.2], ["s", -4.3], ["\u{2581}is", -3.3], ["a", -4.0], ["\u{2581}\u{2581}", -5.0]]})
}

/// Tokenizers, and whether their texts may be cut.
fn cases() -> Vec<(&'static str, Value, bool)> {
    let end = [added("</s>", 900, &json!({}))];
    let none = Value::Null;
    let file = |normalizer: &Value, pre: &Value, model: Value| file(&end, normalizer, pre, &model);
    let nfc = json!({"type": "NFC"});
    let nfkc = json!({"type": "NFKC"});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true});
    let of_type = |name: &str| json!({"type": name});
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let both = json!({"type": "Sequence",
        "pretokenizers": [of_type("WhitespaceSplit"), metaspace("first", true)]});
    let digits = json!({"type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": true}, byte_level(false, true)]});
    let before = json!({"type": "Split", "pattern": {"String": " "},
        "behavior": "MergedWithPrevious", "invert": false});
    let chars = |length: u32| json!({"type": "FixedLength", "length": length});
    vec![
        ("gpt-2", file(&none, &byte_level(false, true), bytes_bpe()), true),
        ("prefix", file(&none, &byte_level(true, true), bytes_bpe()), true),
        ("nfkc", file(&nfkc, &byte_level(false, true), bytes_bpe()), true),
        ("llama-3", file(&none, &split(WORD_PATTERNS[2]), bytes_bpe()), true),
        ("qwen", file(&nfc, &split(WORD_PATTERNS[3]), bytes_bpe()), true),
        ("gpt-4o", file(&none, &split(WORD_PATTERNS[4]), bytes_bpe()), true),
        ("deepseek", file(&none, &split(WORD_PATTERNS[5]), bytes_bpe()), true),
        ("starcoder", file(&none, &digits, bytes_bpe()), true),
        ("no words", file(&none, &byte_level(false, false), bytes_bpe()), true),
        ("llama-2", file(&llama_2(), &none, pieces_bpe(&[])), true),
        ("gemma", file(&replace(), &before, pieces_bpe(&[])), true),
        ("across", file(&llama_2(), &none, pieces_bpe(&[["s", "\u{2581}"]])), false),
        ("metaspace", file(&none, &metaspace("always", true), pieces_bpe(&[])), true),
        ("first", file(&none, &metaspace("first", true), pieces_bpe(&[["s", "\u{2581}"]])), true),
        ("first whole", file(&none, &metaspace("first", false), pieces_bpe(&[])), true),
        ("never", file(&none, &metaspace("never", false), pieces_bpe(&[])), true),
        ("bert", file(&bert, &of_type("BertPreTokenizer"), word_piece()), true),
        ("whitespace", file(&none, &of_type("Whitespace"), word_piece()), true),
        ("unigram", file(&nfkc, &metaspace("always", true), unigram()), true),
        ("unigram first", file(&nfkc, &both, unigram()), true),
        ("unigram whole", file(&none, &metaspace("always", false), unigram()), false),
        ("strip", file(&strip, &byte_level(false, true), bytes_bpe()), false),
        ("merged with previous", file(&none, &before, bytes_bpe()), false),
        ("pattern", file(&none, &split(r"\w+ \w+|."), bytes_bpe()), false),
        ("fixed", file(&none, &chars(3), word_piece()), false),
    ]
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Tokens of a text that is cut wherever it may be.
fn of_parts(tokenizer: &Tokenizer, cuts: Cuts, text: &str) -> (Vec<u32>, usize) {
    let mut places = Vec::new();
    let mut end = text.len();
    while let Some(cut) = cuts.last(&text.as_bytes()[..end], 1) {
        places.push(cut);
        end = cut.end;
    }
    let (mut tokens, mut start) = (Vec::new(), 0);
    for cut in places.iter().rev() {
        tokens.extend(ids(tokenizer, &text[start..cut.end]));
        start = cut.start;
    }
    tokens.extend(ids(tokenizer, &text[start..]));
    (tokens, places.len())
}

const PARTS: [&str; 28] = [
    "a",
    "is",
    "th",
    "this",
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\n\n",
    "\t",
    "'s",
    "'",
    "1",
    "12",
    ".",
    "</s>",
    "\u{5b57}",
    "\u{5b57}\u{5b57}",
    "\u{3002}",
    "\u{ff0c}",
    "\u{2581}",
    "e\u{301}",
    "\u{416}",
    "\u{d55c}",
    "-",
];

/// Made once: a pattern takes a while to compile.
static TOKENIZERS: LazyLock<Vec<(&str, Tokenizer, Cuts)>> = LazyLock::new(|| {
    let made = cases().into_iter().map(|(name, json, _)| {
        let tokenizer = tokenizer(&json);
        let cuts = Cuts::of(&tokenizer);
        (name, tokenizer, cuts)
    });
    made.collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn tokens_of_parts_are_those_of_the_whole(
        parts in proptest::collection::vec(proptest::sample::select(&PARTS[..]), 0..40),
    ) {
        let text = parts.concat();
        for (name, tokenizer, cuts) in TOKENIZERS.iter() {
            let (tokens, _) = of_parts(tokenizer, *cuts, &text);
            prop_assert_eq!(tokens, ids(tokenizer, &text), "{} {:?}", name, text);
        }
    }
}

#[test]
fn known_tokenizers_are_cut_and_others_are_not() {
    for (name, json, may_be_cut) in cases() {
        let tokenizer = tokenizer(&json);
        let cuts = Cuts::of(&tokenizer);
        assert_eq!(cuts != Cuts::Nowhere, may_be_cut, "{name} {cuts:?}");
        let text = "is this a test  this\u{5b57}\u{3002}is\na this";
        let (tokens, count) = of_parts(&tokenizer, cuts, text);
        assert_eq!(tokens, ids(&tokenizer, text), "{name}");
        assert!(!may_be_cut || count >= 4, "{name}: {count} cuts");
    }
}

#[test]
fn added_tokens_that_reach_across_a_cut_forbid_it() {
    let check = |content: &str, changes: Value, normalizer: Value, expected: bool| {
        let added = [added(content, 900, &changes)];
        let pre_tokenizer = byte_level(false, true);
        let file = file(&added, &normalizer, &pre_tokenizer, &bytes_bpe());
        let cuts = Cuts::of(&tokenizer(&file));
        assert_eq!(cuts != Cuts::Nowhere, expected, "{content:?} {changes}");
    };
    let nfc = || json!({"type": "NFC"});
    check("<a>", json!({"lstrip": true, "rstrip": true}), Value::Null, true);
    check("New York", json!({}), Value::Null, false);
    check("  ", json!({}), Value::Null, true);
    check("is", json!({}), Value::Null, true);
    check("is", json!({"single_word": true}), Value::Null, false);
    check("is", json!({"rstrip": true}), Value::Null, false);
    check("is", json!({"normalized": true}), nfc(), false);
    check("<a>", json!({"normalized": true}), nfc(), true);
}

/// llm.c's Llama-2 tokens had one token more for each MiB: a space that is not in the text.
#[test]
fn issue_31_no_space_is_put_before_a_piece() {
    let tokenizer = tokenizer(&cases().into_iter().find(|case| case.0 == "llama-2").unwrap().1);
    let line = "is it a tale, that this is a test. it is a list\n";
    let text = line.repeat(64);
    let cuts = Cuts::of(&tokenizer);
    let cut = cuts.last(text.as_bytes(), 1).unwrap();
    assert_eq!(&text[cut.end..cut.start], " ", "the space that the second part gets again");
    let parts = [&text[..cut.end], &text[cut.start..]].map(|part| ids(&tokenizer, part));
    assert_eq!(parts.concat(), ids(&tokenizer, &text));
}
