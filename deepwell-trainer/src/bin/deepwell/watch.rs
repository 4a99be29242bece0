//! What `plan` and `replan` say on stderr while they search: a line that is drawn over on a
//! terminal, and one line elsewhere.

use std::cell::Cell;
use std::time::{Duration, Instant};

use deepwell_plan::search::{Found, Progress};
use deepwell_trainer::terminal::stderr_draws;
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use crate::output::{grouped, say};

/// The progress of a search over a cluster.
pub(crate) struct Watch {
    /// Where stderr is a terminal that can be drawn on.
    bar: Option<ProgressBar>,
    /// When something was said last.
    said: Cell<Instant>,
}

/// How long nothing is said where lines cannot be drawn over.
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

    /// How far the search is.
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

    /// The search is done.
    pub(crate) fn found(&self, found: &Found) {
        let (considered, fitting) = (found.considered as u64, found.fitting as u64);
        let line = format!("plan: {} combinations, {} fit", grouped(considered), grouped(fitting));
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }

    /// The search runs again with other numbers.
    pub(crate) fn asks_what_if(&self) {
        self.draw("searching again under other conditions".to_string());
    }

    /// Takes the line away.
    pub(crate) fn end(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
