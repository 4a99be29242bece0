//! What can go wrong between a model folder and a trained model.

use std::path::PathBuf;

use thiserror::Error;

/// Errors of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The model cannot be captured.
    #[error(transparent)]
    Capture(#[from] deepwell_ir::capture::CaptureError),
    /// A graph pass refused.
    #[error(transparent)]
    Ir(#[from] deepwell_ir::IrError),
    /// No plan.
    #[error(transparent)]
    Plan(#[from] deepwell_plan::PlanError),
    /// A call refused, or there is no memory.
    #[error(transparent)]
    Kernel(#[from] deepwell_kernels::KernelError),
    /// The policy cannot be used.
    #[error(transparent)]
    Policy(#[from] deepwell_precision::PolicyError),
    /// Scales that are not as long as their shape says.
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
    /// A setting that cannot be.
    #[error("{setting}: expected {expected}, got {got}{}", hint_line(.hint))]
    Setting {
        /// Name of the setting, as on the command line.
        setting: &'static str,
        /// What is possible.
        expected: String,
        /// What came.
        got: String,
        /// What to do, if there is something.
        hint: Option<String>,
    },
    /// Hugging Face weights cannot be read.
    #[error(transparent)]
    Weights(#[from] deepwell_ckpt::hf::HfError),
    /// A file or folder.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// The system's words.
        #[source]
        source: std::io::Error,
    },
    /// The checkpoint belongs to another run.
    #[error(
        "cannot resume from {path}: {what}\nhint: `--out` names another folder",
        path = path.display()
    )]
    Resume {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: String,
    },
}

fn hint_line(hint: &Option<String>) -> String {
    hint.as_ref().map_or_else(String::new, |hint| format!("\nhint: {hint}"))
}

impl TrainError {
    /// An input or output error at `path`.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> TrainError {
        let path = path.into();
        move |source| TrainError::Io { path, source }
    }
}
