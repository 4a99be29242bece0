//! Rules about packages: allowed dependencies, and required files and keys.

use std::path::Path;

use anyhow::Result;

use super::Violation;
use crate::packages::{Package, packages};
use crate::source::read;

/// The layers of crates: a crate depends on crates of lower layers only.
const LAYERS: [(&str, usize); 23] = [
    ("deepwell-precision", 1),
    ("deepwell-emulator", 1),
    ("deepwell-trials", 1),
    ("deepwell-probe", 1),
    ("deepwell-metrics", 1),
    ("deepwell-report", 1),
    ("deepwell-runs", 2),
    ("deepwell-ir", 2),
    ("deepwell-moe", 3),
    ("deepwell-ckpt", 3),
    ("deepwell-data", 3),
    ("deepwell-lower", 4),
    ("deepwell-kernels", 4),
    ("deepwell-quantize-file", 4),
    ("deepwell-search", 5),
    ("deepwell-capi", 5),
    ("deepwell-score", 6),
    ("deepwell-plan", 6),
    ("deepwell-audit", 7),
    ("deepwell-trainer", 8),
    ("deepwell-bench", 9),
    ("deepwell-engine", 9),
    ("deepwell-cli", 10),
];

/// External crates reserved to a single crate, with an alternative for the rest.
const RESERVED: [(&str, &str, &str); 4] = [
    ("mpi", "deepwell-kernels", "use the `Comm` of deepwell-kernels"),
    ("cudarc", "deepwell-kernels", "use the `Driver` of deepwell-kernels"),
    ("nvml-wrapper", "deepwell-probe", "use `deepwell_probe::probe()`"),
    ("nvml-wrapper-sys", "deepwell-probe", "use `deepwell_probe::probe()`"),
];

/// Required files in the root of the repository.
const ROOT_FILES: [&str; 7] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "deny.toml",
];

/// Files that the archive of a published crate contains.
const ARCHIVED: [(&str, &str); 3] = [
    ("LICENSE-MIT", "missing; link it to the one in the root"),
    ("LICENSE-APACHE", "missing; link it to the one in the root"),
    ("CHANGELOG.md", "missing; list the changes of the crate since its last version"),
];

/// Keys that crates.io shows in addition to description and license; each may be inherited from the
/// workspace.
const SHOWN_KEYS: [&str; 6] =
    ["readme", "repository", "rust-version", "keywords", "categories", "edition"];

pub(crate) fn check(root: &Path) -> Result<Vec<Violation>> {
    let mut violations = Vec::new();
    for file in ROOT_FILES {
        if !root.join(file).is_file() {
            violations.push(Violation::new(file, 0, "missing; write it"));
        }
    }
    for package in packages(root)? {
        let folder = package.folder.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
        violations.extend(check_package(&package, &folder));
        if !package.folder.join("README.md").is_file() {
            let path = format!("{folder}/README.md");
            violations.push(Violation::new(&path, 0, "missing; say what the crate is for"));
        }
        if package.is_published {
            for (file, message) in ARCHIVED {
                if !package.folder.join(file).is_file() {
                    violations.push(Violation::new(&format!("{folder}/{file}"), 0, message));
                }
            }
        }
        let library = package.folder.join("src/lib.rs");
        if library.is_file() {
            let path = format!("{folder}/src/lib.rs");
            violations.extend(check_crate_docs(&package, &path, &read(&library)?));
        }
    }
    Ok(violations)
}

fn check_package(package: &Package, folder: &str) -> Vec<Violation> {
    let path = format!("{folder}/Cargo.toml");
    let mut violations = Vec::new();
    let mut report = |line, message: String| violations.push(Violation::new(&path, line, message));
    let layer_of =
        |name: &str| LAYERS.iter().find(|(known, _)| *known == name).map(|entry| entry.1);

    let is_xtask = package.name == "xtask";
    let layer = layer_of(&package.name);
    if layer.is_none() && !is_xtask {
        report(0, "a crate in no layer; give it one in xtask/src/tidy/manifests.rs".to_string());
    }
    for dependency in &package.dependencies {
        let name = &dependency.name;
        if name.starts_with("deepwell") && is_xtask {
            let message = format!("xtask uses `{name}`; run the `deepwell` binary instead");
            report(dependency.line, message);
        } else if let (Some(own), Some(other)) = (layer, layer_of(name))
            && other >= own
        {
            report(
                dependency.line,
                format!(
                    "`{}` in layer {own} uses `{name}` in layer {other}; move the shared part to \
                     a lower layer",
                    package.name
                ),
            );
        }
        for (reserved, owner, way) in RESERVED {
            if name == reserved && package.name != owner {
                report(dependency.line, format!("only `{owner}` may use `{name}`; {way}"));
            }
        }
    }

    let has = |key: &str| package.keys.iter().any(|own| own == key);
    if !has("description") {
        report(0, "no `description`; say in one line what the crate is for".to_string());
    }
    if !has("license") && !has("license.workspace") {
        report(0, "no license; add `license.workspace = true`".to_string());
    }
    if !has("version") {
        report(0, "no version of its own; add `version = \"0.1.0\"`".to_string());
    }
    for key in SHOWN_KEYS {
        if package.is_published && !has(key) && !has(&format!("{key}.workspace")) {
            report(0, format!("no `{key}`; crates.io shows it"));
        }
    }
    if !package.has_workspace_lints {
        report(0, "no lints; add `[lints]` with `workspace = true`".to_string());
    }
    violations
}

/// Checks that the crate's docs have an example and a table row for each feature.
fn check_crate_docs(package: &Package, path: &str, text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    if !has_example(text) {
        let message = "no example in the crate's docs; add a fenced one to the `//!` lines";
        violations.push(Violation::new(path, 1, message));
    }
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("//! |")).collect();
    for feature in &package.features {
        if !rows.iter().any(|row| row.starts_with(&format!("//! | `{feature}` |"))) {
            let message =
                format!("feature `{feature}` is in no table of the crate's docs; add a row");
            violations.push(Violation::new(path, 1, message));
        }
    }
    violations
}

/// Whether the crate's docs, the `//!` lines, contain a fenced block.
fn has_example(text: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with("//! ```"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::packages::parse_package;

    #[test]
    fn packages_that_break_a_rule() {
        let check = |name: &str, rest: &str, expected: &[&str]| {
            let text = format!(
                "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\ndescription = \"x\"\n\
                 license.workspace = true\npublish = false\n[lints]\nworkspace = true\n{rest}"
            );
            let violations =
                check_package(&parse_package(&text, PathBuf::new()).expect("TOML"), "f");
            let messages: Vec<_> = violations.iter().map(ToString::to_string).collect();
            assert_eq!(messages.len(), expected.len(), "{messages:?}");
            for (message, expected) in messages.iter().zip(expected) {
                assert!(message.contains(expected), "expected `{expected}` in `{message}`");
            }
        };
        let dependency = |name: &str| format!("[dependencies]\n{name}.workspace = true\n");
        check("deepwell-ir", &dependency("deepwell-precision"), &[]);
        check("deepwell-ir", &dependency("serde"), &[]);
        check(
            "deepwell-moe",
            &dependency("deepwell-ckpt"),
            &["f/Cargo.toml:10: `deepwell-moe` in layer 3 uses `deepwell-ckpt` in layer 3"],
        );
        check("deepwell-plan", &dependency("deepwell-trainer"), &["uses `deepwell-trainer`"]);
        check(
            "deepwell-moe",
            "[dev-dependencies]\ndeepwell-kernels = { path = \"x\" }\n",
            &["`deepwell-moe` in layer 3 uses `deepwell-kernels` in layer 4"],
        );
        check("deepwell-kernels", &dependency("cudarc"), &[]);
        check("deepwell-ir", &dependency("cudarc"), &["only `deepwell-kernels` may use `cudarc`"]);
        check("deepwell-plan", &dependency("nvml-wrapper"), &["only `deepwell-probe`"]);
        check("xtask", &dependency("anyhow"), &[]);
        check("xtask", &dependency("deepwell-ir"), &["xtask uses `deepwell-ir`"]);
        check("deepwell-new", "", &["a crate in no layer"]);
    }

    #[test]
    fn packages_that_lack_something() {
        let text = "[package]\nname = \"deepwell-ir\"\nversion.workspace = true\n";
        let violations = check_package(&parse_package(text, PathBuf::new()).expect("TOML"), "f");
        let messages: Vec<_> = violations.iter().map(ToString::to_string).collect();
        let expected = [
            "no `description`",
            "no license",
            "no version of its own",
            "no `readme`",
            "no `repository`",
            "no `rust-version`",
            "no `keywords`",
            "no `categories`",
            "no `edition`",
            "no lints",
        ];
        assert_eq!(messages.len(), expected.len());
        for (message, expected) in messages.iter().zip(expected) {
            assert!(message.contains(expected), "expected `{expected}` in `{message}`");
        }
    }

    #[test]
    fn features_in_crate_docs() {
        let text = "[features]\ndefault = []\ncuda = []\n";
        let package = parse_package(text, PathBuf::new()).expect("TOML");
        let docs = "//! ```\n//! f();\n//! ```\n//! | `cuda` | GPUs |\n";
        assert_eq!(check_crate_docs(&package, "f", docs), []);
        let found = check_crate_docs(&package, "f", "//! | `cpu` | all |\nfn f() {}\n");
        assert!(found[0].to_string().contains("no example"), "{found:?}");
        assert!(found[1].to_string().contains("feature `cuda` is in no table"), "{found:?}");
    }

    #[test]
    fn examples_in_crate_docs() {
        assert!(has_example("//! Text.\n//!\n//! ```\n//! f();\n//! ```\n"));
        assert!(!has_example("//! Text.\n/// ```\n/// f();\n/// ```\nfn f() {}\n"));
    }
}
