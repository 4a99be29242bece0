//! Options of a comparison, and the kinds of its runs.

use std::path::PathBuf;

use crate::{Settings, Start};

/// Held-out losses, or training losses, by step.
pub type Curve = Vec<(u64, f64)>;

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct ParityOptions {
    /// Settings of the low-precision runs, with the seed of the first pair; the BF16 runs differ
    /// only in the precision.
    pub settings: Settings,
    /// Folder of the report and the runs.
    pub out: PathBuf,
    /// Treatment of an earlier comparison in this folder.
    pub start: Start,
    /// Number of pairs, with seeds starting at the seed of the settings.
    pub seeds: u64,
    /// Whether to train the same number of pairs again if the verdict is open.
    pub again: bool,
    /// Whether to train BF16 of each seed again, from weights perturbed in their last bit.
    pub control: bool,
    /// Largest mean relative gap of held-out loss that counts as holding.
    pub tolerance_rel: f64,
}

/// Kind of a seed's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunKind {
    Bf16,
    LowPrecision,
    /// BF16 from weights perturbed in their last bit.
    Control,
}

impl RunKind {
    /// Name of the kind in metrics and in folder names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            RunKind::Bf16 => "bf16",
            RunKind::LowPrecision => "low_precision",
            RunKind::Control => "control",
        }
    }
}
