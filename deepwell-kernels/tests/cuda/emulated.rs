//! Every kernel on the emulator, in every test run: correct and race-free.
//!
//! A row for each `.cu` file of `src/ops/`, made by `emulated!` in `tests/` of its op; its test is
//! `emulated::<file>`. It runs all of the file's kernels at shapes that give each of four SMs, with
//! one CTA each, three tiles or more, and that use every stage of a pipeline more than once; a
//! kernel that was not launched on all four fails the row, and so does a file without one. Shapes
//! at the edges, and hard numbers, are what the other tests are for.
//!
//! `DEEPWELL_TEST_DEVICE` names another architecture than the row's; rows of files that are not
//! compiled for it are skipped. `DEEPWELL_TEST_RECORD` names a folder that gets the launches of
//! rows, and of no other test, and of each row that passed a file `<architecture>/<file>.passed`
//! with its proof: `cargo xtask emulate` takes them. A row that was proven before does not run, see
//! `proofs.rs`, and leaves `<file>.proven`. `harness.rs` lists the variables that choose other ways
//! to run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use deepwell_kernels::cuda::{Architecture, LaunchOutcome};
use deepwell_trials::{inventory, skip};

use crate::device::{emulate, emulated_architecture};
use crate::harness::Gpu;
use crate::{proofs, ptx};

/// SMs of the emulated device.
const SM_COUNT: u32 = 4;
/// Kernels whose work is that of one CTA, whatever the shapes.
const OF_ONE_CTA: [&str; 3] = ["adamw_coefficients", "norm_of_sums", "selection_bias_update"];

/// Names a folder for the launches of rows.
const RECORD_VARIABLE: &str = "DEEPWELL_TEST_RECORD";

/// A `.cu` file with a row.
pub(crate) struct Row(pub(crate) &'static str);

inventory::collect!(Row);

/// The kernels' sources by name without `.cu`; a test that runs without them is skipped.
fn sources() -> BTreeMap<String, PathBuf> {
    let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    if !ops.is_dir() {
        skip(format!("{} is not there", ops.display()));
    }
    let listed = |folder: PathBuf| {
        let files = fs::read_dir(folder).expect("a readable folder");
        files.map(|file| file.expect("a readable folder").path())
    };
    let files = listed(ops).filter(|path| path.is_dir()).flat_map(listed);
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_string(), path)))
        .collect()
}

/// Whether the head of a source names an architecture.
fn is_for(source: &Path, architecture: Architecture) -> bool {
    let text = fs::read_to_string(source).unwrap_or_else(|error| panic!("{source:?}: {error}"));
    let named = text.lines().find_map(|line| line.strip_prefix("// architectures:"));
    named.is_some_and(|names| names.split_whitespace().any(|name| name == architecture.name()))
}

pub(crate) fn run(file: &str, preferred: Architecture, check: impl Fn(&mut Gpu)) {
    let architecture = emulated_architecture().unwrap_or(preferred);
    let sources = sources();
    let source = sources.get(file).unwrap_or_else(|| panic!("no op has a kernel {file}.cu"));
    if !is_for(source, architecture) {
        skip(format!("{file} is not for {}", architecture.name()));
    }
    let text = ptx::of_file(file, architecture).unwrap_or_else(|reason| skip(reason));
    let record = std::env::var_os(RECORD_VARIABLE).filter(|folder| !folder.is_empty());
    let record = record.map(PathBuf::from);
    if proofs::is_proven(file, architecture, &sources) {
        if let Some(folder) = &record {
            let mark = folder.join(architecture.name()).join(file);
            write(&mark.with_extension("proven"), "");
        }
        skip("proven: its kernels, its code and the emulator are those that passed");
    }
    let mut emulated = emulate(architecture, 1, record.as_deref());
    check(&mut emulated.gpu);

    let entries: BTreeSet<&str> = proofs::kernels(&text).collect();
    assert!(!entries.is_empty(), "no kernel in the PTX of {file}");
    let launches = emulated.launches.read();
    for entry in entries {
        let ctas = launches
            .iter()
            .filter(|launch| launch.kernel == entry && launch.verdict == LaunchOutcome::Clean)
            .map(|launch| launch.grid.iter().product::<u32>())
            .max();
        let expected = if OF_ONE_CTA.contains(&entry) { 1 } else { SM_COUNT };
        assert!(
            ctas.is_some_and(|ctas| ctas >= expected),
            "expected a launch of `{entry}` on {expected} SMs, got one of {} blocks \
             at most",
            ctas.unwrap_or(0)
        );
    }
    if let Some(folder) = record {
        let launched = launches.iter().map(|launch| launch.kernel.clone()).collect();
        let proof = proofs::entry(architecture, &launched, &sources);
        let proof = proof.map(|proof| proof.to_string()).unwrap_or_default();
        let mark = folder.join(architecture.name()).join(file);
        write(&mark.with_extension("passed"), &proof);
    }
}

fn write(path: &Path, text: &str) {
    let folder = path.parent().expect("a file is in a folder");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, text))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

trial!(every_file_has_a_row);
fn every_file_has_a_row() {
    let stems: BTreeSet<String> = sources().into_keys().collect();
    let rows = inventory::iter::<Row>.into_iter().map(|row| row.0.to_string());
    let rows: BTreeSet<String> = rows.collect();
    let without: Vec<&String> = stems.difference(&rows).collect();
    assert!(without.is_empty(), "add rows, with `emulated!`, for {without:?}");
    let gone: Vec<&String> = rows.difference(&stems).collect();
    assert!(gone.is_empty(), "these rows have no file: {gone:?}");
}
