//! Names of the files in an output folder.

use std::path::{Path, PathBuf};

/// The page of a run.
pub(crate) const PAGE: &str = "report.html";
/// Facts that are known when a run begins.
pub(crate) const FACTS: &str = "facts.json";
/// The metrics, a line for each step.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// The folder of checkpoints.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// Path of the metrics of a run.
pub(crate) fn metrics(out: &Path) -> PathBuf {
    out.join(METRICS)
}

/// Folder of the checkpoints of a run.
pub(crate) fn checkpoints(out: &Path) -> PathBuf {
    out.join(CHECKPOINTS)
}
