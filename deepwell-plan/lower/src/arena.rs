//! Packs values with disjoint lifetimes into the same memory.

mod first_fit;
mod lifetime;
mod stack;

use std::cmp::Reverse;

use self::first_fit::first_fit;
pub use self::lifetime::{Lifetime, align};
use self::stack::stack;

/// Result of packing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Offset of each lifetime, aligned to [`ALIGNMENT_BYTES`](deepwell_ir::ALIGNMENT_BYTES).
    pub offsets: Vec<usize>,
    /// End of the highest range.
    pub bytes: usize,
    /// Largest live bytes at one call: a lower bound of any packing.
    pub lower_bound_bytes: usize,
}

/// Largest number of lifetimes for which first fit is tried: its cost grows with the square.
const LIFETIMES_MAX: usize = 40_000;

/// Number of load classes in one of the orders.
const LOAD_CLASSES: usize = 16;

/// Packs lifetimes with several heuristics until the lower bound is reached, and keeps the smallest
/// result. The problem is NP-hard (dynamic storage allocation), so the result includes the bound.
///
/// - First fit, in several orders. Largest first is usually best. For similar sizes, placing first
///   the lifetimes at the fullest calls is better: they have the least choice.
/// - A stack, with low cost for any number of lifetimes.
pub fn pack(lifetimes: &[Lifetime]) -> Packing {
    let alive = alive_bytes(lifetimes);
    let lower_bound_bytes = alive.iter().copied().max().unwrap_or(0);
    let mut best: Option<(Vec<usize>, usize)> = None;
    let mut is_least = |packed: (Vec<usize>, usize)| {
        if best.as_ref().is_none_or(|(_, bytes)| packed.1 < *bytes) {
            best = Some(packed);
        }
        best.as_ref().is_some_and(|(_, bytes)| *bytes <= lower_bound_bytes)
    };
    let fits = lifetimes.len() <= LIFETIMES_MAX
        && orders(lifetimes, &alive).any(|order| is_least(first_fit(lifetimes, &order)));
    if !fits {
        is_least(stack(lifetimes, &alive));
    }
    let (offsets, bytes) = best.unwrap_or_default();
    Packing { offsets, bytes, lower_bound_bytes }
}

/// Orders of the lifetimes for first fit, computed lazily.
fn orders<'a>(
    lifetimes: &'a [Lifetime],
    alive: &'a [usize],
) -> impl Iterator<Item = Vec<usize>> + 'a {
    let size = |life: &Lifetime| Reverse(align(life.bytes));
    let area = |life: &Lifetime| Reverse(align(life.bytes) * life.calls());
    // Largest live bytes at a call of the lifetime.
    let load = |life: &Lifetime| alive[life.first..=life.last].iter().copied().max().unwrap_or(0);
    let class_bytes = (alive.iter().copied().max().unwrap_or(0) / LOAD_CLASSES).max(1);
    (0..5).map(move |way| {
        let key = |index: &usize| {
            let life = &lifetimes[*index];
            let (none, longest) = (Reverse(0), Reverse(life.calls()));
            match way {
                0 => (none, size(life), life.first),
                1 => (none, longest, life.first),
                2 => (none, area(life), life.first),
                3 => (Reverse(load(life)), longest, life.first),
                _ => (Reverse(load(life) / class_bytes), size(life), life.first),
            }
        };
        let mut order: Vec<usize> = (0..lifetimes.len()).collect();
        order.sort_by_cached_key(key);
        order
    })
}

/// The largest live bytes at a call.
pub fn peak_bytes(lifetimes: &[Lifetime]) -> usize {
    alive_bytes(lifetimes).into_iter().max().unwrap_or(0)
}

/// Live bytes at each call, up to the last call of a lifetime.
pub fn alive_bytes(lifetimes: &[Lifetime]) -> Vec<usize> {
    let calls = lifetimes.iter().map(|life| life.last + 1).max().unwrap_or(0);
    let mut change = vec![0isize; calls + 1];
    for life in lifetimes {
        change[life.first] += align(life.bytes) as isize;
        change[life.last + 1] -= align(life.bytes) as isize;
    }
    let sums = change.iter().scan(0, |alive, delta| {
        *alive += delta;
        Some(*alive as usize)
    });
    sums.take(calls).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use deepwell_ir::{ALIGNMENT_BYTES, ByteRange};

    use super::*;

    fn check(lifetimes: &[(usize, usize, usize)], bytes: usize) {
        let lifetimes: Vec<Lifetime> =
            lifetimes.iter().map(|&(bytes, first, last)| Lifetime { bytes, first, last }).collect();
        assert_eq!(pack(&lifetimes).bytes, bytes);
    }

    #[test]
    fn hand_made_packings() {
        check(&[], 0);
        check(&[(0, 0, 3)], 0);
        check(&[(64, 0, 0), (64, 1, 1)], 64);
        check(&[(64, 0, 1), (64, 1, 1)], 128);
        check(&[(1, 0, 1), (1, 1, 1)], 128);
        check(&[(128, 0, 1), (64, 1, 2), (128, 2, 3)], 192);
    }

    fn as_stack(lifetimes: &[Lifetime]) -> Packing {
        let alive = alive_bytes(lifetimes);
        let (offsets, bytes) = stack(lifetimes, &alive);
        let lower_bound_bytes = alive.iter().copied().max().unwrap_or(0);
        Packing { offsets, bytes, lower_bound_bytes }
    }

    /// Layers that each keep 64 bytes for the backward pass and use 128 more in both passes.
    #[test]
    fn a_stack_of_many_layers_reaches_the_bound() {
        let layers = 10_000;
        let kept = (0..layers).map(|i| Lifetime { bytes: 64, first: i, last: 2 * layers - i });
        let used = (0..2 * layers).map(|i| Lifetime { bytes: 128, first: i, last: i });
        let lifetimes: Vec<Lifetime> = kept.chain(used).collect();
        let packing = pack(&lifetimes);
        assert_eq!(packing.lower_bound_bytes, layers * 64 + 128);
        assert_eq!(packing.bytes, packing.lower_bound_bytes);
    }

    /// Four lifetimes for each layer, three of which overlap the next ones.
    fn lives_that_do_not_nest(layers: usize) -> Vec<Lifetime> {
        let kept = (0..layers).map(|i| Lifetime { bytes: 64, first: 3 * i, last: 6 * layers - i });
        let used = (0..3 * layers).map(|i| {
            let bytes = [4096, 1024, 2048][i % 3];
            Lifetime { bytes, first: i, last: i + 2 + i % 2 }
        });
        kept.chain(used).collect()
    }

    /// Regression: steps of more than 2,000 values were packed as a stack only, which suits nested
    /// lifetimes. Calls on several streams have overlapping lifetimes. The trainer's test
    /// `predicted_peaks` has the steps of presets.
    #[test]
    fn many_lives_that_do_not_nest_are_packed_by_first_fit() {
        let lifetimes = lives_that_do_not_nest(1000);
        let packing = pack(&lifetimes);
        let over = packing.bytes as f64 / packing.lower_bound_bytes as f64;
        assert!(over <= 1.05, "{} of {}", packing.bytes, packing.lower_bound_bytes);
        assert!(as_stack(&lifetimes).bytes > packing.bytes);
    }

    /// First fit would place the lifetimes better, at a cost that grows with the square.
    #[test]
    fn too_many_lives_are_packed_as_a_stack() {
        let lifetimes = lives_that_do_not_nest(LIFETIMES_MAX / 4 + 1);
        assert_eq!(pack(&lifetimes), as_stack(&lifetimes));
    }

    proptest! {
        #[test]
        fn ranges_alive_together_never_overlap(
            raw in prop::collection::vec((0usize..5000, 0usize..20, 0usize..20), 0..60)
        ) {
            let lifetimes: Vec<Lifetime> = raw
                .iter()
                .map(|&(bytes, a, b)| Lifetime { bytes, first: a.min(b), last: a.max(b) })
                .collect();
            for packing in [pack(&lifetimes), as_stack(&lifetimes)] {
            prop_assert!(packing.bytes >= packing.lower_bound_bytes);
            for (i, a) in lifetimes.iter().enumerate() {
                prop_assert_eq!(packing.offsets[i] % ALIGNMENT_BYTES, 0);
                prop_assert!(packing.offsets[i] + a.bytes <= packing.bytes);
                for (j, b) in lifetimes.iter().enumerate().skip(i + 1) {
                    if a.first <= b.last && b.first <= a.last {
                        let a = ByteRange { offset: packing.offsets[i], bytes: a.bytes };
                        let b = ByteRange { offset: packing.offsets[j], bytes: b.bytes };
                        prop_assert!(!a.overlaps(&b));
                    }
                }
            }
            }
        }
    }
}
