//! A window of the last N values of a series, with robust statistics.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// Ring buffer of the last `capacity` finite values. Serialized as stored, so that a resumed run
/// continues bit for bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Window {
    values: Vec<f32>,
    capacity: usize,
    /// Position of the next value once the ring is full.
    next: usize,
}

impl Default for Window {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Window {
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Self { values: Vec::with_capacity(capacity), capacity, next: 0 }
    }

    /// Changes the capacity; discards all values if the capacity differs.
    pub(super) fn reserve(&mut self, capacity: usize) {
        if self.capacity != capacity.max(1) {
            *self = Window::new(capacity);
        }
    }

    pub(super) fn push(&mut self, value: f32) {
        debug_assert!(value.is_finite(), "JSON holds no other");
        if self.values.len() < self.capacity {
            self.values.push(value);
        } else {
            self.values[self.next] = value;
            self.next = (self.next + 1) % self.capacity;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.values.len() == self.capacity
    }

    /// Oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = f32> + '_ {
        let (newer, older) = self.values.split_at(self.next.min(self.values.len()));
        older.iter().chain(newer).copied()
    }

    /// The median, the lower of two middle values; `None` when empty.
    pub(super) fn median(&self) -> Option<f32> {
        let mut values = self.values.clone();
        let middle = values.len().checked_sub(1)? / 2;
        let (_, median, _) = values.select_nth_unstable_by(middle, f32::total_cmp);
        Some(*median)
    }

    /// Median, and median absolute deviation from it; `None` when empty.
    pub(super) fn median_and_deviation(&self) -> Option<(f32, f32)> {
        let mut sorted = self.values.clone();
        let median = median_of(&mut sorted)?;
        for value in &mut sorted {
            *value = (*value - median).abs();
        }
        Some((median, median_of(&mut sorted)?))
    }
}

/// Sorts `values` and returns the median, the lower of two middle values.
fn median_of(values: &mut [f32]) -> Option<f32> {
    values.sort_by(f32::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_last_values_in_order() {
        let mut window = Window::new(3);
        assert_eq!(window.median_and_deviation(), None);
        assert_eq!(window.median(), None);
        for (value, contents, statistics) in [
            (5.0, vec![5.0], (5.0, 0.0)),
            (1.0, vec![5.0, 1.0], (1.0, 0.0)),
            (2.0, vec![5.0, 1.0, 2.0], (2.0, 1.0)),
            (9.0, vec![1.0, 2.0, 9.0], (2.0, 1.0)),
            (9.5, vec![2.0, 9.0, 9.5], (9.0, 0.5)),
        ] {
            window.push(value);
            assert_eq!(window.iter().collect::<Vec<_>>(), contents);
            assert_eq!(window.median_and_deviation(), Some(statistics));
            assert_eq!(window.median(), Some(statistics.0));
            let json = serde_json::to_string(&window).unwrap();
            assert_eq!(serde_json::from_str::<Window>(&json).unwrap(), window);
        }
        assert!(window.is_full());
        assert_eq!(window.len(), 3);
    }
}
