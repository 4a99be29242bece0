//! Limits how often a run reports stalls for checkpoints.

/// Seconds of stalls per log line. Without this limit, a run with steps of milliseconds would print
/// a line for each checkpoint.
const STALL_LINE_S: f64 = 1.0;

/// Stalls for checkpoints that have not been reported.
#[derive(Debug, Default)]
pub(crate) struct UnreportedStalls {
    count: usize,
    seconds: f64,
}

impl UnreportedStalls {
    /// Adds a stall. Once the stalls sum to [`STALL_LINE_S`], returns the text about the earlier
    /// stalls for a log line.
    pub(crate) fn add(&mut self, stall_s: f64) -> Option<String> {
        let UnreportedStalls { count, seconds } = *self;
        if seconds + stall_s < STALL_LINE_S {
            *self = UnreportedStalls { count: count + 1, seconds: seconds + stall_s };
            return None;
        }
        *self = UnreportedStalls::default();
        Some(match count {
            0 => String::new(),
            1 => format!(", the one before {seconds:.2} s"),
            _ => format!(", the {count} before {seconds:.2} s together"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every checkpoint of a small model had its own line.
    #[test]
    fn short_stalls_share_a_line() {
        let check = |stalls_s: &[f64], expected: &[Option<&str>]| {
            let mut untold = UnreportedStalls::default();
            let said: Vec<Option<String>> = stalls_s.iter().map(|&it| untold.add(it)).collect();
            let said: Vec<Option<&str>> = said.iter().map(Option::as_deref).collect();
            assert_eq!(said, expected, "{stalls_s:?}");
        };
        check(&[1.5, 2.0], &[Some(""), Some("")]);
        check(&[0.1; 3], &[None; 3]);
        check(
            &[0.25, 0.25, 0.25, 0.25, 0.25],
            &[None, None, None, Some(", the 3 before 0.75 s together"), None],
        );
        check(&[0.6, 0.6, 1.0], &[None, Some(", the one before 0.60 s"), Some("")]);
    }
}
