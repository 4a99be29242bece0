//! The PTX that emulated devices run: brought up to date before the first test that wants it.
//!
//! Where the tests are run by cargo and nvcc is on the machine (or was installed by
//! `cargo xtask kernels`), what is missing or older than its source is compiled first. Nothing is
//! downloaded: where there is no compiler, tests take the PTX that there is, and those without it
//! are skipped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use deepwell_kernels::KernelError;
use deepwell_kernels::cuda::{Architecture, KernelImages};

/// Set where missing PTX is a failure.
const REQUIRE_VARIABLE: &str = "DEEPWELL_REQUIRE_PTX";
/// Lines of a failed command that a message has.
const LINES_SHOWN: usize = 40;

/// What became of bringing an architecture up to date: nothing, or what the command said when it
/// failed.
static REFRESHED: Mutex<BTreeMap<Architecture, Option<String>>> = Mutex::new(BTreeMap::new());

/// The workspace, if it is still where this test was built.
fn workspace() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    root.join("xtask").is_dir().then(|| root.to_path_buf())
}

/// Runs `cargo xtask kernels` once for each architecture; what it said if it failed.
fn refresh(architecture: Architecture) -> Option<String> {
    let mut done = REFRESHED.lock().unwrap_or_else(PoisonError::into_inner);
    let failure = done.entry(architecture).or_insert_with(|| {
        let (cargo, root) = (std::env::var_os("CARGO")?, workspace()?);
        let output = Command::new(cargo)
            .current_dir(root)
            .args(["xtask", "kernels", "--ptx", "--if-present", "--arch", architecture.name()])
            .output();
        match output {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(last_lines(&String::from_utf8_lossy(&output.stderr))),
            Err(error) => Some(format!("cannot start cargo: {error}")),
        }
    });
    failure.clone()
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}

/// The PTX of `<file>.cu`, or why it is not there.
///
/// # Panics
/// If it does not compile, or is required.
pub(crate) fn of_file(file: &str, architecture: Architecture) -> Result<String, String> {
    let failure = refresh(architecture);
    let error = match compiled(file, architecture) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    if let Some(failure) = failure {
        panic!("`cargo xtask kernels --arch {}` failed:\n{failure}", architecture.name());
    }
    let required = std::env::var_os(REQUIRE_VARIABLE).is_some();
    assert!(!required, "{REQUIRE_VARIABLE} is set: {error}");
    Err(error.to_string())
}

/// The PTX of `<file>.cu` as it was compiled last.
pub(crate) fn compiled(file: &str, architecture: Architecture) -> Result<String, KernelError> {
    let images = KernelImages::discover().into_ptx();
    let text = images.image(file, capability(architecture))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn capability(architecture: Architecture) -> (u32, u32) {
    match architecture {
        Architecture::Sm90a => (9, 0),
        Architecture::Sm100a => (10, 0),
        Architecture::Sm103a => (10, 3),
        Architecture::Sm120a => (12, 0),
    }
}
