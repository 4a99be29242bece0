//! First fit: places each lifetime at the lowest offset free of earlier placements.

use super::lifetime::{Lifetime, align};

/// A placed lifetime.
#[derive(Clone, Copy)]
struct Placed {
    first: usize,
    last: usize,
    begin: usize,
    end: usize,
}

/// Offsets of lifetimes placed in `order`, and the end of the highest.
///
/// The placed lifetimes are kept in order of their offsets, so one scan finds the lowest gap.
pub(super) fn first_fit(lifetimes: &[Lifetime], order: &[usize]) -> (Vec<usize>, usize) {
    let mut offsets = vec![0; lifetimes.len()];
    let mut total = 0;
    let mut placed: Vec<Placed> = Vec::with_capacity(lifetimes.len());
    for &index in order {
        let Lifetime { bytes, first, last } = lifetimes[index];
        if bytes == 0 {
            continue;
        }
        let mut begin = 0;
        for other in &placed {
            if begin + bytes <= other.begin {
                break;
            }
            if other.first <= last && first <= other.last {
                begin = begin.max(other.end);
            }
        }
        let end = begin + align(bytes);
        let at = placed.partition_point(|other| other.begin <= begin);
        placed.insert(at, Placed { first, last, begin, end });
        offsets[index] = begin;
        total = total.max(end);
    }
    (offsets, total)
}
