//! Rule: no name is parsed for meaning.
//!
//! The type of a node, tensor, value, call or layer states its role, and related objects are linked
//! by id. Names are for people: code may print a name and compare it with another name as a whole,
//! and no more. The rule finds four violations:
//!
//! - a method that inspects a string, called on an expression called a name;
//! - the same method on any expression, with a fragment of a name as argument;
//! - a comparison of a name with a literal, by `==`, `match` or `matches!`;
//! - a look-up of a name made by `format!`.

use super::Violation;
use crate::source::{RustLines, is_word};

/// Sources of the crates that use Deepwell's names.
const CRATES: [&str; 7] = [
    "deepwell-precision/src/",
    "deepwell-ir/src/",
    "deepwell-moe/src/",
    "deepwell-plan/",
    "deepwell-kernels/src/",
    "deepwell-ckpt/src/",
    "deepwell-trainer/",
];

/// Folders and files of these crates that may parse names, and the origin of these names.
const READERS: [(&str, &str); 16] = [
    ("deepwell-ir/src/capture/", "models of others"),
    ("deepwell-precision/src/policy/", "presets and globs, which users write"),
    ("deepwell-ckpt/src/hf/", "tensors and files of Hugging Face"),
    ("deepwell-ckpt/src/folder.rs", "folders of checkpoints"),
    ("deepwell-ckpt/src/manifest.rs", "files of a checkpoint that may be damaged"),
    ("deepwell-plan/search/src/model_shape/config.rs", "models that users ask for"),
    ("deepwell-plan/search/src/search/rank_map.rs", "columns of a table"),
    ("deepwell-trainer/bench/src/machine.rs", "GPUs"),
    ("deepwell-trainer/bench/src/section.rs", "kernels, by words that users write"),
    ("deepwell-trainer/cli/src/hardware.rs", "clusters that users write"),
    ("deepwell-trainer/data/src/", "files of texts"),
    ("deepwell-trainer/src/export/", "folders of runs, and what Hugging Face wants"),
    ("deepwell-trainer/src/parity/folder.rs", "folders of runs"),
    ("deepwell-trainer/runs/src/", "folders of runs, also of other versions"),
    ("deepwell-trainer/quantize-file/src/", "tensors of other people's files"),
    ("deepwell-trainer/src/world/supervise.rs", "variables of the environment"),
];

/// Methods that inspect a string.
const LOOKS: [&str; 24] = [
    "contains",
    "ends_with",
    "find",
    "match_indices",
    "matches",
    "replace",
    "replacen",
    "rfind",
    "rsplit",
    "rsplit_once",
    "rsplitn",
    "rsplit_terminator",
    "split",
    "split_at",
    "split_inclusive",
    "split_once",
    "split_terminator",
    "splitn",
    "starts_with",
    "strip_prefix",
    "strip_suffix",
    "trim_end_matches",
    "trim_matches",
    "trim_start_matches",
];

/// Methods that return the same string, or a view of it.
const SAME_TEXT: [&str; 14] = [
    "as_bytes",
    "as_deref",
    "as_ref",
    "as_str",
    "bytes",
    "char_indices",
    "chars",
    "clone",
    "to_ascii_lowercase",
    "to_lowercase",
    "to_owned",
    "to_string",
    "trim",
    "unwrap_or_default",
];

/// Methods that look up a key.
const LOOK_UPS: [&str; 5] = ["contains_key", "find", "get", "get_mut", "remove"];

/// Fragments of the names made by passes.
const PIECES: [&str; 12] = [
    "@", ".mx", ".scale", ".stats", ".bf16", "fprop", "dgrad", "wgrad", "layers.", "_proj",
    ".weight", ".bias",
];

/// Returns the violations of a Rust file.
pub(super) fn check(path: &str, lines: &RustLines) -> Vec<Violation> {
    let is_ours = CRATES.iter().any(|sources| path.starts_with(sources));
    let is_test = path.contains("/tests/") || path.ends_with("tests.rs");
    let is_reader = READERS.iter().any(|(place, _)| path.starts_with(place));
    if !is_ours || is_test || is_reader {
        return Vec::new();
    }
    let tokens = tokens(lines);
    let mut violations = Vec::new();
    for at in 0..tokens.len() {
        if let Some(found) = look(&tokens, at).or_else(|| comparison(&tokens, at)) {
            let message = format!(
                "{found}; ask the node, tensor or op what it is, or follow its link: no name is \
                 parsed for meaning"
            );
            violations.push(Violation::new(path, tokens[at].line, message));
        }
    }
    violations
}

/// A word, a string, or a punctuation character.
struct Token<'a> {
    /// Line, counted from 1.
    line: usize,
    kind: Kind<'a>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind<'a> {
    Word(&'a str),
    Text(&'a str),
    Other(char),
}

/// Returns the tokens of a file before its tests.
fn tokens(lines: &RustLines) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut texts = lines.texts.iter();
    for (index, code) in lines.code.iter().enumerate() {
        let opens_tests = |line: &String| line.starts_with("mod ") && line.ends_with('{');
        if code.starts_with("#[cfg(test)]") && lines.code.get(index + 1).is_some_and(opens_tests) {
            break;
        }
        let line = index + 1;
        let mut rest = code.as_str();
        while let Some(first) = rest.chars().next() {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len()).max(first.len_utf8());
            let (token, after) = rest.split_at(length);
            rest = after;
            if first == '"' {
                let text = texts.next().map_or("", String::as_str);
                tokens.push(Token { line, kind: Kind::Text(text) });
            } else if is_word(first) {
                tokens.push(Token { line, kind: Kind::Word(token) });
            } else if !first.is_whitespace() {
                tokens.push(Token { line, kind: Kind::Other(first) });
            }
        }
    }
    tokens
}

fn kind<'a>(tokens: &[Token<'a>], at: usize) -> Option<Kind<'a>> {
    tokens.get(at).map(|token| token.kind)
}

fn is_other(tokens: &[Token<'_>], at: usize, character: char) -> bool {
    kind(tokens, at) == Some(Kind::Other(character))
}

/// Returns the violation in the call of the method at `at`, if any.
fn look(tokens: &[Token<'_>], at: usize) -> Option<String> {
    let Kind::Word(method) = tokens[at].kind else { return None };
    if at == 0 || !is_other(tokens, at - 1, '.') || !is_other(tokens, at + 1, '(') {
        return None;
    }
    let arguments = &tokens[at + 2..closing(tokens, at + 1)];
    let mut kinds =
        arguments.iter().map(|token| token.kind).skip_while(|kind| *kind == Kind::Other('&'));
    let is_made =
        [kinds.next(), kinds.next()] == [Some(Kind::Word("format")), Some(Kind::Other('!'))];
    if LOOK_UPS.contains(&method) && is_made {
        return Some(format!("`{method}` of a name that is put together"));
    }
    if !LOOKS.contains(&method) {
        return None;
    }
    if let Some(name) = name_before(tokens, at - 1) {
        return Some(format!("`{method}` on `{name}`"));
    }
    arguments.iter().find_map(|token| match token.kind {
        Kind::Text(text) if PIECES.iter().any(|piece| text.contains(piece)) => {
            Some(format!("`{method}` with `{text}`, a piece of a name"))
        }
        _ => None,
    })
}

/// Returns the violation in a comparison with a literal whose first token or operator is at `at`,
/// if any.
fn comparison(tokens: &[Token<'_>], at: usize) -> Option<String> {
    let is_text = |at| matches!(kind(tokens, at), Some(Kind::Text(_)));
    let name = match tokens[at].kind {
        Kind::Other('=' | '!') if is_other(tokens, at + 1, '=') => {
            // The literal may be borrowed.
            let after = at + 2 + usize::from(is_other(tokens, at + 2, '&'));
            if is_text(after) { name_before(tokens, at) } else { None }
        }
        Kind::Word("match") => {
            let open = (at + 1..tokens.len()).find(|&at| is_other(tokens, at, '{'))?;
            if is_text(open + 1) { name_before(tokens, open) } else { None }
        }
        Kind::Word("matches") if is_other(tokens, at + 1, '!') => {
            let open = at + 2;
            let comma = (open + 1..closing(tokens, open)).find(|&at| is_other(tokens, at, ','))?;
            if is_text(comma + 1) { name_before(tokens, comma) } else { None }
        }
        _ => None,
    };
    name.map(|name| format!("`{name}` compared with a literal"))
}

/// Returns the end of the group that opens at `open`.
fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.kind {
            Kind::Other('(' | '[' | '{') => depth += 1,
            Kind::Other(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// Returns the beginning of the group that closes at `close`.
fn opening(tokens: &[Token<'_>], close: usize) -> usize {
    let mut depth = 0;
    for at in (0..=close).rev() {
        match tokens[at].kind {
            Kind::Other(')' | ']' | '}') => depth += 1,
            Kind::Other('(' | '[' | '{') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    0
}

/// Returns the word that names the expression before `end`, if it is a name: `name` in
/// `call.op.name().as_str()`.
fn name_before<'a>(tokens: &[Token<'a>], end: usize) -> Option<&'a str> {
    let mut at = end;
    let mut is_one_of_several = false;
    loop {
        at = at.checked_sub(1)?;
        match tokens[at].kind {
            Kind::Other('?') => {}
            Kind::Other(')') => at = opening(tokens, at),
            Kind::Other(']') => {
                at = opening(tokens, at);
                is_one_of_several = true;
            }
            Kind::Word(word) => {
                let is_call = is_other(tokens, at + 1, '(');
                if is_call && SAME_TEXT.contains(&word) && at > 0 && is_other(tokens, at - 1, '.') {
                    at -= 1;
                    continue;
                }
                let is_name = word == "name" || word.ends_with("_name");
                let is_list = word == "names" || word.ends_with("_names");
                return (is_name || is_one_of_several && is_list).then_some(word);
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::split_rust;

    const OURS: &str = "deepwell-plan/src/lower.rs";

    fn check(path: &str, text: &str, expected: &[(usize, &str)]) {
        let violations = super::check(path, &split_rust(text));
        let found: Vec<_> = violations.iter().map(|v| (v.line, v.message.as_str())).collect();
        assert_eq!(found.len(), expected.len(), "{text}\n{found:?}");
        for ((line, message), (expected_line, expected)) in found.iter().zip(expected) {
            assert_eq!(line, expected_line, "{text}");
            assert!(message.starts_with(expected), "expected `{expected}` in `{message}`");
        }
    }

    #[test]
    fn ways_to_parse_a_name() {
        for (text, expected) in [
            // Methods on names.
            ("value.name.ends_with(suffix)", "`ends_with` on `name`"),
            ("if node.name.as_str().trim().starts_with(\"x\") {}", "`starts_with` on `name`"),
            ("let of = tensor.name\n    .strip_suffix(end)?;", "`strip_suffix` on `name`"),
            ("call.op.name().contains(\"norm\")", "`contains` on `name`"),
            ("names[0].rsplit('.')", "`rsplit` on `names`"),
            ("layer_name.split_once('.')", "`split_once` on `layer_name`"),
            ("graph.tensor(id).name.replacen(&number, \"*\", 1)", "`replacen` on `name`"),
            ("name.bytes().find(byte)", "`find` on `name`"),
            // Pieces of names.
            ("let is_scale = |n: &str| n.ends_with(\".scale\");", "`ends_with` with `.scale`"),
            ("text.split(\"@\")", "`split` with `@`"),
            ("what.find(\".mx\")", "`find` with `.mx`"),
            ("x.contains(&format!(\"{y}.dgrad\"))", "`contains` with `{y}.dgrad`"),
            ("glob.trim_end_matches(\".weight\")", "`trim_end_matches` with `.weight`"),
            // Comparisons with literals.
            ("if input.name == \"tokens\" {}", "`name` compared"),
            ("if &*input.name != \"tokens\" {}", "`name` compared"),
            ("matches!(value.name.as_str(), \"tokens\" | \"targets\")", "`name` compared"),
            ("match tensor.name.as_str() {\n    \"a\" => 1,\n    _ => 2,\n}", "`name` compared"),
            // Look-ups of names that are made.
            ("by_name.get(&format!(\"{name}.scale\"))", "`get` of a name"),
            ("program.find(&format!(\"moment1.{}\", x))", "`find` of a name"),
        ] {
            // A method may stand on the line after the name.
            let line = if text.contains("\n    .") { 2 } else { 1 };
            check(OURS, text, &[(line, expected)]);
        }
    }

    #[test]
    fn what_may_be_done_with_a_name() {
        for text in [
            "if a.name == b.name {}",
            "by_name.get(value.name.as_str())",
            "names.contains(&name)",
            "report.find(|tensor| tensor.format != F32)",
            "lines.find(|line| format!(\"{line}\") == text)",
            "println!(\"{}.scale\", name)",
            "let name = format!(\"{name}.scale\");",
            "blake3::hash(name.as_bytes())",
            "match name { Some(name) => 1, None => 2 }",
            "matches!(op, Op::Linear(_))",
            "text.split('\\n').find(|line| line.starts_with(\"host: \"))",
            "// name.ends_with(\".scale\")",
            "f(\"name.ends_with(x)\")",
            "#[cfg(test)]\nmod tests {\n    fn f() { name.ends_with(x); }\n}",
        ] {
            check(OURS, text, &[]);
        }
        check(OURS, "#[cfg(test)]\nmod tests;\nname.split(x)", &[(3, "`split` on `name`")]);
    }

    #[test]
    fn places() {
        let text = "name.ends_with(x)";
        for path in CRATES {
            check(&format!("{path}a.rs"), text, &[(1, "`ends_with` on `name`")]);
        }
        for path in [
            "xtask/src/a.rs",
            "deepwell-probe/src/a.rs",
            "deepwell-kernels/emulator/src/a.rs",
            "deepwell-plan/tests/a.rs",
            "deepwell-kernels/src/ops/a/tests/cuda.rs",
            "deepwell-moe/src/route/tests.rs",
        ] {
            check(path, text, &[]);
        }
        for (place, reason) in READERS {
            check(place, text, &[]);
            assert!(!reason.is_empty(), "{place}");
        }
    }
}
