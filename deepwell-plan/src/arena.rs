//! Places values whose lives do not meet on the same bytes.

use deepwell_ir::{ALIGNMENT_BYTES, ByteRange};

/// Something that wants bytes from call `first` to call `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Size.
    pub bytes: usize,
    /// First call that touches it.
    pub first: usize,
    /// Last call that touches it.
    pub last: usize,
}

/// Where everything went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Offset of each lifetime, aligned to [`ALIGNMENT_BYTES`].
    pub offsets: Vec<usize>,
    /// End of the highest range.
    pub bytes: usize,
    /// Largest sum of sizes alive at one call: no packing can do with less.
    pub lower_bound_bytes: usize,
}

/// Rounds up to the alignment of the arena.
pub fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT_BYTES)
}

/// Packs lifetimes: several greedy orders are tried, the smallest result is kept.
///
/// Each order puts a range at the lowest offset where no range with a meeting life is. Largest
/// first is the usual winner; the others help where sizes are alike. The problem is NP-hard
/// (dynamic storage allocation), so the bound is given beside the result.
pub fn pack(lifetimes: &[Lifetime]) -> Packing {
    type Order = fn(&Lifetime) -> (std::cmp::Reverse<usize>, usize);
    let orders: [Order; 3] = [
        |life| (std::cmp::Reverse(align(life.bytes)), life.first),
        |life| (std::cmp::Reverse(life.last - life.first), life.first),
        |life| (std::cmp::Reverse(align(life.bytes) * (life.last - life.first + 1)), life.first),
    ];
    let mut best = place(lifetimes, orders[0]);
    for order in &orders[1..] {
        let other = place(lifetimes, *order);
        if other.1 < best.1 {
            best = other;
        }
    }
    Packing { offsets: best.0, bytes: best.1, lower_bound_bytes: lower_bound(lifetimes) }
}

fn place<K: Ord>(lifetimes: &[Lifetime], key: impl Fn(&Lifetime) -> K) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&index| key(&lifetimes[index]));
    let mut offsets = vec![0; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(lifetimes.len());
    let mut total = 0;
    for index in order {
        let life = &lifetimes[index];
        let mut neighbours: Vec<ByteRange> = placed
            .iter()
            .filter(|&&other| {
                lifetimes[other].first <= life.last && life.first <= lifetimes[other].last
            })
            .map(|&other| ByteRange { offset: offsets[other], bytes: lifetimes[other].bytes })
            .collect();
        neighbours.sort_by_key(|range| range.offset);
        let mut offset = 0;
        for range in neighbours {
            if offset + life.bytes <= range.offset {
                break;
            }
            offset = offset.max(align(range.end()));
        }
        offsets[index] = offset;
        total = total.max(offset + life.bytes);
        if life.bytes > 0 {
            placed.push(index);
        }
    }
    (offsets, align(total))
}

fn lower_bound(lifetimes: &[Lifetime]) -> usize {
    let calls = lifetimes.iter().map(|life| life.last + 1).max().unwrap_or(0);
    let mut change = vec![0isize; calls + 1];
    for life in lifetimes {
        change[life.first] += align(life.bytes) as isize;
        change[life.last + 1] -= align(life.bytes) as isize;
    }
    let mut alive = 0;
    let mut bound = 0;
    for delta in change {
        alive += delta;
        bound = bound.max(alive);
    }
    bound as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn ranges_alive_together_never_overlap(
            raw in prop::collection::vec((0usize..5000, 0usize..20, 0usize..20), 0..60)
        ) {
            let lifetimes: Vec<Lifetime> = raw
                .iter()
                .map(|&(bytes, a, b)| Lifetime { bytes, first: a.min(b), last: a.max(b) })
                .collect();
            let packing = pack(&lifetimes);
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
