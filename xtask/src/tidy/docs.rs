//! Rules about Markdown: links have targets, the book lists its chapters, and code blocks are
//! tested.
//!
//! In `docs/` a block of Rust or TOML follows a comment `<!-- from PATH -->` and equals consecutive
//! lines of the file PATH, which tests compile, run or read. JSON must parse.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use super::Violation;

/// The list of the book's chapters.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Prefix of links from the book to files outside of the book.
const REPOSITORY: &str = "https://github.com/deepwell-rs/deepwell/blob/main/";

/// Checks the Markdown files of the repository, given as paths and texts; links are relative to
/// `root`.
pub(super) fn check(root: &Path, texts: &[(String, String)]) -> Result<Vec<Violation>> {
    let documents: BTreeMap<&str, Document<'_>> =
        texts.iter().map(|(path, text)| (path.as_str(), parse(text))).collect();
    let mut violations = Vec::new();
    for (&path, document) in &documents {
        for link in &document.links {
            violations.extend(check_link(root, &documents, path, link));
        }
        for block in &document.blocks {
            violations.extend(check_block(root, path, block)?);
        }
    }
    violations.extend(check_summary(&documents));
    Ok(violations)
}

/// The checked parts of a file.
#[derive(Debug, Default)]
struct Document<'a> {
    /// Lines and targets of links.
    links: Vec<(usize, &'a str)>,
    /// Anchors of the headings.
    anchors: Vec<String>,
    blocks: Vec<Block<'a>>,
}

/// A fenced block.
#[derive(Debug)]
struct Block<'a> {
    /// Line of the opening fence.
    line: usize,
    language: &'a str,
    /// The file named in the comment before the block.
    from: Option<&'a str>,
    lines: Vec<&'a str>,
}

fn parse(text: &str) -> Document<'_> {
    let mut document = Document::default();
    let mut open: Option<Block<'_>> = None;
    let mut from = None;
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        if let Some(mut block) = open.take() {
            if trimmed.starts_with("```") {
                document.blocks.push(block);
            } else {
                block.lines.push(line);
                open = Some(block);
            }
            continue;
        }
        if let Some(language) = trimmed.strip_prefix("```") {
            let from = from.take();
            open = Some(Block { line: index + 1, language, from, lines: Vec::new() });
            continue;
        }
        if let Some(path) = trimmed.strip_prefix("<!-- from ") {
            from = path.strip_suffix(" -->");
        } else if !trimmed.is_empty() {
            from = None;
        }
        if let Some(heading) = line.strip_prefix('#') {
            let anchor = anchor(heading.trim_start_matches('#').trim());
            let before = document.anchors.iter().filter(|other| **other == anchor).count();
            let number = if before == 0 { String::new() } else { format!("-{before}") };
            document.anchors.push(anchor + &number);
        }
        document.links.extend(links(line).map(|target| (index + 1, target)));
    }
    document
}

/// Returns the targets of the links of a line, except links in code.
fn links(line: &str) -> impl Iterator<Item = &str> {
    // Text outside of backticks.
    let plain = line.split('`').step_by(2);
    let ends = plain.flat_map(|part| part.split("](").skip(1));
    ends.filter_map(|rest| rest.split_once(')').map(|(target, _)| target)).chain(definition(line))
}

/// Returns the target of a line `[name]: target`.
fn definition(line: &str) -> Option<&str> {
    let (_, target) = line.strip_prefix('[')?.split_once("]: ")?;
    Some(target.trim())
}

/// Returns the anchor of a heading, as in GitHub and mdBook.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

fn check_link(
    root: &Path,
    documents: &BTreeMap<&str, Document<'_>>,
    path: &str,
    &(line, target): &(usize, &str),
) -> Option<Violation> {
    let from_root = target.strip_prefix(REPOSITORY);
    if from_root.is_none() && (target.contains("://") || target.starts_with("mailto:")) {
        return None;
    }
    let rest = from_root.unwrap_or(target);
    let (file, anchor) = rest.split_once('#').map_or((rest, None), |(file, at)| (file, Some(at)));
    let file = match file {
        "" => Some(path.to_owned()),
        file if from_root.is_some() => Some(file.to_owned()),
        file => beside(path, file),
    };
    let violation = |message| Some(Violation::new(path, line, message));
    let Some(file) = file.filter(|file| root.join(file).exists()) else {
        return violation(format!("`{target}` leads to nothing; correct the link"));
    };
    if path.starts_with("docs/") && from_root.is_none() && !file.starts_with("docs/") {
        return violation(format!("`{target}` is not in the book; write `{REPOSITORY}{file}`"));
    }
    let anchors = &documents.get(file.as_str())?.anchors;
    match anchor {
        Some(anchor) if !anchors.iter().any(|known| known == anchor) => {
            violation(format!("`{file}` has no heading `#{anchor}`; correct the link"))
        }
        _ => None,
    }
}

/// Resolves a link in `path`, relative to the root; `None` if the target is outside of the root.
fn beside(path: &str, target: &str) -> Option<String> {
    let mut whole = PathBuf::from(path);
    whole.pop();
    for part in Path::new(target).components() {
        match part {
            Component::Normal(part) => whole.push(part),
            Component::ParentDir if !whole.as_os_str().is_empty() => drop(whole.pop()),
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(whole.to_string_lossy().replace('\\', "/"))
}

fn check_block(root: &Path, path: &str, block: &Block<'_>) -> Result<Option<Violation>> {
    let violation = |message| Ok(Some(Violation::new(path, block.line, message)));
    if block.language == "json"
        && let Err(error) = serde_json::from_str::<serde_json::Value>(&block.lines.join("\n"))
    {
        return violation(format!("no JSON: {error}"));
    }
    let Some(from) = block.from else {
        let must_be_tested =
            path.starts_with("docs/") && ["rust", "toml"].contains(&block.language);
        return if must_be_tested {
            violation("code that nothing tests; put `<!-- from PATH -->` before it".to_owned())
        } else {
            Ok(None)
        };
    };
    let Ok(text) = std::fs::read_to_string(root.join(from)) else {
        return violation(format!("`{from}` cannot be read; correct the comment before the block"));
    };
    if contains_lines(&text, &block.lines) {
        return Ok(None);
    }
    violation(format!("these lines are not in `{from}`; copy them from there"))
}

/// Whether `lines` are consecutive lines of `text`, ignoring indentation.
fn contains_lines(text: &str, lines: &[&str]) -> bool {
    let text: Vec<&str> = text.lines().map(str::trim).collect();
    let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    !lines.is_empty() && text.windows(lines.len()).any(|window| window == lines)
}

/// Checks that every chapter is in [`SUMMARY`].
fn check_summary(documents: &BTreeMap<&str, Document<'_>>) -> Vec<Violation> {
    let Some(summary) = documents.get(SUMMARY) else { return Vec::new() };
    let listed: Vec<String> =
        summary.links.iter().filter_map(|(_, target)| beside(SUMMARY, target)).collect();
    documents
        .keys()
        .filter(|path| path.starts_with("docs/") && **path != SUMMARY)
        .filter(|path| !listed.iter().any(|listed| listed == **path))
        .map(|path| Violation::new(path, 0, format!("no chapter of the book; add it to {SUMMARY}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_that_break_a_rule() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("docs")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(root.path().join(name), text).unwrap();
        write("code.rs", "fn main() {\n    let a = 1;\n    let b = 2;\n}\n");
        write("a.md", "");
        write("docs/b.md", "");
        write("docs/SUMMARY.md", "");
        let other = ("a.md", "# One, two\n## `x` & y\n# One, two\n");
        let listed = "- [B](b.md)\n";
        let rust = "```rust\nlet a = 1;\nlet b = 2;\n```\n";
        let from = "<!-- from code.rs -->\n";
        // The text of docs/b.md, the list of chapters, and what is found.
        let rows: [(&str, &str, &[&str]); 19] = [
            ("[x](https://x.y/z) [y](b.md)", listed, &[]),
            ("[x](../a.md)", listed, &["`../a.md` is not in the book; write `https://"]),
            (&format!("[x]({REPOSITORY}a.md#one-two)"), listed, &[]),
            (&format!("[x]({REPOSITORY}c.md)"), listed, &["c.md` leads to nothing"]),
            ("[x](a.md)", listed, &["docs/b.md:1: `a.md` leads to nothing"]),
            ("\n[x](../../a.md)", listed, &["docs/b.md:2: `../../a.md` leads to nothing"]),
            ("`[x](nothing.md)`\n```text\n[x](nothing.md)\n```", listed, &[]),
            (&format!("[y]({REPOSITORY}a.md#one-two-1) [z]({REPOSITORY}a.md#x--y)"), listed, &[]),
            (&format!("[x]({REPOSITORY}a.md#three)"), listed, &["`a.md` has no heading `#three`"]),
            ("# Here\n[x](#here) [y](#there)", listed, &["no heading `#there`"]),
            ("[x]\n\n[x]: nowhere.md", listed, &["`nowhere.md` leads to nothing"]),
            ("", "", &["docs/b.md: no chapter of the book"]),
            ("```json\n{\"a\": 1}\n```", listed, &[]),
            ("```json\n{\"a\": }\n```", listed, &["docs/b.md:1: no JSON"]),
            (rust, listed, &["code that nothing tests"]),
            (&format!("{from}{rust}"), listed, &[]),
            (&format!("{from}\n{rust}"), listed, &[]),
            (&format!("{from}more\n{rust}"), listed, &["code that nothing tests"]),
            (&format!("{from}```rust\nlet a = 3;\n```"), listed, &["not in `code.rs`"]),
        ];
        for (text, summary, expected) in rows {
            let texts = [other, ("docs/b.md", text), (SUMMARY, summary)];
            let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned()));
            let violations = check(root.path(), &texts).unwrap();
            let found: Vec<String> = violations.iter().map(ToString::to_string).collect();
            assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.contains(expected), "expected `{expected}` in `{found}`");
            }
        }
    }
}
