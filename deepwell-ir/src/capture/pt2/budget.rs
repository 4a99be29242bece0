//! How much of what a graph computes from sizes and buffers is kept.

use std::rc::{Rc, Weak};

use super::constant::{Constant, ELEMENTS_MAX};

/// Most elements that are kept at a time, 512 MiB: four masks of sequences of 4096.
const KEPT_MAX: usize = 4 * ELEMENTS_MAX;

/// Counts the elements of known values that are alive. A file of a few bytes may ask for any number
/// of them.
#[derive(Debug, Default)]
pub(super) struct Budget {
    values: Vec<Weak<Vec<f64>>>,
    /// Of `values` as they were counted; some may be gone since.
    elements: usize,
}

impl Budget {
    /// Counts a value in, if there is room for it.
    pub(super) fn admits(&mut self, constant: &Constant) -> bool {
        if self.elements + constant.count() > KEPT_MAX {
            self.values.retain(|value| value.strong_count() > 0);
            let alive = self.values.iter().filter_map(Weak::upgrade);
            self.elements = alive.map(|value| value.len()).sum();
        }
        let fits = self.elements + constant.count() <= KEPT_MAX;
        if fits {
            self.values.push(Rc::downgrade(&constant.values));
            self.elements += constant.count();
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_gone_make_room() {
        let mut budget = Budget::default();
        let quarter = || Constant::new(vec![ELEMENTS_MAX], vec![0.0; ELEMENTS_MAX], true);
        let kept: Vec<Constant> = (0..3).map(|_| quarter()).collect();
        assert!(kept.iter().all(|constant| budget.admits(constant)));
        for _ in 0..2 {
            assert!(budget.admits(&quarter()), "the one before is gone");
        }
        let last = quarter();
        assert!(budget.admits(&last));
        assert!(!budget.admits(&Constant::scalar(1.0, true)));
        drop(last);
        assert!(budget.admits(&Constant::scalar(1.0, true)));
    }
}
