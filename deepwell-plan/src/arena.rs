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

/// Lifetimes up to which every order is tried: their cost grows with the square of the number.
const FEW: usize = 2000;

/// Packs lifetimes: several ways are tried, the smallest result is kept. The problem is NP-hard
/// (dynamic storage allocation), so the bound is given beside the result.
///
/// - As a stack, which costs little for any number of lifetimes.
/// - Of few lifetimes also each in turn at the lowest offset where no range with a meeting life is.
///   Largest first is the usual winner; the other orders help where sizes are alike.
pub fn pack(lifetimes: &[Lifetime]) -> Packing {
    type Order = fn(&Lifetime) -> (std::cmp::Reverse<usize>, usize);
    let orders: [Order; 3] = [
        |life| (std::cmp::Reverse(align(life.bytes)), life.first),
        |life| (std::cmp::Reverse(life.last - life.first), life.first),
        |life| (std::cmp::Reverse(align(life.bytes) * (life.last - life.first + 1)), life.first),
    ];
    let count = lifetimes.iter().filter(|life| life.bytes > 0).count();
    let greedy = orders.iter().filter(|_| count <= FEW).map(|order| place(lifetimes, *order));
    let mut best: Option<(Vec<usize>, usize)> = None;
    for packed in greedy.chain(std::iter::once_with(|| stack(lifetimes))) {
        if best.as_ref().is_none_or(|(_, bytes)| packed.1 < *bytes) {
            best = Some(packed);
        }
    }
    let (offsets, bytes) = best.unwrap_or_default();
    Packing { offsets, bytes, lower_bound_bytes: lower_bound(lifetimes) }
}

/// Puts what is alive at the fullest call one above the other in the order of birth, and all else
/// above what is alive of it then.
///
/// What lives at one call must lie apart in any packing, so nothing is lost there. In a training
/// step these are the activations that the backward pass reads, last made and first freed.
fn stack(lifetimes: &[Lifetime]) -> (Vec<usize>, usize) {
    let calls = lifetimes.iter().map(|life| life.last + 1).max().unwrap_or(0);
    let alive = alive_bytes(lifetimes, calls);
    let fullest = (0..calls).max_by_key(|&call| alive[call]).unwrap_or(0);
    let meets = |life: &Lifetime| life.first <= fullest && fullest <= life.last;
    let (mut in_stack, mut others): (Vec<usize>, Vec<usize>) = (0..lifetimes.len())
        .filter(|&index| lifetimes[index].bytes > 0)
        .partition(|&index| meets(&lifetimes[index]));
    in_stack.sort_by_key(|&i| (lifetimes[i].first, std::cmp::Reverse(lifetimes[i].last)));
    let mut offsets = vec![0; lifetimes.len()];
    let mut top = 0;
    // Where the stack ends at each call: rising up to the fullest call, falling behind it.
    let mut height = vec![0; calls];
    for &index in &in_stack {
        let life = &lifetimes[index];
        offsets[index] = top;
        top += align(life.bytes);
        height[life.first] = top;
        height[life.last] = height[life.last].max(top);
    }
    for call in 1..=fullest.min(calls.saturating_sub(1)) {
        height[call] = height[call].max(height[call - 1]);
    }
    for call in (fullest..calls.saturating_sub(1)).rev() {
        height[call] = height[call].max(height[call + 1]);
    }
    others.sort_by_key(|&i| (std::cmp::Reverse(align(lifetimes[i].bytes)), lifetimes[i].first));
    let mut total = top;
    let mut placed = Placed { lists: vec![Default::default(); calls] };
    for index in others {
        let life = &lifetimes[index];
        // A life lies before the fullest call or behind it, where the stack only rises or falls.
        let base = if life.last < fullest { height[life.last] } else { height[life.first] };
        let ranges = placed.meeting(life, lifetimes, &offsets);
        offsets[index] = lowest(base, life.bytes, ranges);
        total = total.max(offsets[index] + align(life.bytes));
        placed.add(index, life);
    }
    (offsets, total)
}

/// Lives that have a place, by the calls that they begin at and that they live at.
struct Placed {
    lists: Vec<[Vec<usize>; 2]>,
}

impl Placed {
    fn add(&mut self, index: usize, life: &Lifetime) {
        self.lists[life.first][0].push(index);
        for lists in &mut self.lists[life.first..=life.last] {
            lists[1].push(index);
        }
    }

    /// The ranges of all that live at some call of `life`.
    fn meeting(
        &self,
        life: &Lifetime,
        lifetimes: &[Lifetime],
        offsets: &[usize],
    ) -> Vec<ByteRange> {
        let later = self.lists[life.first..=life.last].iter().skip(1).flat_map(|lists| &lists[0]);
        self.lists[life.first][1]
            .iter()
            .chain(later)
            .map(|&other| ByteRange { offset: offsets[other], bytes: lifetimes[other].bytes })
            .collect()
    }
}

/// The lowest offset from `base` on where `bytes` bytes meet none of the ranges.
fn lowest(base: usize, bytes: usize, mut ranges: Vec<ByteRange>) -> usize {
    ranges.sort_by_key(|range| range.offset);
    let mut offset = base;
    for range in ranges.iter().filter(|range| range.end() > base) {
        if offset + bytes <= range.offset {
            break;
        }
        offset = offset.max(align(range.end()));
    }
    offset
}

fn place<K: Ord>(lifetimes: &[Lifetime], key: impl Fn(&Lifetime) -> K) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&index| key(&lifetimes[index]));
    let mut offsets = vec![0; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(lifetimes.len());
    let mut total = 0;
    for index in order {
        let life = &lifetimes[index];
        let neighbours = placed
            .iter()
            .filter(|&&other| {
                lifetimes[other].first <= life.last && life.first <= lifetimes[other].last
            })
            .map(|&other| ByteRange { offset: offsets[other], bytes: lifetimes[other].bytes })
            .collect();
        offsets[index] = lowest(0, life.bytes, neighbours);
        total = total.max(offsets[index] + life.bytes);
        if life.bytes > 0 {
            placed.push(index);
        }
    }
    (offsets, align(total))
}

fn lower_bound(lifetimes: &[Lifetime]) -> usize {
    let calls = lifetimes.iter().map(|life| life.last + 1).max().unwrap_or(0);
    alive_bytes(lifetimes, calls).into_iter().max().unwrap_or(0)
}

/// Bytes that are alive at each call.
fn alive_bytes(lifetimes: &[Lifetime], calls: usize) -> Vec<usize> {
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
        let (offsets, bytes) = stack(lifetimes);
        Packing { offsets, bytes, lower_bound_bytes: lower_bound(lifetimes) }
    }

    /// Layers that each keep 64 bytes for the backward and use 128 beside, forward and backward.
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
