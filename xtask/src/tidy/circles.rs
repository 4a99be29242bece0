//! Files of a crate that need each other in a circle: no file of a circle can be read, tested or
//! moved by itself.
//!
//! A file needs the files whose items its paths name: `use` declarations and paths from `crate`,
//! `self` and `super`, followed through re-exports. `lib.rs` and `main.rs` do not count.

use std::collections::{BTreeMap, BTreeSet};

use super::Violation;
use crate::source::{is_word, split_rust};

/// Sources of the crates without circles.
const CRATES: [&str; 11] = [
    "deepwell-kernels/capi/src/",
    "deepwell-plan/src/",
    "deepwell-plan/lower/src/",
    "deepwell-plan/score/src/",
    "deepwell-trainer/src/",
    "deepwell-trainer/cli/src/",
    "deepwell-trainer/metrics/src/",
    "deepwell-trainer/quantize-file/src/",
    "deepwell-trainer/report/src/",
    "fuzz/src/",
    "deepwell-kernels/trials/src/",
];

/// Names of a module from the crate's root.
type Module = Vec<String>;

/// Returns the circles among files, paths with their texts.
pub(super) fn check<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Violation> {
    let mut crates: BTreeMap<&str, BTreeMap<Module, (&str, Code)>> = BTreeMap::new();
    for (path, text) in files {
        let Some(sources) = CRATES.iter().find(|sources| path.starts_with(**sources)) else {
            continue;
        };
        let file = (path, Code::of(text));
        crates.entry(sources).or_default().insert(module_of(&path[sources.len()..]), file);
    }
    crates.values().flat_map(circles).collect()
}

/// Returns the module of a file of a crate.
fn module_of(file: &str) -> Module {
    let mut names: Module = file.trim_end_matches(".rs").split('/').map(str::to_string).collect();
    if names.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// Paths in the code of a file, each as a list of names.
struct Code {
    used: Vec<Vec<String>>,
    exported: BTreeMap<String, Vec<String>>,
}

impl Code {
    /// Reads a file up to its tests.
    fn of(text: &str) -> Code {
        let lines = split_rust(text).code;
        let is_tests = |pair: &[String]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ");
        let end = lines.windows(2).position(|pair| is_tests(pair) && pair[1].ends_with('{'));
        let mut rest = lines[..end.unwrap_or(lines.len())].join("\n");
        let (mut used, mut exported) = (Vec::new(), BTreeMap::new());
        while let Some(begin) = find_use(&rest) {
            let length = rest[begin..].find(';').unwrap_or(rest.len() - begin);
            let declaration = &rest[begin + "use ".len()..begin + length];
            let line = rest[..begin].rfind('\n').map_or(0, |at| at + 1);
            let is_exported = rest[line..begin].trim_start().starts_with("pub");
            for path in leaves(declaration) {
                if let Some(name) = path.last().filter(|_| is_exported) {
                    exported.insert(name.clone(), path.clone());
                }
                used.push(path);
            }
            rest.replace_range(line..begin + length, "");
        }
        used.extend(paths_in_code(&rest));
        Code { used, exported }
    }
}

/// Returns the place of the next `use` declaration.
fn find_use(code: &str) -> Option<usize> {
    let is_begin = |at: usize| !code[..at].chars().next_back().is_some_and(is_word);
    code.match_indices("use ").map(|(at, _)| at).find(|&at| is_begin(at))
}

/// Returns the paths of a `use` declaration: `a::{b, c::d}` has `a::b` and `a::c::d`.
fn leaves(declaration: &str) -> Vec<Vec<String>> {
    let declaration = declaration.trim();
    let names = |path: &str| -> Vec<String> {
        let path = path.split(" as ").next().unwrap_or_default();
        path.split("::").map(str::trim).filter(|it| !it.is_empty()).map(str::to_string).collect()
    };
    let Some((head, group)) = declaration.split_once('{') else {
        return if declaration.is_empty() { Vec::new() } else { vec![names(declaration)] };
    };
    let group = &group[..group.rfind('}').unwrap_or(group.len())];
    let mut paths = Vec::new();
    for part in parts(group) {
        for leaf in leaves(part) {
            paths.push(names(head).into_iter().chain(leaf).collect());
        }
    }
    paths
}

/// Splits a group at the commas outside of inner groups.
fn parts(group: &str) -> Vec<&str> {
    let (mut depth, mut begin) = (0, 0);
    let mut found = Vec::new();
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&group[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    found.push(&group[begin..]);
    found
}

/// Returns the paths from `crate`, `self` and `super` in code, without visibilities.
fn paths_in_code(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for root in ["crate::", "self::", "super::"] {
        for (at, _) in code.match_indices(root) {
            let before = &code[..at];
            let is_inner =
                before.ends_with("::") || before.chars().next_back().is_some_and(is_word);
            if is_inner || before.ends_with("(in ") {
                continue;
            }
            let end = code[at..].find(|it: char| !is_word(it) && it != ':');
            let path = &code[at..end.map_or(code.len(), |end| at + end)];
            let names = path.split("::").filter(|name| !name.is_empty());
            paths.push(names.map(str::to_string).collect());
        }
    }
    paths
}

/// Returns the module that has the item of a path in a file of `from`.
fn resolve(
    files: &BTreeMap<Module, (&str, Code)>,
    from: &[String],
    path: &[String],
    depth: usize,
) -> Option<Module> {
    let mut module = from.to_vec();
    let mut names = path.iter().peekable();
    match names.peek()?.as_str() {
        "crate" => module.clear(),
        "self" | "super" => {}
        first if files.contains_key(&[from, &[first.to_string()]].concat()) => {}
        _ => return None,
    }
    names.next_if(|name| matches!(name.as_str(), "crate" | "self"));
    while names.next_if(|name| name.as_str() == "super").is_some() {
        module.pop();
    }
    while let Some(name) = names.peek() {
        let inner = [&module[..], &[(*name).clone()]].concat();
        if !files.contains_key(&inner) {
            break;
        }
        module = inner;
        names.next();
    }
    // Re-exports of re-exports end somewhere; the limit is for code that does not compile.
    const DEPTH_MAX: usize = 8;
    let (_, code) = files.get(&module)?;
    let exported = names.next().and_then(|name| code.exported.get(name));
    match exported.filter(|_| depth < DEPTH_MAX) {
        Some(path) => resolve(files, &module, path, depth + 1).or(Some(module)),
        None => Some(module),
    }
}

/// Returns a violation for each circle of a crate's files.
fn circles(files: &BTreeMap<Module, (&str, Code)>) -> Vec<Violation> {
    let mut needs: BTreeMap<&Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, (_, code)) in files.iter().filter(|(module, _)| !module.is_empty()) {
        let found = code.used.iter().filter_map(|path| resolve(files, module, path, 0));
        needs.insert(module, found.filter(|it| it != module && !it.is_empty()).collect());
    }
    let reached_from = |module: &Module| -> BTreeSet<&Module> {
        let mut open = vec![module];
        let mut reached = BTreeSet::new();
        while let Some(next) = open.pop() {
            for needed in needs.get(next).into_iter().flatten() {
                if reached.insert(needed) {
                    open.push(needed);
                }
            }
        }
        reached
    };
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        needs.keys().map(|&module| (module, reached_from(module))).collect();
    let mut told = BTreeSet::new();
    let mut violations = Vec::new();
    for (module, others) in &reached {
        let is_in_circle = |other: &&&Module| reached[**other].contains(*module);
        let circle: Vec<&Module> = others
            .iter()
            .filter(|other| reached.contains_key(**other))
            .filter(is_in_circle)
            .copied()
            .collect();
        if circle.is_empty() || circle.iter().any(|other| told.contains(*other)) {
            continue;
        }
        let names: Vec<&str> = circle.iter().map(|other| files[*other].0).collect();
        let message = format!(
            "{} files need each other in a circle: {}; move the items that they share into a file \
             that needs none of them",
            names.len(),
            names.join(", ")
        );
        violations.push(Violation::new(files[*module].0, 0, message));
        told.extend(circle);
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the circles of the files of one crate, by names of files.
    fn check_files(files: &[(&str, &str)], expected: &[&[&str]]) {
        let paths: Vec<String> =
            files.iter().map(|(path, _)| format!("{}{path}", CRATES[1])).collect();
        let texts = paths.iter().map(String::as_str).zip(files.iter().map(|(_, text)| *text));
        let found: Vec<String> = check(texts).into_iter().map(|it| it.message).collect();
        let expected: Vec<String> = expected
            .iter()
            .map(|circle| circle.iter().map(|file| format!("{}{file}", CRATES[1])).collect())
            .map(|circle: Vec<String>| circle.join(", "))
            .collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.contains(&format!("circle: {expected};")), "{found}");
        }
    }

    #[test]
    fn files_that_need_each_other() {
        check_files(&[("a.rs", "use crate::b::B;\n"), ("b.rs", "pub struct B;\n")], &[]);
        let circle: &[&[&str]] = &[&["a.rs", "b.rs"]];
        check_files(&[("a.rs", "use crate::b::B;\n"), ("b.rs", "use crate::a;\n")], circle);
        // By a path in code, and by a group.
        let in_code = [("a.rs", "fn f() { crate::b::g() }\n"), ("b.rs", "use crate::{a::f};\n")];
        check_files(&in_code, circle);
        // A test may need anything.
        let tests = "#[cfg(test)]\nmod tests {\n use crate::a::f;\n}\n";
        check_files(&[("a.rs", "use crate::b::B;\n"), ("b.rs", tests)], &[]);
        let three = [
            ("a.rs", "use crate::b::{B, inner::{C}};\n"),
            ("b/mod.rs", "use super::c;\n"),
            ("c.rs", "// crate::b\nuse crate::a;\n"),
        ];
        check_files(&three, &[&["a.rs", "b/mod.rs", "c.rs"]]);
    }

    #[test]
    fn a_facade_is_not_what_it_exports() {
        let facade = ("b/mod.rs", "mod x;\nmod y;\npub use self::x::X;\npub use self::y::Y;\n");
        let files = [facade, ("b/x.rs", "use super::Y;\n"), ("b/y.rs", "pub struct Y;\n")];
        check_files(&files, &[]);
        let files = [facade, ("b/x.rs", "use super::Z;\n"), ("b/y.rs", "pub struct Y;\n")];
        check_files(&files, &[&["b/mod.rs", "b/x.rs"]]);
        let visible = "pub(in super::super) struct Y;\n";
        check_files(&[facade, ("b/y.rs", visible)], &[]);
    }
}
