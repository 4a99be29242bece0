//! Each example of a README compiles as it is printed and runs, as a program of somebody who has
//! that crate alone: of its dependencies only those that the README adds with `cargo add`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// READMEs, and the crate that each is about.
const READMES: [(&str, &str); 16] = [
    ("README.md", "deepwell_trainer"),
    ("deepwell-precision/README.md", "deepwell_precision"),
    ("deepwell-probe/README.md", "deepwell_probe"),
    ("deepwell-ir/README.md", "deepwell_ir"),
    ("deepwell-moe/README.md", "deepwell_moe"),
    ("deepwell-plan/README.md", "deepwell_plan"),
    ("deepwell-plan/lower/README.md", "deepwell_lower"),
    ("deepwell-plan/score/README.md", "deepwell_score"),
    ("deepwell-plan/search/README.md", "deepwell_search"),
    ("deepwell-kernels/README.md", "deepwell_kernels"),
    ("deepwell-ckpt/README.md", "deepwell_ckpt"),
    ("deepwell-trainer/README.md", "deepwell_trainer"),
    ("deepwell-trainer/data/README.md", "deepwell_data"),
    ("deepwell-trainer/metrics/README.md", "deepwell_metrics"),
    ("deepwell-trainer/quantize-file/README.md", "deepwell_quantize_file"),
    ("deepwell-trainer/report/README.md", "deepwell_report"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The code of each Rust block of a page.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        match (&mut open, line) {
            (None, line) if line.starts_with("```rust") => open = Some(String::new()),
            (None, _) => {}
            (Some(_), "```") => blocks.extend(open.take()),
            (Some(code), line) => {
                code.push_str(line);
                code.push('\n');
            }
        }
    }
    blocks
}

/// Crates that a page adds to a project.
fn added(text: &str) -> Vec<String> {
    let commands = text.split("cargo add ").skip(1);
    let words = commands
        .flat_map(|rest| rest.split(['`', '\n']).next().unwrap_or_default().split_whitespace());
    words.map(|name| name.replace('-', "_")).collect()
}

/// The library of each crate as `cargo test --workspace` built it. Where that has just run, nothing
/// is built again.
fn libraries() -> BTreeMap<String, PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root());
    // A test of the topmost crate: it needs the libraries of all. `--workspace`, so that features
    // are those of the whole.
    command.args(["test", "--workspace", "--test", "cli", "--no-run", "--offline"]);
    command.args(["--message-format", "json"]);
    let output = command.output().expect("cargo starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let library = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let target = message.get("target")?;
        let is_library = target["kind"].as_array()?.iter().any(|kind| kind == "lib");
        let is_test = message["profile"]["test"].as_bool()?;
        let mut files = message["filenames"].as_array()?.iter().filter_map(Value::as_str);
        let file = files.find(|file| file.ends_with(".rlib"))?;
        let wanted = is_library && !is_test;
        wanted.then(|| (target["name"].as_str().unwrap_or_default().to_owned(), file.into()))
    };
    text.lines().filter_map(library).collect()
}

#[test]
fn examples_of_readmes_are_programs_of_strangers() {
    let libraries = libraries();
    let folder = tempfile::tempdir().expect("a folder");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    for (readme, name) in READMES {
        let text = std::fs::read_to_string(root().join(readme)).expect("a README");
        let (blocks, added) = (blocks(&text), added(&text));
        assert!(!blocks.is_empty(), "{readme} has no example");
        let usable = [name].into_iter().chain(added.iter().map(String::as_str));
        let usable: BTreeMap<&str, &PathBuf> =
            usable.filter_map(|name| Some((name, libraries.get(name)?))).collect();
        let library = libraries.get(name).unwrap_or_else(|| panic!("{name} was not built"));
        let dependencies = library.parent().expect("a library is in a folder");
        for (index, code) in blocks.iter().enumerate() {
            let what = format!("{readme}, example {}", index + 1);
            assert!(code.contains("fn main()"), "{what} is no program");
            let source = folder.path().join("example.rs");
            let program = folder.path().join("example");
            std::fs::write(&source, code).expect("written");
            let mut command = Command::new(&rustc);
            command.args(["--edition", "2024"]);
            command.arg("-L").arg(format!("dependency={}", dependencies.display()));
            for (name, library) in &usable {
                command.arg("--extern").arg(format!("{name}={}", library.display()));
            }
            let output = command.arg("-o").arg(&program).arg(&source).output();
            let output = output.expect("rustc starts");
            assert!(output.status.success(), "{what}\n{}", String::from_utf8_lossy(&output.stderr));
            let run = Command::new(&program).current_dir(folder.path()).output();
            let run = run.expect("the program starts");
            assert!(run.status.success(), "{what}\n{}", String::from_utf8_lossy(&run.stderr));
        }
    }
}

#[test]
fn blocks_and_commands_of_a_page() {
    let page =
        "`cargo add deepwell-ckpt serde_json`\n\n```rust\nfn main() {}\n```\n```toml\na\n```\n";
    assert_eq!(blocks(page), ["fn main() {}\n"]);
    assert_eq!(added(page), ["deepwell_ckpt", "serde_json"]);
}
