//! A trainer: an engine, tokens and settings, with the logs and report of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::data::TokenCache;
use crate::fingerprint::{Fingerprint, Sources};
use crate::fit::Fit;
use crate::run_folder::{Opened, RunFolder, Start};
use crate::{Engine, FitReport, Progress, Settings, TrainError, run_paths};

/// Trains an engine on tokens.
pub struct Trainer {
    engine: Engine,
    settings: Settings,
    tokens: Arc<TokenCache>,
    stop: Arc<AtomicBool>,
    sources: Sources,
    start: Start,
    folder: Option<RunFolder>,
}

impl Trainer {
    /// A trainer of an initialized engine. [`Trainer::fit`] starts at the first step.
    pub fn from_engine(engine: Engine, settings: Settings, tokens: Arc<TokenCache>) -> Trainer {
        let stop = Arc::new(AtomicBool::new(false));
        Trainer {
            engine,
            settings,
            tokens,
            stop,
            sources: Sources::default(),
            start: Start::New,
            folder: None,
        }
    }

    /// Sets how the run starts in its output folder. The default is [`Start::New`].
    #[must_use]
    pub fn starting(mut self, start: Start) -> Trainer {
        self.start = start;
        self
    }

    /// Trains in a folder that is already claimed; otherwise [`Trainer::fit`] claims one.
    #[must_use]
    pub fn in_folder(mut self, folder: RunFolder) -> Trainer {
        self.folder = Some(folder);
        self
    }

    /// Sets the sources of the run, for its fingerprint.
    #[must_use]
    pub fn made_from(mut self, sources: Sources) -> Trainer {
        self.sources = sources;
        self
    }

    /// Stops with a checkpoint after the step during which `stop` becomes true.
    #[must_use]
    pub fn stopping_on(mut self, stop: Arc<AtomicBool>) -> Trainer {
        self.stop = stop;
        self
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, for use between runs.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Path of the metrics.
    pub fn metrics_path(out: &Path) -> PathBuf {
        run_paths::metrics(out)
    }

    /// Folder of the checkpoints.
    pub fn checkpoints_path(out: &Path) -> PathBuf {
        run_paths::checkpoints(out)
    }

    /// Trains to the last step, or until stopped.
    ///
    /// # Errors
    /// Data, disk or guards stop the run, or the folder belongs to another run. Checkpoints written
    /// so far are kept.
    pub fn fit(&mut self, progress: &mut dyn Progress) -> Result<FitReport, TrainError> {
        let opened = self.begin(progress)?;
        let run = Fit::begin(&mut self.engine, &self.settings, &self.tokens, opened, progress)?;
        run.run_to_end(&self.stop)
    }

    /// Claims the output folder, and finds the checkpoint to resume from.
    fn begin(&mut self, progress: &mut dyn Progress) -> Result<Opened, TrainError> {
        let folder = match self.folder.take() {
            Some(folder) => folder,
            None => RunFolder::claim(&self.settings.out, self.start)?,
        };
        let fingerprint =
            Fingerprint::of(&self.engine, &self.settings, &self.tokens, &self.sources);
        // The folder stays claimed for the trainer's lifetime.
        self.folder.insert(folder).begin(&fingerprint, progress)
    }
}
