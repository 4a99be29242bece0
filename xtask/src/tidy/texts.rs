//! Rules about the text of files.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::{Violation, cuda, docs, environment, names, prose, trees};
use crate::source::{RustLines, committable_files, is_word, split_rust};

const COLUMNS_MAX: usize = 100;
const LINES_MAX: usize = 600;

/// Files over the limit, each with its maximum number of lines. A ratchet: entries shrink and
/// disappear, and no entry is added.
const LONG_FILES: [(&str, usize); 0] = [];

/// Folders and files that may contain `#![allow(unsafe_code)]`.
const UNSAFE_PLACES: [&str; 3] =
    ["deepwell-kernels/", "deepwell-probe/src/dynamic.rs", "deepwell-trainer/data/src/map.rs"];

/// Macros that are not allowed in a commit, with the alternative.
const BANNED_MACROS: [(&str, &str); 3] = [
    ("todo", "write it, or return an error that says what is not supported"),
    ("unimplemented", "return an error that says what is not supported"),
    ("dbg", "use `tracing`, or an assertion in a test"),
];

/// Folders of one developer's machine. Split, because this file is checked too.
const MACHINE_FOLDERS: [&str; 3] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/tmp/", "dw")];

/// Lower-case words, and the field's term to use instead. In code the rule checks comments and
/// lower-case identifiers, in which `_` counts as a space. Split, because this file is checked too.
const WORDS: [(&str, &str); 11] = [
    (concat!("multi", "processor"), "SM"),
    (concat!("multi", "processors"), "SMs"),
    (concat!("tic", "ket"), "arrival counter"),
    (concat!("tic", "kets"), "arrival counters"),
    (concat!("matrix ", "product"), "GEMM"),
    (concat!("matrix ", "products"), "GEMMs"),
    (concat!("machine ", "code"), "SASS"),
    (concat!("row ", "copy"), "rowwise operand"),
    (concat!("column ", "copy"), "columnwise operand"),
    (concat!("pair of ", "blocks"), "CTA pair"),
    (concat!("stored by ", "depth"), "K-major"),
];

/// Paths that may contain older words: records of measurements and changes.
const RECORDS: [&str; 2] = ["benchmarks/", "CHANGELOG.md"];

/// Larger files are data and are not checked.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// The texts of the repository at `root`, each with its path from there.
pub(super) fn texts(root: &Path) -> Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for file in committable_files(root)? {
        let path = file.to_string_lossy().replace('\\', "/");
        let file = root.join(&path);
        if fs::metadata(&file)?.len() > TEXT_BYTES_MAX {
            continue;
        }
        if let Ok(text) = String::from_utf8(fs::read(&file)?) {
            texts.push((path, text));
        }
    }
    Ok(texts)
}

pub(super) fn check(root: &Path, texts: &[(String, String)]) -> Result<Vec<Violation>> {
    let mut violations = Vec::new();
    let mut cuda_texts = Vec::new();
    let mut documents = Vec::new();
    let mut sources = Vec::new();
    for (path, text) in texts.iter().cloned() {
        violations.extend(check_text(&path, &text));
        if environment::is_of_interest(&path) {
            sources.push((path.clone(), text.clone()));
        }
        if cuda::is_of_interest(&path) {
            cuda_texts.push((path, text));
        } else if path.ends_with(".md") {
            documents.push((path, text));
        }
    }
    let page = documents.iter().find(|(path, _)| path == environment::PAGE);
    violations.extend(environment::check(&sources, page.map(|(_, text)| text.as_str())));
    violations.extend(cuda::check(&cuda_texts));
    violations.extend(docs::check(root, &documents)?);
    Ok(violations)
}

/// Checks the rules about single files.
fn check_text(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = check_machine_folders(path, text);
    violations.extend(prose::check(path, text));
    let extension = path.rsplit('.').next().unwrap_or_default();
    if matches!(extension, "rs" | "cu" | "cuh") && !path.starts_with(cuda::FIXTURES) {
        violations.extend(check_size(path, text));
    }
    if matches!(extension, "md" | "cu" | "cuh") && !path.starts_with(cuda::FIXTURES) {
        violations.extend(check_words(path, text.lines().map(spaced)));
    }
    if extension == "rs" {
        let lines = split_rust(text);
        let prose = lines.code.iter().zip(&lines.comments).map(|(code, comment)| {
            let names = words(code).map(|(_, word)| word.replace('_', " "));
            let names: Vec<String> = names.filter(|name| *name == name.to_lowercase()).collect();
            format!(" {} . {}", names.join(" . "), spaced(comment))
        });
        violations.extend(check_words(path, prose));
        violations.extend(check_module_doc(path, &lines));
        violations.extend(check_banned(path, &lines));
        violations.extend(check_unsafe(path, &lines));
        violations.extend(trees::check(path, &lines));
        violations.extend(names::check(path, &lines));
    }
    violations
}

fn check_machine_folders(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for folder in MACHINE_FOLDERS {
            // The match must not be in the middle of a longer path or of a URL.
            let is_absolute = line.match_indices(folder).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                !before.is_some_and(|character| is_word(character) || "./~-}".contains(character))
            });
            if is_absolute {
                let message = format!("`{folder}` is a folder of one machine; use a relative path");
                violations.push(Violation::new(path, index + 1, message));
            }
        }
    }
    violations
}

fn check_size(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        // URLs and table rows cannot be wrapped.
        let is_table = ["//! |", "/// |"].iter().any(|row| line.trim_start().starts_with(row));
        if columns > COLUMNS_MAX && !line.contains("://") && !is_table {
            let message = format!("{columns} columns; break the line, {COLUMNS_MAX} is the limit");
            violations.push(Violation::new(path, index + 1, message));
        }
    }
    let count = text.lines().count();
    let listed = LONG_FILES.iter().find(|(file, _)| *file == path).map(|entry| entry.1);
    match listed {
        None if count > LINES_MAX => {
            let message = format!("{count} lines; split it by subject, {LINES_MAX} is the limit");
            violations.push(Violation::new(path, 0, message));
        }
        Some(allowed) if count > allowed => {
            let message = format!("{count} lines, it had {allowed}; split it by subject");
            violations.push(Violation::new(path, 0, message));
        }
        Some(allowed) if count < allowed => {
            let message = format!(
                "{count} lines, {allowed} are allowed; lower or remove its entry in LONG_FILES"
            );
            violations.push(Violation::new(path, 0, message));
        }
        _ => {}
    }
    violations
}

/// Checks for words of [`WORDS`]. `lines` are lower case, with a space before and after each word.
fn check_words(path: &str, lines: impl Iterator<Item = String>) -> Vec<Violation> {
    let mut violations = Vec::new();
    if RECORDS.iter().any(|record| path.starts_with(record) || path.ends_with(record)) {
        return violations;
    }
    for (index, line) in lines.enumerate() {
        for (word, instead) in WORDS {
            if line.contains(&format!(" {word} ")) {
                let message = format!("`{word}`: the field says {instead}");
                violations.push(Violation::new(path, index + 1, message));
            }
        }
    }
    violations
}

/// Returns the words of a line of prose in lower case, with a space before and after each word.
fn spaced(line: &str) -> String {
    let words = line.split(|character: char| !character.is_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    format!(" {} ", words.join(" ").to_lowercase())
}

fn check_module_doc(path: &str, lines: &RustLines) -> Option<Violation> {
    for (code, comment) in lines.code.iter().zip(&lines.comments) {
        if comment.starts_with("//!") {
            return None;
        }
        let code = code.trim();
        if !code.is_empty() && !code.starts_with("#!") {
            break;
        }
    }
    Some(Violation::new(path, 1, "no module doc; say in a `//!` line what the file is about"))
}

fn check_banned(path: &str, lines: &RustLines) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (index, code) in lines.code.iter().enumerate() {
        for (name, way) in BANNED_MACROS {
            if words(code)
                .any(|(at, word)| word == name && code[at + word.len()..].starts_with('!'))
            {
                let message = format!("`{name}!` does not belong in a commit; {way}");
                violations.push(Violation::new(path, index + 1, message));
            }
        }
        let compact: String = code.chars().filter(|character| !character.is_whitespace()).collect();
        if compact.contains("#[ignore]") || compact.contains("#[ignore=") {
            let message = "an ignored test; assert what happens now, with a FIXME, or remove it";
            violations.push(Violation::new(path, index + 1, message));
        }
    }
    violations
}

fn check_unsafe(path: &str, lines: &RustLines) -> Vec<Violation> {
    let mut violations = Vec::new();
    let is_place = UNSAFE_PLACES
        .iter()
        .any(|place| if place.ends_with('/') { path.starts_with(place) } else { path == *place });
    for (index, code) in lines.code.iter().enumerate() {
        if code.contains("(unsafe_code)")
            && !code.contains("deny(")
            && !code.contains("forbid(")
            && !is_place
        {
            let message =
                format!("`unsafe` outside of {}; move it there", UNSAFE_PLACES.join(", "));
            violations.push(Violation::new(path, index + 1, message));
        }
        if opens_unsafe(&lines.code, index) && !has_safety_comment(lines, index) {
            let message = "`unsafe` without a reason; say why it is sound in a `// SAFETY:` \
                           comment above";
            violations.push(Violation::new(path, index + 1, message));
        }
    }
    violations
}

/// Whether an `unsafe` block or impl begins on this line.
fn opens_unsafe(code: &[String], index: usize) -> bool {
    let line = &code[index];
    words(line).any(|(at, word)| {
        let after = line[at + word.len()..].trim_start();
        let after = match (after, code.get(index + 1)) {
            ("", Some(next)) => next.trim_start(),
            _ => after,
        };
        let starts_impl = after.strip_prefix("impl").is_some_and(|rest| !rest.starts_with(is_word));
        word == "unsafe" && (after.starts_with('{') || starts_impl)
    })
}

/// Whether this line has a `SAFETY:` comment, on the line or above it. Attributes and the beginning
/// of the same statement may be in between.
fn has_safety_comment(lines: &RustLines, index: usize) -> bool {
    if lines.comments[index].contains("SAFETY:") {
        return true;
    }
    for above in (0..index).rev() {
        if lines.comments[above].contains("SAFETY:") {
            return true;
        }
        let code = lines.code[above].trim();
        let is_blank = code.is_empty() && lines.comments[above].is_empty();
        let ends_another = code.ends_with([';', '{', '}']);
        if is_blank || ends_another {
            return false;
        }
    }
    false
}

/// Returns the words of a line of code, each with its byte position.
fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.split(|character| !is_word(character)).filter(|word| !word.is_empty()).map(|word| {
        let at = word.as_ptr() as usize - code.as_ptr() as usize;
        (at, word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines and the beginnings of the messages that a file of this name and text gives.
    fn check(path: &str, text: &str, expected: &[(usize, &str)]) {
        let violations = check_text(path, text);
        let found: Vec<_> = violations.iter().map(|v| (v.line, v.message.as_str())).collect();
        assert_eq!(found.len(), expected.len(), "{text}\n{found:?}");
        for ((line, message), (expected_line, expected)) in found.iter().zip(expected) {
            assert_eq!(line, expected_line, "{text}");
            assert!(message.starts_with(expected), "expected `{expected}` in `{message}`");
        }
    }

    #[test]
    fn module_docs() {
        check("a.rs", "//! Doc.\nfn f() {}\n", &[]);
        check("a.rs", "// Licence.\n#![no_std]\n//! Doc.\n", &[]);
        check("a.rs", "fn f() {}\n//! Late.\n", &[(1, "no module doc")]);
        check("a.rs", "/// Not of the module.\nfn f() {}\n", &[(1, "no module doc")]);
        check("a.rs", "", &[(1, "no module doc")]);
        check("a.cu", "int main() {}\n", &[]);
    }

    #[test]
    fn sizes() {
        let line = |columns: usize| format!("//! {}\n", "é".repeat(columns - 4));
        check("a.rs", &line(100), &[]);
        check("a.rs", &line(101), &[(1, "101 columns")]);
        check("a.md", &line(101), &[]);
        check("a.rs", &format!("//! https://{}\n", "x".repeat(100)), &[]);
        check("a.rs", &format!("//! Doc.\n    /// | {} |\n", "x".repeat(100)), &[]);
        check("a.rs", &"//! x\n".repeat(600), &[]);
        check("a.rs", &"//! x\n".repeat(601), &[(0, "601 lines; split it")]);
    }

    #[test]
    fn banned_words() {
        let with = |code: &str| format!("//! Doc.\n{code}\n");
        check("a.rs", &with("todo!()"), &[(2, "`todo!`")]);
        check("a.rs", &with("std::unimplemented!(\"x\")"), &[(2, "`unimplemented!`")]);
        check("a.rs", &with("dbg!(x)"), &[(2, "`dbg!`")]);
        check("a.rs", &with("#[ignore]"), &[(2, "an ignored test")]);
        check("a.rs", &with("#[ignore = \"slow\"]"), &[(2, "an ignored test")]);
        check("a.rs", &with("// todo!()"), &[]);
        check("a.rs", &with("f(\"dbg!(x) #[ignore]\")"), &[]);
        check("a.rs", &with("my_todo!(); let todo = !x; todo != y;"), &[]);
    }

    #[test]
    fn unsafe_code() {
        let with = |code: &str| format!("//! Doc.\n{code}\n");
        let missing = &[(2, "`unsafe` without a reason")];
        check("a.rs", &with("f(unsafe { g() });"), missing);
        check("a.rs", &with("unsafe impl Send for X {}"), missing);
        check("a.rs", &with("unsafe\n{ g() }"), missing);
        check("a.rs", &with("unsafe { g() } // SAFETY: x"), &[]);
        check("a.rs", &with("// SAFETY: x\nunsafe { g() }"), &[]);
        check("a.rs", &with("// SAFETY: x,\n// y.\n#[cfg(x)]\nunsafe { g() }"), &[]);
        check("a.rs", &with("// SAFETY: x\nlet a =\n    unsafe { g() };"), &[]);
        check("a.rs", &with("unsafe fn f() {}\nunsafe extern \"C\" {}"), &[]);
        check("a.rs", &with("// unsafe { }\nf(\"unsafe {\");"), &[]);
        let other = "// SAFETY: x\nlet a = unsafe { g() };\nlet b = unsafe { g() };";
        check("a.rs", &with(other), &[(4, "`unsafe` without a reason")]);
        let far = "// SAFETY: x\n\nunsafe { g() }";
        check("a.rs", &with(far), &[(4, "`unsafe` without a reason")]);
    }

    #[test]
    fn places_of_unsafe_code() {
        let text = "//! Doc.\n#![allow(unsafe_code)]\n";
        let outside = &[(2, "`unsafe` outside of deepwell-kernels/")];
        check("deepwell-kernels/src/cuda/x.rs", text, &[]);
        check("deepwell-probe/src/dynamic.rs", text, &[]);
        check("deepwell-trainer/data/src/map.rs", text, &[]);
        check("deepwell-probe/src/lib.rs", text, outside);
        check("deepwell-ckpt/src/lib.rs", "//! Doc.\n#[expect(unsafe_code)]\n", outside);
        check("deepwell-ckpt/src/lib.rs", "//! Doc.\n#![forbid(unsafe_code)]\n", &[]);
    }

    #[test]
    fn words_of_the_field() {
        for (word, instead) in WORDS {
            let message = format!("`{word}`: the field says {instead}");
            let expected: &[(usize, &str)] = &[(2, &message)];
            let identifier = word.replace(' ', "_");
            check("a.rs", &format!("//! Doc.\n// A {word}.\n"), expected);
            check("a.rs", &format!("//! Doc.\nlet the_{identifier} = 1;\n"), expected);
            check("a.rs", &format!("//! Doc.\nlet a = \"{word}\";\n"), &[]);
            check("a.cuh", &format!("// A.\n// A {word} b\n"), expected);
            check("docs/a.md", &format!("# A\n{word}, b\n"), expected);
            check("docs/a.md", &format!("# A\nx{word}\n"), &[]);
            check("CHANGELOG.md", &format!("# A\n{word}\n"), &[]);
            check("benchmarks/a.md", &format!("# A\n{word}\n"), &[]);
        }
        check("a.rs", "//! A dot product, a product of sizes, a copy of a row.\n", &[]);
        let machine = concat!("MULTI", "PROCESSOR");
        let code = format!("//! Doc.\nrow.copy(CU_{machine}_COUNT);\n");
        check("a.rs", &code, &[]);
    }

    #[test]
    fn folders_of_one_machine() {
        let [first, second, third] = MACHINE_FOLDERS;
        check("a.md", &format!("see `{first}x`\n"), &[(1, "`/")]);
        check("a.toml", &format!("x = \"{second}x\"\n"), &[(1, "`/")]);
        check("a.sh", &format!("{third}/x\n"), &[(1, "`/")]);
        check("a.md", &format!("https://example.org{first}x and a{second}b\n"), &[]);
    }
}
