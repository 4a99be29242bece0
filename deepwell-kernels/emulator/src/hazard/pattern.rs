//! How bytes are permuted in shared memory, by those who write them and those who read them.
//!
//! A tensor copy writes a box by the swizzle of its map, and a matrix instruction reads by that of
//! its descriptor. Both are legal whatever the other is, and where they differ the result is of
//! other elements.

use std::ops::BitOr;

use super::accesses::Found;
use super::cell::Record;
use super::operations::Operation;
use super::{Cluster, Direction, HazardKind, Place, Tracker};

/// Swizzles of shared memory, as a set; the empty set says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patterns(u8);

impl Patterns {
    /// Bytes in order.
    pub const IN_ORDER: Patterns = Patterns(1);
    /// Within 32 bytes.
    pub const BYTES_32: Patterns = Patterns(2);
    /// Within 64 bytes.
    pub const BYTES_64: Patterns = Patterns(4);
    /// Within 128 bytes.
    pub const BYTES_128: Patterns = Patterns(8);
    /// Within 128 bytes, 32 bytes at a time.
    pub const BYTES_128_ATOM_32: Patterns = Patterns(16);
    /// Any that matrix instructions do not have.
    pub const OTHER: Patterns = Patterns(32);

    fn is_known(self) -> bool {
        self.0 != 0
    }

    fn meets(self, other: Patterns) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Patterns {
    type Output = Patterns;

    fn bitor(self, other: Patterns) -> Patterns {
        Patterns(self.0 | other.0)
    }
}

impl Tracker {
    /// The swizzles by which an operation writes or reads shared memory: one of a tensor copy,
    /// those of both matrices of an MMA.
    pub fn has_patterns(&mut self, operation: Operation, patterns: Patterns) {
        self.operations[operation.0 as usize].patterns = patterns;
    }
}

/// What an operation with `patterns` finds in a cell of shared memory, or leaves there.
pub(super) fn touch(
    clusters: &mut [Cluster],
    cluster: u32,
    place: Place,
    patterns: Patterns,
    direction: Direction,
) -> Option<(HazardKind, Record)> {
    let Place::Shared { rank, offset } = place else { return None };
    let shared = clusters[cluster as usize].shared.get_mut(rank as usize)?;
    let index = (u64::from(offset) / super::shadow::CELL_BYTES) as usize;
    if direction == Direction::Write {
        shared.set_pattern(index, patterns);
        return None;
    }
    let written = shared.pattern(index);
    if !patterns.is_known() || !written.is_known() || written.meets(patterns) {
        return None;
    }
    let kind = match written == Patterns::IN_ORDER {
        // Bytes may have been permuted where they came from.
        true => HazardKind::SwizzleMissing,
        false => HazardKind::SwizzleMismatch,
    };
    Some((kind, *shared.cell(index).last_write()))
}

/// As a conflict of two accesses.
pub(super) fn found((kind, record): (HazardKind, Record), lanes: u32, place: Place) -> Found {
    Found::new(kind, record, true, lanes, place)
}
