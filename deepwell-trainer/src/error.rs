//! Errors between a model folder and a trained model.

use std::path::PathBuf;

use thiserror::Error;

use crate::fingerprint::Difference;
use crate::lock::LockHolder;

/// Errors of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The model cannot be captured.
    #[error(transparent)]
    Capture(#[from] deepwell_ir::capture::CaptureError),
    /// A graph pass failed.
    #[error(transparent)]
    Ir(#[from] deepwell_ir::IrError),
    /// No plan.
    #[error(transparent)]
    Plan(#[from] deepwell_plan::PlanError),
    /// A call fails, or memory is insufficient.
    #[error(transparent)]
    Kernel(#[from] deepwell_kernels::KernelError),
    /// The policy cannot be used.
    #[error(transparent)]
    Policy(#[from] deepwell_precision::PolicyError),
    /// The length of scales contradicts their shape.
    #[error(transparent)]
    Quantize(#[from] deepwell_precision::QuantizeError),
    /// A guard stopped the run.
    #[error(transparent)]
    Guard(#[from] deepwell_precision::GuardError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] crate::data::DataError),
    /// Metrics cannot be written.
    #[error(transparent)]
    Metrics(#[from] crate::metrics::MetricsError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] deepwell_ckpt::CheckpointError),
    /// Ranks did not agree.
    #[error(transparent)]
    Comm(#[from] deepwell_kernels::CommError),
    /// One of several ranks failed, and the others stopped.
    #[error("rank {rank} of {world_size}: {source}")]
    Rank {
        /// The failed rank, counted from 0.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// The rank's error.
        #[source]
        source: Box<TrainError>,
    },
    /// The error message of another rank.
    #[error("{0}")]
    Elsewhere(String),
    /// A setting has an invalid value.
    #[error("{setting}: expected {expected}, got {got}{}", hint_line(.hint))]
    Setting {
        /// Name of the setting, as on the command line.
        setting: &'static str,
        /// Valid values.
        expected: String,
        /// The given value.
        got: String,
        /// Remedy, if any.
        hint: Option<String>,
    },
    /// Hugging Face weights cannot be read.
    #[error(transparent)]
    Weights(#[from] deepwell_ckpt::hf::HfError),
    /// Weights cannot be quantized into files.
    #[error(transparent)]
    QuantizeFile(#[from] deepwell_quantize_file::QuantizeFileError),
    /// A file or folder cannot be used.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The output folder cannot be created or written.
    #[error(
        "cannot write to the output folder `{path}`: {source}\nhint: `--out` names a folder that \
         you can write to",
        path = path.display()
    )]
    OutputFolder {
        /// The folder, or a file in it.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A checkpoint from which the run cannot resume.
    #[error("cannot resume from `{path}`: {what}\nhint: {hint}", path = path.display())]
    Resume {
        /// The checkpoint, or the folder of the run.
        path: PathBuf,
        /// Reason.
        what: String,
        /// Remedy.
        hint: &'static str,
    },
    /// The settings differ from those of the run in the folder.
    #[error(
        "cannot resume from `{path}`: {count} not what {it} now\n{differences}\
         hint: give what the run has, which `run.json` in its folder lists; `--accept-changes` \
         goes on with what is given now; `--out` names another folder",
        path = path.display(),
        count = match differences.len() {
            1 => "one setting of the run is".to_string(),
            count => format!("{count} settings of the run are"),
        },
        it = if differences.len() == 1 { "it is" } else { "they are" },
        differences = lines(.differences)
    )]
    OtherRun {
        /// The checkpoint, or the folder of the run.
        path: PathBuf,
        /// The differing fields of the fingerprint.
        differences: Vec<Difference>,
    },
    /// The folder contains results of another run.
    #[error(
        "`{folder}` holds the results of {whose}: {found}\nhint: `--resume` goes on with it, \
         `--out` names another folder, `--overwrite` deletes them",
        folder = folder.display(),
        whose = run.as_ref().map_or_else(|| "another run".to_string(), |run| format!("run {run}")),
        found = found.join(", ")
    )]
    Results {
        /// The output folder.
        folder: PathBuf,
        /// Identity and start of the run, if known.
        run: Option<String>,
        /// Names of the existing files.
        found: Vec<String>,
    },
    /// Another process owns the folder.
    #[error(
        "`{folder}` is in use by {who}\nhint: wait for it or stop it, or let `--out` name another \
         folder",
        folder = folder.display(),
        who = holder
            .as_ref()
            .map_or_else(|| "a process that has just begun".to_string(), ToString::to_string)
    )]
    Locked {
        /// The output folder.
        folder: PathBuf,
        /// The process that holds the lock, if it could be read.
        holder: Option<LockHolder>,
    },
}

fn lines(differences: &[Difference]) -> String {
    differences.iter().map(|difference| format!("  {difference}\n")).collect()
}

fn hint_line(hint: &Option<String>) -> String {
    hint.as_ref().map_or_else(String::new, |hint| format!("\nhint: {hint}"))
}

impl TrainError {
    /// The failure of a rank in another process.
    pub(crate) fn of_rank(rank: u32, world_size: u32, reason: String) -> TrainError {
        TrainError::Rank {
            rank: rank as usize,
            world_size: world_size as usize,
            source: Box::new(TrainError::Elsewhere(reason)),
        }
    }

    /// An input or output error at `path`.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> TrainError {
        let path = path.into();
        move |source| TrainError::Io { path, source }
    }
}
