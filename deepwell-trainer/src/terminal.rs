//! Capabilities of stderr: colours, and redrawn lines.
//!
//! Progress bars are for terminals that can move their cursor; elsewhere progress is plain lines.
//! Colours are for such terminals too, unless `NO_COLOR` has a value (<https://no-color.org>).
//! Output on stdout has no colours, except help on a terminal.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};

/// Whether stderr is a terminal whose lines can be redrawn.
pub fn stderr_draws() -> bool {
    draws(io::stderr().is_terminal(), std::env::var_os("TERM").as_deref())
}

/// Whether stderr takes colours.
pub fn stderr_has_colors() -> bool {
    stderr_draws() && allows_colors(std::env::var_os("NO_COLOR").as_deref())
}

fn draws(is_terminal: bool, kind: Option<&OsStr>) -> bool {
    is_terminal && kind.is_none_or(|kind| kind != "dumb")
}

/// Set to nothing is as good as not set.
fn allows_colors(no_color: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_terminals_that_can_are_drawn_on() {
        let check = |is_terminal: bool, kind: Option<&str>, expected: bool| {
            assert_eq!(draws(is_terminal, kind.map(OsStr::new)), expected, "{kind:?}");
        };
        check(true, Some("xterm-256color"), true);
        check(true, None, true);
        check(true, Some("dumb"), false);
        check(false, Some("xterm-256color"), false);
        check(false, None, false);
    }

    #[test]
    fn no_color_with_a_value_takes_colors_away() {
        let check = |no_color: Option<&str>, expected: bool| {
            assert_eq!(allows_colors(no_color.map(OsStr::new)), expected, "{no_color:?}");
        };
        check(None, true);
        check(Some(""), true);
        check(Some("1"), false);
        check(Some("0"), false);
    }
}
