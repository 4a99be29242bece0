//! Rules about module trees with a strict interface: the rest of the crate does not use them, and
//! they use only the crate's public interface.

use super::Violation;
use crate::source::{RustLines, is_word};

/// A module tree.
struct Tree {
    /// Sources of the crate.
    sources: &'static str,
    /// The top-level module.
    module: &'static str,
    /// Public modules of the crate whose paths the tree may use.
    uses: &'static [&'static str],
}

/// Capture reads foreign models, and is over half of its crate.
const TREES: [Tree; 1] =
    [Tree { sources: "deepwell-ir/src/", module: "capture", uses: &["capture", "ops"] }];

/// Returns the violations of a Rust file.
pub(super) fn check(path: &str, lines: &RustLines) -> Vec<Violation> {
    let mut violations = Vec::new();
    for Tree { sources, module, uses } in TREES {
        let Some(inside) = path.strip_prefix(sources) else { continue };
        let is_in_tree =
            inside.strip_prefix(module).is_some_and(|rest| rest.starts_with('/') || rest == ".rs");
        for (index, line) in lines.code.iter().enumerate() {
            let message = if is_in_tree {
                let other =
                    modules_after(line, "crate").into_iter().find(|name| !uses.contains(name));
                other.map(|name| {
                    format!(
                        "{module}/ names the module `{name}` of its crate; use what the crate \
                         offers to everybody, `crate::Name`"
                    )
                })
            } else {
                (!modules_after(line, module).is_empty() || line.contains(&format!("{module}::{{")))
                    .then(|| {
                        format!(
                            "the crate looks into `{module}`; move what is shared out of it, or \
                             the user into it"
                        )
                    })
            };
            violations.extend(message.map(|message| Violation::new(path, index + 1, message)));
        }
    }
    violations
}

/// Returns the names in `<root>::name::`, or in `<root>::name` if the root is a module and not
/// `crate`.
fn modules_after<'a>(line: &'a str, root: &str) -> Vec<&'a str> {
    let pattern = format!("{root}::");
    let mut names = Vec::new();
    for (at, _) in line.match_indices(&pattern) {
        if line[..at].chars().next_back().is_some_and(is_word) {
            continue;
        }
        let rest = &line[at + pattern.len()..];
        let end = rest.find(|character| !is_word(character)).unwrap_or(rest.len());
        let is_path = rest[end..].starts_with("::");
        if end > 0 && (root != "crate" || is_path) {
            names.push(&rest[..end]);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::split_rust;

    #[test]
    fn who_may_name_what() {
        let check = |path: &str, text: &str, expected: Option<&str>| {
            let violations = check(path, &split_rust(text));
            let messages: Vec<_> = violations.iter().map(|v| v.message.as_str()).collect();
            assert_eq!(messages.len(), usize::from(expected.is_some()), "{text}: {messages:?}");
            for (message, expected) in messages.iter().zip(expected) {
                assert!(message.starts_with(expected), "`{expected}` in `{message}`");
            }
        };
        let (inside, outside) = ("deepwell-ir/src/capture/pt2/emit.rs", "deepwell-ir/src/text.rs");
        check(
            outside,
            "use crate::capture::LlamaConfig;\n",
            Some("the crate looks into `capture`"),
        );
        check(outside, "use crate::capture::{A, B};\n", Some("the crate looks into `capture`"));
        check(outside, "    let x = capture::capture(&y);\n", Some("the crate looks into"));
        check(outside, "pub mod capture;\n/// See [`capture::x`].\n", None);
        check(outside, "fn capture() {}\nrecapture::x();\n", None);
        check("deepwell-plan/src/lib.rs", "use deepwell_ir::capture::LlamaConfig;\n", None);
        check("deepwell-ir/tests/a.rs", "use deepwell_ir::capture::LlamaConfig;\n", None);
        check(inside, "use crate::{Graph, GraphBuilder};\nuse crate::ops::Add;\n", None);
        check(inside, "use crate::capture::json::Keys;\nuse crate::ops;\nuse crate::Role;\n", None);
        check(inside, "use crate::op::Op;\n", Some("capture/ names the module `op` of its crate"));
        check(
            inside,
            "let x = crate::builder::f();\n",
            Some("capture/ names the module `builder`"),
        );
    }
}
