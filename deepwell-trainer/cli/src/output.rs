//! Data to stdout, remarks to stderr.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints data. A closed pipe, as after `head`, is not an error.
pub(crate) fn print(text: &dyn Display) -> Result<()> {
    write_to(&mut io::BufWriter::new(io::stdout().lock()), text).context("cannot write to stdout")
}

fn write_to(out: &mut impl Write, text: &dyn Display) -> io::Result<()> {
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Prints data as one JSON document.
pub(crate) fn print_json(data: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(data).context("cannot write the result as JSON")?;
    print(&format_args!("{text}\n"))
}

/// Prints a note on stderr.
pub(crate) fn note(text: impl Display) {
    say(format_args!("note: {text}"));
}

/// Prints a line to stderr.
pub(crate) fn say(text: impl Display) {
    // A closed stderr cannot be reported.
    let _ = writeln!(io::stderr(), "{text}");
}

/// A count with its digits in groups of three: `3,082,496`.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
        assert!(write_to(&mut Failing(ErrorKind::BrokenPipe), &"data").is_ok());
        for kind in [ErrorKind::StorageFull, ErrorKind::PermissionDenied] {
            assert_eq!(write_to(&mut Failing(kind), &"data").unwrap_err().kind(), kind);
        }
        let mut written = Vec::new();
        write_to(&mut written, &"data").unwrap();
        assert_eq!(written, b"data");
    }

    #[test]
    fn digits_in_groups() {
        let check = |count: u64, expected: &str| assert_eq!(grouped(count), expected);
        check(0, "0");
        check(999, "999");
        check(1_000, "1,000");
        check(82_496, "82,496");
        check(3_082_496, "3,082,496");
        check(u64::MAX, "18,446,744,073,709,551,615");
    }
}
