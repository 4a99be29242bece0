//! One training run from settings to summary, as a row of values: prepared, compiled, fitted,
//! summarized.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::data::{DataOptions, Dataset};
use crate::run_folder::Start;
use crate::trainer::Progress;
use crate::world::Member;
use crate::{Settings, TrainError, open_tokenizer};

mod compiled;
mod fitted;
mod memory_table;
mod planned;
mod prepared;
mod summary;

use self::compiled::Compiled;
use self::fitted::Fitted;
use self::prepared::{Prepared, Request};
pub use self::summary::{DataFacts, RunSummary};

/// Options of a run that are not settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Treatment of an output folder with results.
    pub start: Start,
    /// Whether to profile an additional step after the last one.
    pub profile: bool,
    /// Whether this process may exit, with the error on standard error, if one rank fails and
    /// another is stuck: ranks that are threads cannot be stopped from outside.
    pub ends_stuck_process: bool,
}

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
    summary::summarize(fitted, started, progress)
}

/// Opens the data of a run.
///
/// # Errors
/// The data cannot be used.
pub fn open_data(settings: &Settings, progress: &mut dyn Progress) -> Result<Dataset, TrainError> {
    let options = DataOptions {
        inputs: settings.data.clone(),
        heldout_inputs: settings.eval_data.clone(),
        text_field: settings.text_field.clone(),
        tokenizer: open_tokenizer(settings.tokenizer.as_deref())?,
        cache_dir: settings.cache_dir.clone(),
        heldout_tokens_min: {
            let largest = settings.eval_tokens.max(settings.interim_eval_tokens());
            largest + largest / 2
        },
        ..DataOptions::default()
    };
    let mut told = false;
    let dataset = Dataset::prepare(&options, &mut |_| {
        if !std::mem::replace(&mut told, true) {
            progress.note("reading the data");
        }
    })?;
    Ok(dataset)
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
