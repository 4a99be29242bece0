//! Tests of kernels on the emulated device, which write their launches.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use xshell::Shell;

use super::build;
use crate::kernels;
use crate::kernels::unit::ARCHITECTURES;

/// Where emulated devices write launches: `<architecture>/<.cu file>/<kernel>-….toml`.
pub(super) const FOLDER: &str = "target/emulate";

/// What of the kernels' tests is run.
pub(super) struct Which<'a> {
    /// One `.cu` file, or all.
    pub(super) kernel: Option<&'a str>,
    /// Instead of the architecture that the table names.
    pub(super) architecture: Option<&'static str>,
}

/// Runs rows of the table in `deepwell-kernels/tests/cuda/emulated.rs`, a test each, and has their
/// launches written; former ones are removed. Of the kernels that `is_mutated` chooses also the
/// other tests run: shapes at the edges take ways that the table's do not.
pub(super) fn run(
    shell: &Shell,
    root: &Path,
    which: &Which<'_>,
    is_mutated: impl Fn(&str) -> bool,
) -> Result<()> {
    compile(root, which.architecture)?;
    let program = build(shell, root, "cuda", ("deepwell-kernels", "test", "cuda"))?;
    for former in recorded(root, which)? {
        fs::remove_dir_all(&former)
            .with_context(|| format!("cannot remove {}", former.display()))?;
    }
    let filter = match which.kernel {
        Some(kernel) => vec![format!("emulated::{kernel}"), "--exact".to_string()],
        None => vec!["emulated::".to_string()],
    };
    eprintln!("running the tests of {}", which.kernel.unwrap_or("all kernels"));
    execute(root, &program, &filter, which.architecture)?;
    for folder in recorded(root, which)? {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let (Some(kernel), Some(architecture)) = (name(&folder), folder.parent().and_then(name))
        else {
            continue;
        };
        if is_mutated(&kernel) {
            eprintln!("running more tests of {kernel} on {architecture}");
            execute(root, &program, &[format!("{kernel}::")], Some(&architecture))?;
        }
    }
    Ok(())
}

/// Runs tests on the device that they name, or on another.
fn execute(
    root: &Path,
    program: &Path,
    filter: &[String],
    architecture: Option<&str>,
) -> Result<()> {
    let mut command = Command::new(program);
    command.current_dir(root).arg("--quiet").args(filter);
    command.env("DEEPWELL_EMULATOR_RECORD", root.join(FOLDER));
    match architecture {
        Some(name) => {
            let short = name.replace('_', "");
            let device = format!("emulated:{}", short.trim_end_matches('a'));
            command.env("DEEPWELL_TEST_DEVICE", device)
        }
        None => command.env_remove("DEEPWELL_TEST_DEVICE"),
    };
    let output = command.output().context("cannot start the tests")?;
    if !output.status.success() {
        bail!(
            "the tests fail on the emulated device:\n{}{}",
            String::from_utf8_lossy(&output.stdout).trim_end(),
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(())
}

/// The folders of launches that there are, one for each `.cu` file and architecture, in order.
pub(super) fn recorded(root: &Path, which: &Which<'_>) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for architecture in folders(&root.join(FOLDER))? {
        if which.architecture.is_none_or(|wanted| architecture.ends_with(wanted)) {
            let kernels = folders(&architecture)?;
            found.extend(
                kernels
                    .into_iter()
                    .filter(|folder| which.kernel.is_none_or(|kernel| folder.ends_with(kernel))),
            );
        }
    }
    Ok(found)
}

fn folders(parent: &Path) -> Result<Vec<PathBuf>> {
    if !parent.is_dir() {
        return Ok(Vec::new());
    }
    let entries =
        fs::read_dir(parent).with_context(|| format!("cannot list {}", parent.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut folders: Vec<_> = paths.into_iter().filter(|path| path.is_dir()).collect();
    folders.sort();
    Ok(folders)
}

/// The PTX of all kernels: tests of one launch others.
fn compile(root: &Path, architecture: Option<&'static str>) -> Result<()> {
    let options = kernels::Options {
        architectures: architecture.map_or_else(|| ARCHITECTURES.to_vec(), |one| vec![one]),
        ptx_only: true,
        ..kernels::Options::default()
    };
    let manifest = kernels::build(root, &options)?;
    match manifest.failed.first() {
        Some(failed) => bail!("{}.cu does not compile: {}", failed.stem, failed.message),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_what_was_asked_for() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["sm_100a/add", "sm_100a/gelu", "sm_90a/add", "sm_90a/wgmma_gemm"] {
            fs::create_dir_all(root.path().join(FOLDER).join(folder)).unwrap();
        }
        fs::write(root.path().join(FOLDER).join("sm_90a/a.toml"), "").unwrap();
        let check = |kernel, architecture, expected: &[&str]| {
            let found = recorded(root.path(), &Which { kernel, architecture }).unwrap();
            let expected: Vec<PathBuf> =
                expected.iter().map(|folder| root.path().join(FOLDER).join(folder)).collect();
            assert_eq!(found, expected, "{kernel:?} {architecture:?}");
        };
        let all = ["sm_100a/add", "sm_100a/gelu", "sm_90a/add", "sm_90a/wgmma_gemm"];
        check(None, None, &all);
        check(None, Some("sm_90a"), &all[2..]);
        check(Some("add"), None, &["sm_100a/add", "sm_90a/add"]);
        check(Some("add"), Some("sm_90a"), &["sm_90a/add"]);
        check(Some("gemm"), None, &[]);
        let empty = tempfile::tempdir().unwrap();
        let none = Which { kernel: None, architecture: None };
        assert_eq!(recorded(empty.path(), &none).unwrap(), Vec::<PathBuf>::new());
    }
}
