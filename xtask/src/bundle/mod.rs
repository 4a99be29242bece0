//! `cargo xtask bundle`: one folder for tests, comparisons, measurements and training on a GPU
//! machine without Rust and nvcc.

mod archive;
mod contents;
mod corpus;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use serde_json::json;
use xshell::{Shell, cmd};

use crate::arguments::{Takes, flags};
use crate::kernels::manifest::{Manifest, grouped};
use crate::process::cargo;
use crate::{cargo_messages, deepwell, kernels};

const HELP: &str = "\
Make one folder for a GPU machine without Rust and nvcc

Usage: cargo xtask bundle [FLAGS]

Flags:
  --out DIR     where to [default: target/bundle]; a former bundle there is replaced
  --arch LIST   kernels for these architectures [default: sm_90a]

It holds the release command `deepwell`, the tests that want a GPU, the compiled kernels, a corpus
and run.sh, which starts them. It exits with 1 if they have more than 64 MB together.
";

const RUN_SCRIPT: &str = include_str!("run.sh");

/// Marks a folder as a bundle, which may be replaced.
const MARK: &str = "bundle.json";

/// Packages with an integration test `cuda` for GPUs, each with its folder.
const TESTED: [(&str, &str); 3] = [
    ("deepwell-kernels", "deepwell-kernels"),
    ("deepwell-trainer", "deepwell-trainer"),
    ("deepwell-cli", "deepwell-trainer/cli"),
];

pub(crate) fn run(shell: &Shell, root: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = root.join("target/bundle");
    let mut architectures = Vec::new();
    for (flag, value) in
        flags("bundle", arguments, &[("--out", Takes::Value), ("--arch", Takes::Value)])?
    {
        match flag {
            "--out" => out = root.join(value),
            _ => architectures.extend(kernels::architectures(&value)?),
        }
    }
    if architectures.is_empty() {
        architectures.push("sm_90a");
    }
    check_replaceable(&out)?;

    // The fastest step comes first, so that errors show early.
    let options = kernels::Options { architectures, ..kernels::Options::default() };
    let manifest = kernels::build(root, &options)?;
    if let Some(failed) = manifest.failed.first() {
        bail!(
            "{} kernels failed, the first is {}.cu: {}\n\
             hint: `cargo xtask kernels` shows all",
            manifest.failed.len(),
            failed.stem,
            failed.message
        );
    }
    let partial = beside(&out, "partial")?;
    let stage = beside(&out, "stage")?;
    let made = fill(shell, root, &partial, &stage, &manifest);
    // The staged files are not needed any more, in case of success and of failure.
    let _ = fs::remove_dir_all(&stage);
    if made.is_err() {
        let _ = fs::remove_dir_all(&partial);
    }
    made?;
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot replace {}", out.display()))?;
    }
    fs::rename(&partial, &out).with_context(|| format!("cannot make {}", out.display()))?;
    let shown = out.strip_prefix(root).unwrap_or(&out);
    eprintln!("made {}; there: `./run.sh test`", shown.display());
    Ok(ExitCode::SUCCESS)
}

/// Checks that `out` is absent, empty or a bundle: nothing else is replaced.
fn check_replaceable(out: &Path) -> Result<()> {
    if !out.exists() || out.join(MARK).is_file() {
        return Ok(());
    }
    if out.is_dir() && fs::read_dir(out)?.next().is_none() {
        return Ok(());
    }
    bail!(
        "{} is there and is no bundle; it stays as it is\n\
         hint: name another folder with `--out`",
        out.display()
    )
}

/// Makes a new folder next to `out`, for unfinished files.
fn beside(out: &Path, what: &str) -> Result<PathBuf> {
    let name = out.file_name().context("`--out` names a folder")?.to_string_lossy();
    let folder = out.with_file_name(format!(".{name}.{what}.{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Writes all files of the bundle to `bundle` and checks the total size.
fn fill(
    shell: &Shell,
    root: &Path,
    bundle: &Path,
    stage: &Path,
    manifest: &Manifest,
) -> Result<()> {
    // Packing reduces programs and kernels to a third of their size; `run.sh` unpacks them.
    copy_kernels(root, stage, manifest)?;
    archive::pack(stage, "kernels", &bundle.join("kernels.tar.gz"))?;
    eprintln!("packing the corpus");
    // Also fetches the locked packages, the sources of the corpus.
    let binary = deepwell::build(shell, root)?;
    let packed = corpus::pack(shell, root, &binary, stage, &bundle.join("corpus.tar.gz"))?;
    let command = stage.join("command");
    fs::create_dir_all(&command)?;
    strip(&binary, &command.join("deepwell"))?;
    archive::pack(stage, "command", &bundle.join("command.tar.gz"))?;
    let tests = stage.join("tests");
    fs::create_dir_all(&tests)?;
    for (package, program) in build_tests(shell, root)? {
        strip(&program, &tests.join(package))?;
    }
    archive::pack(stage, "tests", &bundle.join("tests.tar.gz"))?;
    write_script(&bundle.join("run.sh"))?;

    let files = contents::list(bundle)?;
    let architectures: Vec<_> =
        manifest.compiled.iter().map(|compiled| compiled.architecture.clone()).collect();
    let about = json!({
        "version": 1,
        "commit": command_line(shell, "git describe --always --dirty --abbrev=12"),
        "compiler": command_line(shell, "rustc --version"),
        "nvcc": manifest.compiler,
        "architectures": unique(architectures),
        "corpus": {"files": packed.files, "text_bytes": packed.text_bytes},
        "files": contents::to_json(&files),
    });
    fs::write(bundle.join(MARK), format!("{about:#}\n"))?;
    let files = contents::list(bundle)?;
    print!("{}", contents::table(&files));
    println!(
        "corpus: {} bytes of text in {} files",
        grouped(packed.text_bytes),
        grouped(packed.files as u64)
    );
    contents::check_size(&files)
}

fn unique(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names.dedup();
    names
}

/// Returns the output of a program, for the record; `None` if the program cannot run.
fn command_line(shell: &Shell, line: &str) -> Option<String> {
    let mut words = line.split(' ');
    let program = words.next()?;
    let words: Vec<_> = words.collect();
    cmd!(shell, "{program} {words...}").quiet().ignore_stderr().read().ok()
}

fn copy_kernels(root: &Path, stage: &Path, manifest: &Manifest) -> Result<()> {
    let target = stage.join("kernels");
    for compiled in &manifest.compiled {
        let folder = target.join(&compiled.architecture);
        fs::create_dir_all(&folder)?;
        let name = format!("{}.cubin", compiled.stem);
        let source = kernels::folder(root).join(&compiled.architecture).join(&name);
        fs::copy(&source, folder.join(&name))
            .with_context(|| format!("cannot copy {}", source.display()))?;
    }
    fs::write(target.join("manifest.json"), format!("{:#}\n", manifest.to_json()))?;
    Ok(())
}

/// Builds the integration tests `cuda` in a single cargo call, so that shared crates are built
/// once, and returns the path of each test.
fn build_tests(shell: &Shell, root: &Path) -> Result<Vec<(&'static str, PathBuf)>> {
    let cargo = cargo();
    let mut packages = Vec::new();
    let mut arguments = Vec::new();
    for (package, folder) in TESTED {
        let folder = root.join(folder);
        arguments.extend(["--package".to_string(), package.to_string()]);
        arguments.extend(["--features".to_string(), format!("{package}/cuda")]);
        packages.push((package, folder));
    }
    let messages = cmd!(
        shell,
        "{cargo} test --release --no-run {arguments...} --test cuda
         --message-format json-render-diagnostics"
    )
    .quiet()
    .read()
    .context("the tests do not build; cargo's message is above")?;
    packages
        .into_iter()
        .map(|(package, folder)| {
            let program = cargo_messages::executable(&messages, &folder, "test", "cuda");
            let program = program.with_context(|| {
                format!("cargo built the tests of `{package}` and did not say where")
            })?;
            Ok((package, program))
        })
        .collect()
}

/// Copies a program without its symbols.
fn strip(program: &Path, target: &Path) -> Result<()> {
    let status = Command::new("strip")
        .arg("--strip-all")
        .arg("-o")
        .args([target, program])
        .status()
        .context("cannot start `strip`\nhint: it comes with binutils, as the linker does")?;
    if !status.success() {
        bail!("`strip` failed on {}", program.display());
    }
    Ok(())
}

#[cfg(unix)]
fn write_script(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;

    fs::write(path, RUN_SCRIPT)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[cfg(not(unix))]
fn write_script(path: &Path) -> Result<()> {
    Ok(fs::write(path, RUN_SCRIPT)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bundle_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let check = |name: &str, files: &[&str], expected: bool| {
            let out = folder.path().join(name);
            fs::create_dir(&out).unwrap();
            for file in files {
                fs::write(out.join(file), "x").unwrap();
            }
            assert_eq!(check_replaceable(&out).is_ok(), expected, "{name}");
        };
        check("empty", &[], true);
        check("bundle", &[MARK, "deepwell"], true);
        check("other", &["thesis.tex"], false);
        assert!(check_replaceable(&folder.path().join("absent")).is_ok());
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        assert!(check_replaceable(&file).is_err());
    }
}
