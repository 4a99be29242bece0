//! One training run from settings to summary, as a row of values: prepared, compiled, fitted,
//! summarized.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::progress::Progress;
use crate::world::Member;
use crate::{Settings, TrainError};

mod compiled;
mod facts;
mod finish;
mod fitted;
mod memory_table;
mod options;
mod planned;
mod prepared;
mod summary;

use self::compiled::Compiled;
pub use self::facts::{MachineFacts, RunFacts};
use self::fitted::Fitted;
pub use self::options::{RunOptions, open_data};
use self::prepared::{Prepared, Request};
pub use self::summary::{DataFacts, RunSummary};

/// Executes a training run. Writes metrics, events, checkpoints and `summary.json` to the output
/// folder.
///
/// # Errors
/// The run fails.
pub fn run(
    settings: &Settings,
    options: RunOptions,
    stop: Arc<AtomicBool>,
    progress: &mut dyn Progress,
) -> Result<RunSummary, TrainError> {
    run_as(None, settings, options, stop, progress)
}

/// [`run`] as one rank of several processes, if `member` is given: only rank 0 writes, and creates
/// the files that other ranks read later.
///
/// # Errors
/// The run fails, here or on another rank.
pub fn run_as(
    member: Option<&Arc<Member>>,
    settings: &Settings,
    options: RunOptions,
    stop: Arc<AtomicBool>,
    progress: &mut dyn Progress,
) -> Result<RunSummary, TrainError> {
    let started = Instant::now();
    let prepared = Prepared::of(Request { member, settings, options }, progress)?;
    let compiled = Compiled::of(prepared, progress)?;
    let fitted = Fitted::of(compiled, &stop, progress)?;
    finish::summarize(fitted, started, progress)
}

/// Sets `stop` when standard input ends, so that a run stops with its parent process.
pub fn stop_with_parent(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let mut byte = [0u8; 1];
        // The parent sends no data; a read error counts as the end.
        while matches!(std::io::stdin().read(&mut byte), Ok(count) if count > 0) {}
        stop.store(true, Ordering::Relaxed);
    });
}
