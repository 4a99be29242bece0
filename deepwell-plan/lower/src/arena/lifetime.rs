//! Lifetimes of values, and places for values.

use deepwell_ir::{ALIGNMENT_BYTES, ByteRange};

/// Size and lifetime of an allocation, from call `first` to call `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Size.
    pub bytes: usize,
    /// First call using the value.
    pub first: usize,
    /// Last call using the value.
    pub last: usize,
}

impl Lifetime {
    /// Number of calls in the lifetime.
    pub(super) fn calls(&self) -> usize {
        self.last - self.first + 1
    }
}

/// Rounds up to the alignment of the arena.
pub fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT_BYTES)
}

/// The lowest offset from `base` on at which `bytes` bytes overlap none of the ranges.
pub(super) fn lowest(base: usize, bytes: usize, ranges: &mut [ByteRange]) -> usize {
    ranges.sort_unstable_by_key(|range| range.offset);
    let mut offset = base;
    for range in ranges.iter().filter(|range| range.end() > base) {
        if offset + bytes <= range.offset {
            break;
        }
        offset = offset.max(align(range.end()));
    }
    offset
}
