//! Packs the values of a training step as a stack: last made, first freed.

use std::cmp::Reverse;

use deepwell_ir::ByteRange;

use super::{Lifetime, align, lowest};

/// Puts what is alive at the fullest call one above the other in the order of birth, and all else
/// above what is alive of it then.
///
/// What lives at one call must lie apart in any packing, so nothing is lost there. In a training
/// step these are the activations that the backward pass reads, last made and first freed.
pub(super) fn stack(lifetimes: &[Lifetime], alive: &[usize]) -> (Vec<usize>, usize) {
    let calls = alive.len();
    let fullest = (0..calls).max_by_key(|&call| alive[call]).unwrap_or(0);
    let meets = |life: &Lifetime| life.first <= fullest && fullest <= life.last;
    let (mut in_stack, mut others): (Vec<usize>, Vec<usize>) = (0..lifetimes.len())
        .filter(|&index| lifetimes[index].bytes > 0)
        .partition(|&index| meets(&lifetimes[index]));
    in_stack.sort_by_key(|&i| (lifetimes[i].first, Reverse(lifetimes[i].last)));
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
    others.sort_by_key(|&i| (Reverse(align(lifetimes[i].bytes)), lifetimes[i].first));
    let mut total = top;
    let mut placed = Placed { lists: vec![Default::default(); calls] };
    for index in others {
        let life = &lifetimes[index];
        // A life lies before the fullest call or behind it, where the stack only rises or falls.
        let base = if life.last < fullest { height[life.last] } else { height[life.first] };
        let mut ranges = placed.meeting(life, lifetimes, &offsets);
        offsets[index] = lowest(base, life.bytes, &mut ranges);
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
