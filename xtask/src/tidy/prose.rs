//! Plain sentences: the share of pronouns in comments and documents.
//!
//! A sentence of 8 to 60 words with a quarter or more of pronouns and relatives ("what", "those",
//! "of which") makes a reader look for the nouns. Tests are left out.

use super::Violation;
use crate::source::split_rust;

const PRONOUNS: [&str; 19] = [
    "it", "its", "they", "them", "their", "those", "these", "that", "which", "what", "one", "ones",
    "other", "others", "who", "whose", "there", "whom", "theirs",
];
const WORDS: std::ops::RangeInclusive<usize> = 8..=60;

/// Whether the rule reads a file.
fn is_of_interest(path: &str) -> bool {
    let is_test = path.contains("/tests/") || path.ends_with("tests.rs");
    let is_record = path.starts_with("benchmarks/") || path.ends_with("CHANGELOG.md");
    let is_read = [".rs", ".cu", ".cuh", ".md"].iter().any(|ending| path.ends_with(ending));
    is_read && !is_test && !is_record
}

/// Violations of a file: its unclear sentences.
pub(super) fn check(path: &str, text: &str) -> Vec<Violation> {
    if !is_of_interest(path) {
        return Vec::new();
    }
    let violation = |sentence: String| {
        let message = format!("a quarter of pronouns; say it with nouns: {sentence}");
        Violation::new(path, 0, message)
    };
    unclear(path, text).into_iter().map(violation).collect()
}

fn unclear(path: &str, text: &str) -> Vec<String> {
    let blocks = if path.ends_with(".md") { paragraphs(text) } else { comments(text) };
    let sentences = blocks.iter().flat_map(|block| sentences(block));
    sentences.filter(|sentence| is_unclear(sentence)).collect()
}

/// Paragraphs of Markdown without code, tables and headings.
fn paragraphs(text: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if line.trim().is_empty() {
            blocks.push(String::new());
        } else if !is_code && !line.starts_with(['|', '#']) && !line.starts_with("    ") {
            append(&mut blocks, line);
        }
    }
    blocks
}

/// Blocks of line comments, without code.
fn comments(text: &str) -> Vec<String> {
    let lines = split_rust(text);
    let mut blocks = vec![String::new()];
    let mut is_code = false;
    for comment in &lines.comments {
        let Some(text) = comment.strip_prefix("//") else {
            is_code = false;
            blocks.push(String::new());
            continue;
        };
        let text = text.trim_start_matches(['/', '!']);
        if text.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            append(&mut blocks, text);
        }
    }
    blocks
}

fn append(blocks: &mut [String], line: &str) {
    let Some(block) = blocks.last_mut() else { return };
    block.push(' ');
    block.push_str(line.trim());
}

/// Sentences and clauses: a dot, colon or semicolon before a space ends one.
fn sentences(block: &str) -> Vec<String> {
    let mut sentences = vec![Vec::new()];
    for word in block.split_whitespace() {
        if let Some(sentence) = sentences.last_mut() {
            sentence.push(word);
        }
        if word.ends_with(['.', ':', ';']) {
            sentences.push(Vec::new());
        }
    }
    sentences.into_iter().map(|words| words.join(" ")).collect()
}

fn is_unclear(sentence: &str) -> bool {
    let is_part = |character: char| character.is_ascii_alphabetic() || character == '\'';
    let words = sentence.split(|character| !is_part(character)).filter(|word| !word.is_empty());
    let (mut count, mut pronouns) = (0, 0);
    for word in words {
        count += 1;
        pronouns += usize::from(PRONOUNS.contains(&word.to_ascii_lowercase().as_str()));
    }
    WORDS.contains(&count) && 4 * pronouns >= count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_of_comments_and_documents() {
        let check = |path: &str, text: &str, expected: &[&str]| {
            assert_eq!(unclear(path, text), expected, "{path}: {text}");
        };
        let bad = "What they hold of it is what those have.";
        let good = "The executor verifies a program before the backend runs it.";
        check("a.rs", &format!("/// {good} {bad}\nfn f() {{}}\n"), &[bad]);
        check("a.rs", "// What they hold\n// of it is what those have.\n", &[bad]);
        check("a.rs", &format!("let a = \"{bad}\";\n"), &[]);
        check("a.rs", &format!("//! ```\n//! {bad}\n//! ```\n"), &[]);
        check("a.rs", "// It is that which it is.\n", &[]);
        check("a.md", &format!("{good}\n\n{bad}\n"), &[bad]);
        check("a.md", &format!("# {bad}\n| {bad} |\n```\n{bad}\n```\n"), &[]);
    }
}
