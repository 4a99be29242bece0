//! Contents of the repository: files, and Rust text split into code, comments and strings.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// Reads a text file.
pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns all files below `folder`, except build outputs and git's files.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let kind = entry.file_type()?;
        let name = entry.file_name();
        if kind.is_dir() && name != "target" && name != ".git" {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the files that are or may become part of a commit, relative to `root`: all files that
/// git does not ignore, or all files outside a git checkout.
pub(crate) fn committable_files(root: &Path) -> Result<Vec<PathBuf>> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output();
    if let Ok(output) = listed
        && output.status.success()
    {
        let text = String::from_utf8_lossy(&output.stdout);
        let paths = text.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from);
        // A deleted file stays in the index until it is committed.
        let mut paths: Vec<_> = paths.filter(|path| root.join(path).is_file()).collect();
        paths.sort();
        paths.dedup();
        return Ok(paths);
    }
    let relative = |path: PathBuf| path.strip_prefix(root).map(Path::to_path_buf).ok();
    Ok(files(root)?.into_iter().filter_map(relative).collect())
}

/// Rust text, line by line, split into code, comments and strings.
pub(crate) struct RustLines {
    /// Code only, without comments and the contents of strings.
    pub(crate) code: Vec<String>,
    /// Comments only, with their slashes.
    pub(crate) comments: Vec<String>,
    /// Contents of strings, in the order of the `"` that stand for them in `code`.
    pub(crate) texts: Vec<String>,
}

/// State of the lexer.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Code,
    LineComment,
    /// Number of open comments.
    BlockComment(usize),
    /// In a string; `\` escapes.
    Text,
    /// In a raw string with this number of `#`; nothing escapes.
    RawText(usize),
}

/// Splits Rust text into code, comments and strings. Also correct for `C` and CUDA text, which has
/// no raw strings.
pub(crate) fn split_rust(text: &str) -> RustLines {
    let mut lines = RustLines { code: Vec::new(), comments: Vec::new(), texts: Vec::new() };
    let mut state = State::Code;
    for line in text.lines() {
        let characters: Vec<char> = line.chars().collect();
        let (mut code, mut comment) = (String::new(), String::new());
        let mut at = 0;
        if state == State::LineComment {
            state = State::Code;
        }
        while at < characters.len() {
            let rest = &characters[at..];
            let (next, length) = advance(state, rest, code.chars().next_back());
            match (state, next) {
                (State::LineComment | State::BlockComment(_), _)
                | (_, State::LineComment | State::BlockComment(_)) => {
                    comment.extend(&rest[..length]);
                }
                (State::Code, State::Code) if length == 1 => code.push(rest[0]),
                // A placeholder for the literal, so that the words around it stay separate.
                (State::Code, State::Code) => code.push_str("''"),
                (State::Code, _) => {
                    code.push('"');
                    lines.texts.push(String::new());
                }
                (_, State::Code) => {}
                _ => lines.texts.last_mut().expect("its quote").extend(&rest[..length]),
            }
            state = next;
            at += length;
        }
        lines.code.push(code);
        lines.comments.push(comment);
    }
    lines
}

/// Returns the state after the next characters, and their number. `before` is the last character of
/// code.
fn advance(state: State, rest: &[char], before: Option<char>) -> (State, usize) {
    let starts = |text: &str| rest.iter().copied().take(text.len()).eq(text.chars());
    match state {
        State::Code if starts("//") => (State::LineComment, rest.len()),
        State::Code if starts("/*") => (State::BlockComment(1), 2),
        State::Code if rest[0] == '"' => (State::Text, 1),
        State::Code if rest[0] == 'r' && !before.is_some_and(is_word) || starts("br") => {
            let prefix = if rest[0] == 'b' { 2 } else { 1 };
            let hashes = rest[prefix..].iter().take_while(|&&character| character == '#').count();
            match rest.get(prefix + hashes) {
                Some('"') => (State::RawText(hashes), prefix + hashes + 1),
                _ => (State::Code, 1),
            }
        }
        State::Code if rest[0] == '\'' => (State::Code, character_literal_length(rest)),
        State::Code => (State::Code, 1),
        State::LineComment => (State::LineComment, rest.len()),
        State::BlockComment(depth) if starts("/*") => (State::BlockComment(depth + 1), 2),
        State::BlockComment(1) if starts("*/") => (State::Code, 2),
        State::BlockComment(depth) if starts("*/") => (State::BlockComment(depth - 1), 2),
        State::BlockComment(depth) => (State::BlockComment(depth), 1),
        State::Text if rest[0] == '\\' => (State::Text, rest.len().min(2)),
        State::Text if rest[0] == '"' => (State::Code, 1),
        State::Text => (State::Text, 1),
        State::RawText(hashes) => {
            let closes = rest[0] == '"'
                && rest[1..].iter().take(hashes).filter(|&&hash| hash == '#').count() == hashes;
            if closes { (State::Code, 1 + hashes) } else { (State::RawText(hashes), 1) }
        }
    }
}

/// Returns the length of a literal such as `'x'` or `'\n'`; 1 for the quote of a lifetime.
fn character_literal_length(rest: &[char]) -> usize {
    match rest {
        ['\'', '\\', _, tail @ ..] => {
            let end = tail.iter().position(|&character| character == '\'');
            end.map_or(1, |end| end + 4)
        }
        ['\'', _, '\'', ..] => 3,
        _ => 1,
    }
}

/// Whether a character can be part of an identifier.
pub(crate) fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_text_is_taken_apart() {
        let check = |text: &str, code: &[&str], comments: &[&str]| {
            let lines = split_rust(text);
            assert_eq!(lines.code, code, "{text}");
            assert_eq!(lines.comments, comments, "{text}");
        };
        check("let a = 1; // why", &["let a = 1; "], &["// why"]);
        check("f(\"// no { \\\" x\"); // c", &["f(\"); "], &["// c"]);
        check("f(r#\"a \" b\"#, x)", &["f(\", x)"], &[""]);
        check("f(br\"a\\\", x)", &["f(\", x)"], &[""]);
        check("for b in breaks {}", &["for b in breaks {}"], &[""]);
        check("a /* b /* c */ d */ e", &["a  e"], &["/* b /* c */ d */"]);
        check("/* a\nb */ c", &["", " c"], &["/* a", "b */"]);
        check("\"a\nb // c\" d", &["\"", " d"], &["", ""]);
        check("fn f<'a>(x: &'a str) {}", &["fn f<'a>(x: &'a str) {}"], &[""]);
        check("m('\"', '\\'', '{', '\\u{1F}')", &["m('', '', '', '')"], &[""]);
        check("r(x)", &["r(x)"], &[""]);
    }

    #[test]
    fn what_is_in_quotes_is_kept_in_order() {
        let check = |text: &str, expected: &[&str]| {
            let lines = split_rust(text);
            assert_eq!(lines.texts, expected, "{text}");
            let quotes = lines.code.concat().matches('"').count();
            assert_eq!(quotes, expected.len(), "{text}");
        };
        check("f(\"a\", \"\", 'b'); // \"c\"", &["a", ""]);
        check("f(r#\"a \" b\"#, br\"c\\\", b\"d\")", &["a \" b", "c\\", "d"]);
        check("f(\"a \\\" b\\n\")", &["a \\\" b\\n"]);
        check("f(\"a\nb\")", &["ab"]);
    }
}
