//! Progress on a terminal as a bar, elsewhere as plain lines; both on standard error.
//!
//! If the reader goes away, as `head` does, output stops and the work continues.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::TrainError;
use crate::metrics::StepLine;
use crate::terminal::stderr_draws;
use crate::trainer::Progress;

/// Writes a line to standard error. A closed standard error cannot be reported.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes data as one JSON document to standard output. A closed pipe is not an error; a full disk
/// is.
pub(crate) fn print_json(data: &impl Serialize) -> Result<(), TrainError> {
    let text = serde_json::to_string_pretty(data).expect("a report is plain data");
    write_to(&mut io::stdout().lock(), &text).map_err(TrainError::io("standard output"))
}

fn write_to(out: &mut impl Write, text: &str) -> io::Result<()> {
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails every write with this kind of error.
    struct Failing(ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_a_closed_pipe_is_passed_over() {
        assert!(write_to(&mut Failing(ErrorKind::BrokenPipe), "data").is_ok());
        for kind in [ErrorKind::StorageFull, ErrorKind::PermissionDenied] {
            assert_eq!(write_to(&mut Failing(kind), "data").unwrap_err().kind(), kind);
        }
        let mut written = Vec::new();
        write_to(&mut written, "data").unwrap();
        assert_eq!(written, b"data\n");
    }
}
