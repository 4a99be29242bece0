//! Memory limit for values computed from sizes and buffers.

use std::rc::{Rc, Weak};

use super::constant::{Constant, ELEMENTS_MAX};

/// Maximum number of elements kept at a time, 512 MiB: four masks of sequences of 4096.
const KEPT_MAX: usize = 4 * ELEMENTS_MAX;

/// Counts the elements of known values in memory, because even a small file may request any number
/// of elements.
#[derive(Debug, Default)]
pub(super) struct Budget {
    values: Vec<Weak<Vec<f64>>>,
    /// Total of `values` when counted; some may be freed already.
    elements: usize,
}

impl Budget {
    /// Counts a value, if within the limit.
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
