//! A unit's capacity over time.

/// Clocks of one entry.
const SPAN: f64 = 32.0;

/// How much of a unit's time is taken, by spans. Requests may come in any order of time; an earlier
/// request keeps its part.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    taken: Vec<f32>,
    busy: f64,
}

impl Ledger {
    /// Takes `clocks` of the unit from `start` on. Returns the end.
    pub(super) fn take(&mut self, start: f64, clocks: f64) -> f64 {
        if clocks <= 0.0 {
            return start;
        }
        self.busy += clocks;
        let mut left = clocks;
        let mut at = (start / SPAN) as usize;
        loop {
            if self.taken.len() <= at {
                self.taken.resize(at + 64, 0.0);
            }
            let begin = start.max(at as f64 * SPAN);
            let end = (at + 1) as f64 * SPAN;
            let room = (SPAN - f64::from(self.taken[at])).min(end - begin).max(0.0);
            let part = room.min(left);
            self.taken[at] += part as f32;
            left -= part;
            if left <= 1e-6 {
                // Free time of a span is at its end: what is taken comes first.
                let occupied = at as f64 * SPAN + f64::from(self.taken[at]);
                return occupied.max(begin + part).min(end).max(start + clocks);
            }
            at += 1;
        }
    }

    /// Clocks in use.
    pub(super) fn busy(&self) -> f64 {
        self.busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_share_a_unit() {
        let mut unit = Ledger::default();
        assert_eq!(unit.take(0.0, 100.0), 100.0);
        // The second waits for the first; a later one does not.
        assert_eq!(unit.take(0.0, 28.0), 128.0);
        assert_eq!(unit.take(640.0, 32.0), 672.0);
        // An earlier gap is still free.
        assert_eq!(unit.take(320.0, 32.0), 352.0);
        assert_eq!(unit.busy(), 192.0);
    }
}
