//! Optimizer state of which this rank has one slice of each bucket.
//!
//! Between steps the masters are whole on every rank, where the weights' body gathers them, so that
//! whoever reads or writes them sees no slices. Before the body runs on masters that the host wrote,
//! each rank takes its slices from there. Moments are nowhere whole: rank 0 collects them for a
//! checkpoint.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::{ByteRange, Shard, ValueId};

use super::Engine;
use crate::TrainError;

/// One of the two moments of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Of the gradients.
    First,
    /// Of their squares.
    Second,
}

impl Moment {
    /// Both.
    pub(crate) const ALL: [Moment; 2] = [Moment::First, Moment::Second];

    /// The name of a parameter's moment.
    pub(crate) fn name_of(self, parameter: &str) -> String {
        match self {
            Moment::First => format!("moment1.{parameter}"),
            Moment::Second => format!("moment2.{parameter}"),
        }
    }

    fn slice_of(self, shard: &Shard) -> ValueId {
        match self {
            Moment::First => shard.first_moment,
            Moment::Second => shard.second_moment,
        }
    }
}

/// A moment of a parameter, of all ranks.
#[derive(Clone, Debug)]
pub(crate) struct WholeMoment {
    /// Which parameter.
    pub(crate) parameter: usize,
    /// Which moment.
    pub(crate) moment: Moment,
    /// Its elements, row-major.
    pub(crate) values: Vec<f32>,
}

/// What a slice has of a parameter: elements of the slice, and of the parameter.
fn part(
    slice: Range<usize>,
    offset: usize,
    elements: usize,
) -> Option<(Range<usize>, Range<usize>)> {
    let (begin, end) = (slice.start.max(offset), slice.end.min(offset + elements));
    (begin < end).then(|| (begin - slice.start..end - slice.start, begin - offset..end - offset))
}

impl Engine {
    /// Elements of the bucket that the slice of a rank has.
    fn slice(&self, shard: &Shard, rank: usize) -> Range<usize> {
        let elements = self.program().value(shard.master).elements();
        let place = self.plan.parallel.data_place(rank);
        place * elements..(place + 1) * elements
    }

    /// Takes this rank's slices of the masters from where they are whole.
    pub(super) fn scatter_masters(&mut self) -> Result<(), TrainError> {
        for shard in self.program().shards.clone() {
            let own = self.slice(&shard, self.rank());
            let mut values = vec![0f32; own.len()];
            for &(index, offset) in &shard.parameters {
                let master = self.program().parameters[index].master;
                let value = self.program().value(master);
                let Some((of_slice, of_parameter)) = part(own.clone(), offset, value.elements())
                else {
                    continue;
                };
                let range = ByteRange {
                    offset: value.range.offset + of_parameter.start * size_of::<f32>(),
                    bytes: of_parameter.len() * size_of::<f32>(),
                };
                let bytes = cast_slice_mut(&mut values[of_slice]);
                self.executor.backend_mut().read(range, bytes)?;
            }
            self.write_value(shard.master, cast_slice(&values))?;
        }
        Ok(())
    }

    /// Writes zeros to the moments that this rank has slices of.
    pub(super) fn clear_moment_slices(&mut self) -> Result<(), TrainError> {
        for shard in self.program().shards.clone() {
            let zeros = vec![0f32; self.program().value(shard.master).elements()];
            for moment in Moment::ALL {
                self.write_value(moment.slice_of(&shard), cast_slice(&zeros))?;
            }
        }
        Ok(())
    }

    /// Writes this rank's part of a moment, given whole, into its slice.
    pub(crate) fn write_moment(
        &mut self,
        parameter: usize,
        moment: Moment,
        whole: &[f32],
    ) -> Result<(), TrainError> {
        for shard in self.program().shards.clone() {
            let place = shard.parameters.iter().find(|(index, _)| *index == parameter);
            let Some(&(_, offset)) = place else { continue };
            let own = self.slice(&shard, self.rank());
            let Some((of_slice, of_parameter)) = part(own, offset, whole.len()) else { continue };
            let range = self.program().value(moment.slice_of(&shard)).range;
            let range = ByteRange {
                offset: range.offset + of_slice.start * size_of::<f32>(),
                bytes: of_slice.len() * size_of::<f32>(),
            };
            self.executor.backend_mut().write(range, cast_slice(&whole[of_parameter]))?;
        }
        Ok(())
    }

    /// The moments that ranks have slices of, whole: on rank 0, which the others send theirs to.
    /// All ranks ask at the same time.
    pub(crate) fn collect_moments(&mut self) -> Result<Vec<WholeMoment>, TrainError> {
        let mut whole = Vec::new();
        for shard in self.program().shards.clone() {
            for moment in Moment::ALL {
                let mut own = vec![0f32; self.program().value(shard.master).elements()];
                self.read_value(moment.slice_of(&shard), cast_slice_mut(&mut own))?;
                let slices = self.peers.collect(&own)?;
                if slices.is_empty() {
                    continue;
                }
                for &(parameter, offset) in &shard.parameters {
                    let master = self.program().parameters[parameter].master;
                    let mut values = vec![0f32; self.program().value(master).elements()];
                    for (rank, slice) in slices.iter().enumerate() {
                        let range = self.slice(&shard, rank);
                        if let Some((from, to)) = part(range, offset, values.len()) {
                            values[to].copy_from_slice(&slice[from]);
                        }
                    }
                    whole.push(WholeMoment { parameter, moment, values });
                }
            }
        }
        whole.sort_by_key(|it| (it.parameter, it.moment == Moment::Second));
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cut_parameters_anywhere() {
        for (slice, offset, elements, expected) in [
            (0..16, 0, 10, Some((0..10, 0..10))),
            (0..16, 10, 10, Some((10..16, 0..6))),
            (16..32, 10, 10, Some((0..4, 6..10))),
            (16..32, 0, 64, Some((0..16, 16..32))),
            (16..32, 0, 16, None),
            (16..32, 32, 5, None),
            (16..32, 20, 0, None),
        ] {
            assert_eq!(part(slice.clone(), offset, elements), expected, "{slice:?} {offset}");
        }
    }
}
