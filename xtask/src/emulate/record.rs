//! Runs kernel tests on the emulated device and records the launches.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use xshell::Shell;

use super::build;
use crate::kernels;
use crate::kernels::unit::{ARCHITECTURES, NOT_RUN};

/// Folder of recorded launches: `<architecture>/<.cu file>/<kernel>-….toml`. A passed row of the
/// table leaves `<architecture>/<row>.passed`, a row with a valid proof `<row>.proven`.
pub(super) const FOLDER: &str = "target/emulate";

/// Prefix of the names of rows.
const ROW: &str = "emulated::";
/// Makes rows of the table write launches.
const ROWS_VARIABLE: &str = "DEEPWELL_TEST_RECORD";
/// Makes every emulated device write launches.
const LAUNCHES_VARIABLE: &str = "DEEPWELL_EMULATOR_RECORD";
/// Chooses the proven rows that run again; `all` for all.
pub(super) const DRAW_VARIABLE: &str = "DEEPWELL_PROOF_DRAW";

/// The selected kernel tests.
pub(super) struct Which<'a> {
    /// One `.cu` file, or all.
    pub(super) kernel: Option<&'a str>,
    /// Overrides the architecture in the table.
    pub(super) architecture: Option<&'static str>,
    /// Whether rows that were proven before are left out.
    pub(super) unproven: bool,
}

/// Marks of a row that passed, and of a row with a valid proof.
pub(super) const PASSED: &str = "passed";
pub(super) const PROVEN: &str = "proven";

/// Runs rows of the table in `deepwell-kernels/tests/cuda/emulated.rs`, one test per row, and
/// records launches. Earlier launches are removed, unless the launches of all rows come from the
/// current tests and PTX (in `.ci/run`, `cargo test` writes them). For kernels selected by
/// `is_mutated`, all other tests run too: edge shapes take code paths that the table's shapes do
/// not.
pub(super) fn run(
    shell: &Shell,
    root: &Path,
    which: &Which<'_>,
    is_mutated: impl Fn(&str) -> bool,
) -> Result<()> {
    compile(root, which.architecture)?;
    let program = build(shell, root, "cuda", ("deepwell-kernels", "test", "cuda"))?;
    if which.kernel.is_none() && which.architecture.is_none() && is_recorded(root, &program, which)?
    {
        eprintln!("taking the launches of the last `cargo test`");
    } else {
        remove_former(root, which)?;
        let filter = match which.kernel {
            Some(kernel) => vec![format!("{ROW}{kernel}"), "--exact".to_string()],
            None => vec![ROW.to_string()],
        };
        eprintln!("running the tests of {}", which.kernel.unwrap_or("all kernels"));
        execute(root, &program, &filter, which, ROWS_VARIABLE)?;
    }
    let folders = recorded(root, which)?;
    for (architecture, kernels) in by_architecture(&folders, is_mutated) {
        eprintln!("running more tests on {architecture}: {}", kernels.join(", "));
        // A single process runs each test once, on all cores.
        let filter: Vec<String> = kernels.iter().map(|kernel| format!("{kernel}::")).collect();
        let which = Which { architecture: Some(architecture), ..*which };
        execute(root, &program, &filter, &which, LAUNCHES_VARIABLE)?;
    }
    Ok(())
}

/// Removes launches and marks of tests that are about to run.
fn remove_former(root: &Path, which: &Which<'_>) -> Result<()> {
    let every = Which { unproven: false, ..*which };
    for former in recorded(root, &every)? {
        fs::remove_dir_all(&former)
            .with_context(|| format!("cannot remove {}", former.display()))?;
    }
    for architecture in folders(&root.join(FOLDER))? {
        for mark in entries(&architecture)? {
            let is_mark = mark.extension().is_some_and(|kind| kind == PASSED || kind == PROVEN);
            let is_asked_for =
                which.kernel.is_none_or(|kernel| mark.file_stem() == Some(kernel.as_ref()));
            if is_mark && is_asked_for {
                fs::remove_file(&mark)
                    .with_context(|| format!("cannot remove {}", mark.display()))?;
            }
        }
    }
    Ok(())
}

/// Groups the `.cu` files selected by `is_mutated` by architecture; `folders` are folders of
/// launches.
fn by_architecture(
    folders: &[PathBuf],
    is_mutated: impl Fn(&str) -> bool,
) -> BTreeMap<&'static str, Vec<&str>> {
    let mut found = BTreeMap::<&'static str, Vec<&str>>::new();
    for folder in folders {
        let mut names = folder.iter().rev().filter_map(|name| name.to_str());
        let (Some(kernel), Some(name)) = (names.next(), names.next()) else { continue };
        let architecture = ARCHITECTURES.into_iter().find(|known| *known == name);
        if let Some(architecture) = architecture.filter(|_| is_mutated(kernel)) {
            found.entry(architecture).or_default().push(kernel);
        }
    }
    found
}

/// Whether the launches of all rows, on the architectures of the table, are up to date: each row
/// passed after the tests and the PTX were built, or has a valid proof if proofs are accepted.
fn is_recorded(root: &Path, program: &Path, which: &Which<'_>) -> Result<bool> {
    let list = Command::new(program).current_dir(root).args(["--list", ROW]).output();
    let list = list.context("cannot start the tests")?;
    let list = String::from_utf8_lossy(&list.stdout);
    // The test that checks the table has no launches.
    let rows = list.lines().filter_map(|line| line.strip_prefix(ROW)?.strip_suffix(": test"));
    let rows: Vec<&str> = rows.filter(|row| *row != "every_file_has_a_row").collect();
    let mut newest = time_of(program)?;
    for path in folders(&kernels::folder(root))?.iter().map(|folder| entries(folder)) {
        for path in path?.iter().filter(|path| path.extension().is_some_and(|is| is == "ptx")) {
            newest = newest.max(time_of(path)?);
        }
    }
    let marks: &[&str] = if which.unproven { &[PASSED, PROVEN] } else { &[PASSED] };
    is_passed(root, &rows, marks, newest)
}

/// Whether each row has left one of these marks since `newest`, on any architecture.
fn is_passed(root: &Path, rows: &[&str], marks: &[&str], newest: SystemTime) -> Result<bool> {
    let architectures = folders(&root.join(FOLDER))?;
    let passed = |row: &str| {
        let files = architectures.iter().map(|folder| folder.join(row));
        let mut files =
            files.flat_map(|file| marks.iter().map(move |mark| file.with_extension(mark)));
        files.any(|mark| time_of(&mark).is_ok_and(|time| time > newest))
    };
    Ok(!rows.is_empty() && rows.iter().all(|row| passed(row)))
}

fn time_of(path: &Path) -> Result<SystemTime> {
    let time = fs::metadata(path).and_then(|about| about.modified());
    time.with_context(|| format!("cannot read when {} was written", path.display()))
}

/// Runs tests on the device that they name, or on the device of `architecture`; the environment
/// variable `variable` sets the folder for launches.
fn execute(
    root: &Path,
    program: &Path,
    filter: &[String],
    which: &Which<'_>,
    variable: &str,
) -> Result<()> {
    let mut command = Command::new(program);
    command.current_dir(root).arg("--quiet").args(filter);
    command.env(variable, root.join(FOLDER));
    if !which.unproven {
        command.env(DRAW_VARIABLE, "all");
    }
    match which.architecture {
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

/// The folders of recorded launches, one per `.cu` file and architecture, sorted. Folders of rows
/// with a valid proof are left out if proofs are accepted.
pub(super) fn recorded(root: &Path, which: &Which<'_>) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for architecture in folders(&root.join(FOLDER))? {
        if which.architecture.is_none_or(|wanted| architecture.ends_with(wanted)) {
            let kernels = folders(&architecture)?;
            let is_asked_for = |folder: &PathBuf| {
                let is_proven = which.unproven && folder.with_extension(PROVEN).exists();
                !is_proven && which.kernel.is_none_or(|kernel| folder.ends_with(kernel))
            };
            found.extend(kernels.into_iter().filter(is_asked_for));
        }
    }
    Ok(found)
}

pub(super) fn folders(parent: &Path) -> Result<Vec<PathBuf>> {
    if !parent.is_dir() {
        return Ok(Vec::new());
    }
    let mut folders = entries(parent)?;
    folders.retain(|path| path.is_dir());
    folders.sort();
    Ok(folders)
}

pub(super) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// Compiles the PTX of all kernels that tests run: the tests of a kernel launch other kernels.
fn compile(root: &Path, architecture: Option<&'static str>) -> Result<()> {
    let all = || ARCHITECTURES.into_iter().filter(|name| !NOT_RUN.contains(name)).collect();
    let options = kernels::Options {
        architectures: architecture.map_or_else(all, |one| vec![one]),
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn rows_that_passed_since_the_tests_were_made() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDER);
        let second = Duration::from_secs(1);
        let made = SystemTime::UNIX_EPOCH + 1000 * second;
        let mark = |name: &str, time: SystemTime| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = fs::File::create(&path).unwrap();
            file.set_modified(time).unwrap();
        };
        mark("sm_100a/add.passed", made + second);
        mark("sm_90a/wgmma_gemm.passed", made + second);
        mark("sm_90a/add.passed", made - second);
        mark("sm_90a/gelu.passed", made - second);
        mark("sm_90a/cast.passed", made);
        mark("sm_90a/rope.proven", made + second);
        let check = |rows: &[&str], expected: bool| {
            let passed = is_passed(root.path(), rows, &[PASSED], made).unwrap();
            assert_eq!(passed, expected, "{rows:?}");
        };
        check(&["add"], true);
        check(&["add", "wgmma_gemm"], true);
        check(&["add", "gelu"], false);
        check(&["cast"], false);
        check(&["add", "rope"], false);
        check(&[], false);
        assert!(is_passed(root.path(), &["add", "rope"], &[PASSED, PROVEN], made).unwrap());
    }

    #[test]
    fn folders_of_what_was_asked_for() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["sm_100a/add", "sm_100a/gelu", "sm_90a/add", "sm_90a/wgmma_gemm"] {
            fs::create_dir_all(root.path().join(FOLDER).join(folder)).unwrap();
        }
        fs::write(root.path().join(FOLDER).join("sm_90a/a.toml"), "").unwrap();
        let which = |kernel, architecture| Which { kernel, architecture, unproven: false };
        let check = |kernel, architecture, expected: &[&str]| {
            let found = recorded(root.path(), &which(kernel, architecture)).unwrap();
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
        let found = recorded(root.path(), &which(None, None)).unwrap();
        let chosen = by_architecture(&found, |kernel| kernel != "gelu");
        let expected = [("sm_100a", vec!["add"]), ("sm_90a", vec!["add", "wgmma_gemm"])];
        assert_eq!(chosen, BTreeMap::from(expected));
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(recorded(empty.path(), &which(None, None)).unwrap(), Vec::<PathBuf>::new());
        fs::write(root.path().join(FOLDER).join("sm_100a/gelu.proven"), "").unwrap();
        let unproven = Which { unproven: true, ..which(None, Some("sm_100a")) };
        let found = recorded(root.path(), &unproven).unwrap();
        assert_eq!(found, [root.path().join(FOLDER).join("sm_100a/add")]);
    }
}
