//! Swizzle patterns of shared memory, for writers and readers.
//!
//! A tensor copy writes a box with the swizzle of its tensor map; a matrix instruction reads with
//! the swizzle of its descriptor. Each is legal by itself. If the swizzles differ, the instruction
//! reads the wrong elements.

use std::ops::BitOr;

use super::accesses::Found;
use super::cell::Record;
use super::operations::Operation;
use super::{Cluster, Direction, HazardKind, Place, Tracker};

/// A set of swizzles of shared memory; the empty set is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patterns(u8);

impl Patterns {
    /// No swizzle.
    pub const IN_ORDER: Patterns = Patterns(1);
    /// Within 32 bytes.
    pub const BYTES_32: Patterns = Patterns(2);
    /// Within 64 bytes.
    pub const BYTES_64: Patterns = Patterns(4);
    /// Within 128 bytes.
    pub const BYTES_128: Patterns = Patterns(8);
    /// Within 128 bytes, in atoms of 32 bytes.
    pub const BYTES_128_ATOM_32: Patterns = Patterns(16);
    /// Any swizzle without a matrix-instruction equivalent.
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
    /// Sets the swizzles with which an operation accesses shared memory: one for a tensor copy,
    /// those of both operands for an MMA.
    pub fn has_patterns(&mut self, operation: Operation, patterns: Patterns) {
        self.operations[operation.0 as usize].patterns = patterns;
    }
}

/// Checks or records the swizzle of a cell that an operation with `patterns` accesses.
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
        // The bytes may have been swizzled already at the source of the copy.
        true => HazardKind::SwizzleMissing,
        false => HazardKind::SwizzleMismatch,
    };
    Some((kind, *shared.cell(index).last_write()))
}

/// Converts the result of [`touch`] to a conflict.
pub(super) fn found((kind, record): (HazardKind, Record), lanes: u32, place: Place) -> Found {
    Found::new(kind, record, true, lanes, place)
}
