//! Progress on a terminal as a bar, elsewhere as plain lines; both on standard error.
//!
//! If the reader goes away, as `head` does, output stops and the work continues.

use std::fmt::Display;
use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressStyle};

use crate::metrics::StepLine;
use crate::progress::Progress;
use crate::terminal::stderr_draws;

/// Writes a line to standard error. A closed standard error cannot be reported.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Shows the progress of a run on the terminal.
pub struct Console {
    name: String,
    bar: Option<ProgressBar>,
    line_every: u64,
}

impl Console {
    /// Progress of a run called `name` with `steps` steps.
    pub fn new(name: &str, steps: u64) -> Console {
        let bar = stderr_draws().then(|| {
            let style = ProgressStyle::with_template("{prefix:>8} {wide_bar} {msg} eta {eta}");
            let bar = ProgressBar::new(steps).with_prefix(name.to_string());
            match style {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        Console { name: name.to_string(), bar, line_every: (steps / 20).max(1) }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(text)),
            None => say(text),
        }
    }
}

impl Progress for Console {
    fn step(&mut self, line: &StepLine) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(line.step);
                bar.set_message(line.to_string());
            }
            None if line.step == 1 || line.step.is_multiple_of(self.line_every) => {
                say(format_args!("{:>8} {line}", self.name));
            }
            None => {}
        }
    }

    fn evaluation(&mut self, step: u64, val_loss: f64) {
        let ppl = val_loss.exp();
        self.line(&format!("{:>8} step {step} | held-out {val_loss:.4} | ppl {ppl:.3}", self.name));
    }

    fn note(&mut self, text: &str) {
        self.line(text);
    }
}
