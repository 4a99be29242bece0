//! The harness of tests that want a device: they say why they were skipped.
//!
//! libtest knows only while it compiles whether a test is ignored. Whether there is a GPU shows
//! when a test runs: then it calls [`skip`], and the line of the test says `ignored` and why.
//! Filters and flags are libtest's; several names run the tests of each, as there. The line of a
//! test says how many seconds it took, and the slowest tests are listed at the end.
//!
//! ```no_run
//! use deepwell_trials::{skip, trial};
//!
//! trial!(products_on_a_gpu);
//! fn products_on_a_gpu() {
//!     let Some(gpu) = None::<u32> else { skip("no GPU") };
//!     assert!(gpu < 8);
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     deepwell_trials::run()
//! }
//! ```

mod times;

use std::collections::BTreeMap;
use std::panic::{catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

#[doc(hidden)]
pub use inventory;
use libtest_mimic::{Arguments, Completion};

/// Flags whose value is an argument of its own.
const WITH_VALUE: [&str; 6] =
    ["--test-threads", "--logfile", "--skip", "--color", "--format", "-Z"];

/// Whether `--nocapture` was given.
static IS_VERBOSE: AtomicBool = AtomicBool::new(false);

/// A function that [`trial!`] made a test.
pub struct Test {
    module: &'static str,
    name: &'static str,
    body: fn(),
}

inventory::collect!(Test);

impl Test {
    /// The test `name` of `module`, a path that begins with the crate.
    pub const fn new(module: &'static str, name: &'static str, body: fn()) -> Test {
        Test { module, name, body }
    }

    /// As libtest calls it: the path without the crate.
    fn path(&self) -> String {
        match self.module.split_once("::") {
            Some((_, module)) => format!("{module}::{}", self.name),
            None => self.name.to_string(),
        }
    }

    fn run(&self) -> Completion {
        match catch_unwind(self.body).map_err(|payload| payload.downcast::<Skipped>()) {
            Ok(()) => Completion::Completed,
            Err(Ok(skipped)) => Completion::ignored_with(skipped.reason),
            Err(Err(panic)) => resume_unwind(panic),
        }
    }
}

/// Makes a function without arguments a test; one that is not is dead code, which the compiler
/// reports.
#[macro_export]
macro_rules! trial {
    ($name:ident) => {
        $crate::inventory::submit! {
            $crate::Test::new(module_path!(), stringify!($name), $name)
        }
    };
}

/// What [`skip`] unwinds with.
struct Skipped {
    reason: String,
}

/// Ends the test that calls it, which is reported as ignored for `reason`.
pub fn skip(reason: impl Into<String>) -> ! {
    // Without the hook of a panic: nothing is wrong.
    let reason = reason.into().replace('\n', "; ");
    resume_unwind(Box::new(Skipped { reason }))
}

/// A line on stderr, with `--nocapture` alone: this harness captures nothing.
pub fn note(line: impl FnOnce() -> String) {
    if IS_VERBOSE.load(Ordering::Relaxed) {
        eprintln!("{}", line());
    }
}

/// Runs the tests of this binary that the command line asks for, and prints how long each took.
pub fn run() -> ExitCode {
    let (mut arguments, names) = arguments(std::env::args());
    // Tests of a GPU measure its time and its free memory, which others would change.
    if std::path::Path::new("/dev/nvidiactl").exists() {
        arguments.test_threads.get_or_insert(1);
    }
    IS_VERBOSE.store(arguments.nocapture, Ordering::Relaxed);
    let fits = |path: &str, name: &String| {
        if arguments.exact { path == name } else { path.contains(name.as_str()) }
    };
    let is_asked_for = |path: &str| {
        !arguments.skip.iter().any(|name| fits(path, name))
            && (names.is_empty() || names.iter().any(|name| fits(path, name)))
    };
    let tests = inventory::iter::<Test>.into_iter().map(|test| (test.path(), test));
    let tests: BTreeMap<String, &'static Test> =
        tests.filter(|(path, _)| is_asked_for(path)).collect();
    times::run(&arguments, tests)
}

/// Flags, and names of tests: libtest-mimic takes one name at most.
fn arguments(all: impl Iterator<Item = String>) -> (Arguments, Vec<String>) {
    let (mut flags, mut names) = (Vec::new(), Vec::new());
    let mut is_value = true;
    for argument in all {
        if is_value || argument.starts_with('-') {
            is_value = !is_value && WITH_VALUE.contains(&argument.as_str());
            flags.push(argument);
        } else {
            names.push(argument);
        }
    }
    (Arguments::from_iter(flags), names)
}
