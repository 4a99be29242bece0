//! Slices of sharded optimizer state.

use std::ops::Range;

use deepwell_ir::{Program, Shard};
use deepwell_plan::Parallel;

/// Intersection of a slice with a parameter: elements of the slice, and elements of the parameter.
pub(crate) fn part(
    slice: Range<usize>,
    offset: usize,
    elements: usize,
) -> Option<(Range<usize>, Range<usize>)> {
    let begin = slice.start.max(offset);
    let end = slice.end.min(offset + elements);
    (begin < end).then(|| (begin - slice.start..end - slice.start, begin - offset..end - offset))
}

/// Elements of a shard's bucket in the slice of a rank. The bucket is split over the ranks with the
/// same experts, or over all data-parallel ranks.
pub(crate) fn slice_of(
    program: &Program,
    parallel: Parallel,
    shard: &Shard,
    rank: usize,
) -> Range<usize> {
    let first = shard.parameters.first();
    let split = first.and_then(|(index, _)| program.parameters[*index].split);
    let place = parallel.shard_place(rank, split.map(|split| split.over).unwrap_or_default());
    let elements = program.value(shard.master).elements();
    place * elements..(place + 1) * elements
}
