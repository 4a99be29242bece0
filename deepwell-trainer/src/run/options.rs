//! Options of a run, and its data.

use crate::data::{DataOptions, Dataset, Tokenizer};
use crate::progress::Progress;
use crate::run_folder::Start;
use crate::{Settings, TrainError};

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

/// Opens the data of a run, text by the run's tokenizer.
///
/// # Errors
/// The data cannot be used.
pub fn open_data(
    settings: &Settings,
    tokenizer: Tokenizer,
    progress: &mut dyn Progress,
) -> Result<Dataset, TrainError> {
    let options = DataOptions {
        inputs: settings.data.clone(),
        heldout_inputs: settings.eval_data.clone(),
        text_field: settings.text_field.clone(),
        tokenizer,
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
