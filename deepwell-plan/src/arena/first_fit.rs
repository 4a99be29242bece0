//! First fit: places each lifetime at the lowest offset free of earlier placements.

use deepwell_ir::ByteRange;

use super::{Lifetime, align, lowest};

/// The overlapping lifetimes of each lifetime of more than zero bytes.
pub(super) struct Neighbours {
    /// Begin of each lifetime's neighbours in `of_all`, and the end of the last.
    begins: Vec<usize>,
    of_all: Vec<u32>,
}

impl Neighbours {
    /// Returns `None` for more than `pairs_max` overlapping pairs.
    pub(super) fn of(lifetimes: &[Lifetime], pairs_max: usize) -> Option<Neighbours> {
        let mut by_birth: Vec<usize> =
            (0..lifetimes.len()).filter(|&index| lifetimes[index].bytes > 0).collect();
        by_birth.sort_by_key(|&index| lifetimes[index].first);
        let mut lists: Vec<Vec<u32>> = vec![Vec::new(); lifetimes.len()];
        let (mut alive, mut pairs): (Vec<usize>, usize) = (Vec::new(), 0);
        for index in by_birth {
            alive.retain(|&other| lifetimes[other].meets(&lifetimes[index]));
            pairs += alive.len();
            if pairs > pairs_max {
                return None;
            }
            for &other in &alive {
                lists[index].push(other as u32);
                lists[other].push(index as u32);
            }
            alive.push(index);
        }
        let begins = lists.iter().scan(0, |end, list| {
            *end += list.len();
            Some(*end)
        });
        let begins = [0].into_iter().chain(begins).collect();
        Some(Neighbours { begins, of_all: lists.concat() })
    }

    fn of_one(&self, index: usize) -> &[u32] {
        &self.of_all[self.begins[index]..self.begins[index + 1]]
    }
}

/// Offsets of lifetimes placed in `order`, and the end of the highest.
pub(super) fn first_fit(
    lifetimes: &[Lifetime],
    order: &[usize],
    neighbours: &Neighbours,
) -> (Vec<usize>, usize) {
    let mut offsets: Vec<Option<usize>> = vec![None; lifetimes.len()];
    let mut total = 0;
    let mut ranges = Vec::new();
    for &index in order {
        ranges.clear();
        ranges.extend(neighbours.of_one(index).iter().filter_map(|&other| {
            let offset = offsets[other as usize]?;
            Some(ByteRange { offset, bytes: lifetimes[other as usize].bytes })
        }));
        let bytes = lifetimes[index].bytes;
        let offset = lowest(0, bytes, &mut ranges);
        total = total.max(offset + align(bytes));
        offsets[index] = Some(offset);
    }
    (offsets.into_iter().map(Option::unwrap_or_default).collect(), total)
}
