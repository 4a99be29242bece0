//! Progress of the searches of `plan` and `replan` on stderr: a redrawn line on a terminal, plain
//! lines elsewhere.

use std::cell::Cell;
use std::time::{Duration, Instant};

use deepwell_plan::search::{Found, Progress};
use deepwell_trainer::terminal::stderr_draws;
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use crate::output::{grouped, say};

/// The progress of a search over a cluster.
pub(crate) struct Watch {
    /// Present if stderr is a terminal that can be redrawn.
    bar: Option<ProgressBar>,
    /// Time of the last output.
    said: Cell<Instant>,
}

/// Minimum interval between plain lines.
const SILENCE: Duration = Duration::from_secs(1);

impl Watch {
    pub(crate) fn start() -> Watch {
        let bar = stderr_draws().then(|| {
            let bar = ProgressBar::new_spinner().with_finish(ProgressFinish::AndClear);
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.set_message("searching");
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Watch { bar, said: Cell::new(Instant::now()) }
    }

    fn draw(&self, message: String) {
        match &self.bar {
            Some(bar) => bar.set_message(message),
            None if self.said.get().elapsed() > SILENCE => {
                self.said.set(Instant::now());
                say(format_args!("plan: {message}"));
            }
            None => {}
        }
    }

    /// Shows the progress of the search.
    pub(crate) fn searched(&self, progress: Progress) {
        self.draw(match progress {
            Progress::Combinations(count) => {
                format!("searching: {} combinations", grouped(count as u64))
            }
            Progress::Programs(count) => {
                format!("searching: programs of {} plans", grouped(count as u64))
            }
        });
    }

    /// Prints the result of the finished search.
    pub(crate) fn found(&self, found: &Found) {
        let (considered, fitting) = (found.considered as u64, found.fitting as u64);
        let line = format!("plan: {} combinations, {} fit", grouped(considered), grouped(fitting));
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }

    /// Shows that the search runs again with other numbers.
    pub(crate) fn asks_what_if(&self) {
        self.draw("searching again under other conditions".to_string());
    }

    /// Clears the progress line.
    pub(crate) fn end(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
