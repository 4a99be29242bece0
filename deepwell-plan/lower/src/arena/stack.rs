//! Packs the values of a training step as a stack: last in, first out.

use std::cmp::Reverse;

use deepwell_ir::ByteRange;

use super::lifetime::{Lifetime, align, lowest};

/// Stacks the values live at the fullest call in order of birth, and places all other values above
/// the part of the stack live at the same time.
///
/// Values live at the same call are disjoint in any packing, so the stack wastes no memory. In a
/// training step these values are the activations for the backward pass, last in, first out.
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
    // Height of the stack at each call: rising up to the fullest call, falling after it.
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
        // Every other life is entirely before or after the fullest call, where the height only
        // rises or falls.
        let base = if life.last < fullest { height[life.last] } else { height[life.first] };
        let mut ranges = placed.meeting(life, lifetimes, &offsets);
        offsets[index] = lowest(base, life.bytes, &mut ranges);
        total = total.max(offsets[index] + align(life.bytes));
        placed.add(index, life);
    }
    (offsets, total)
}

/// Placed lifetimes, by begin and by live calls.
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

    /// The ranges of all placed lifetimes overlapping `life`.
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
