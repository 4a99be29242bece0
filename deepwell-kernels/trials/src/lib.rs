//! Harness of tests that need a device, which can be skipped at run time with a reason.
//!
//! libtest decides at compile time whether a test is ignored, but the presence of a GPU is known
//! only when a test runs. A test then calls [`skip`] and is reported as `ignored` with the reason.
//! Filters and flags are those of libtest; several names select the tests of each, as in libtest.
//! The line of a test includes its time in seconds, and the slowest tests are listed at the end.
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

/// Flags with a value in a separate argument.
const WITH_VALUE: [&str; 6] =
    ["--test-threads", "--logfile", "--skip", "--color", "--format", "-Z"];

/// Whether `--nocapture` was given.
static IS_VERBOSE: AtomicBool = AtomicBool::new(false);

/// A test function registered by [`trial!`].
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

    /// Path of the test without the crate, as in libtest.
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

/// Registers a function without arguments as a test. The compiler reports an unregistered function
/// as dead code.
#[macro_export]
macro_rules! trial {
    ($name:ident) => {
        $crate::inventory::submit! {
            $crate::Test::new(module_path!(), stringify!($name), $name)
        }
    };
}

/// Payload of the unwinding in [`skip`].
struct Skipped {
    reason: String,
}

/// Ends the calling test, which is reported as ignored for `reason`.
pub fn skip(reason: impl Into<String>) -> ! {
    // Bypasses the panic hook: this is not a failure.
    let reason = reason.into().replace('\n', "; ");
    resume_unwind(Box::new(Skipped { reason }))
}

/// Prints a line on stderr if `--nocapture` was given: this harness captures nothing.
pub fn note(line: impl FnOnce() -> String) {
    if IS_VERBOSE.load(Ordering::Relaxed) {
        eprintln!("{}", line());
    }
}

/// Runs the selected tests of this binary and prints the time of each test.
pub fn run() -> ExitCode {
    let (mut arguments, names) = arguments(std::env::args());
    // GPU tests measure time and free memory, which concurrent tests would change.
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

/// Splits off names of tests, as libtest-mimic accepts at most one name.
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
