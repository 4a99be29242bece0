//! Progress of a run, for the user.

use crate::metrics::StepLine;

/// Receives the progress of a run.
pub trait Progress {
    /// A step is done.
    fn step(&mut self, line: &StepLine);
    /// An evaluation is done.
    fn evaluation(&mut self, step: u64, val_loss: f64);
    /// A remark for the user.
    fn note(&mut self, text: &str);
}

/// Ignores progress.
impl Progress for () {
    fn step(&mut self, _line: &StepLine) {}
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, _text: &str) {}
}
