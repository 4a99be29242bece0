//! Progress of a command: a redrawn line on a terminal, plain lines otherwise.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;

/// Progress counter on standard error.
pub(crate) struct Progress {
    total: usize,
    done: Mutex<usize>,
    is_terminal: bool,
}

impl Progress {
    pub(crate) fn new(total: usize) -> Progress {
        Progress { total, done: Mutex::new(0), is_terminal: io::stderr().is_terminal() }
    }

    /// Counts and shows a finished piece of work.
    pub(crate) fn step(&self, what: &str) {
        let mut done = self.done.lock().expect("nobody panics while counting");
        *done += 1;
        let line = line(*done, self.total, what);
        let mut stream = io::stderr().lock();
        // Errors of a broken stream are ignored.
        let _ = match self.is_terminal {
            // Returns to the beginning of the line and clears it.
            true => write!(stream, "\r\x1b[2K{line}").and_then(|()| stream.flush()),
            false => writeln!(stream, "{line}"),
        };
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_terminal && self.total > 0 {
            let _ = write!(io::stderr().lock(), "\r\x1b[2K");
        }
    }
}

fn line(done: usize, total: usize, what: &str) -> String {
    const CELLS: usize = 20;
    let filled = (done * CELLS).checked_div(total).unwrap_or(CELLS);
    let bar: String = (0..CELLS).map(|cell| if cell < filled { '=' } else { ' ' }).collect();
    let width = total.to_string().len();
    format!("[{bar}] {done:>width$}/{total} {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let check = |done, total, expected: &str| assert_eq!(line(done, total, "x"), expected);
        check(0, 10, "[                    ]  0/10 x");
        check(5, 10, "[==========          ]  5/10 x");
        check(10, 10, "[====================] 10/10 x");
        check(1, 120, "[                    ]   1/120 x");
        check(0, 0, "[====================] 0/0 x");
    }
}
