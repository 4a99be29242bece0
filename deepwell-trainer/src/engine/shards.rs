//! Optimizer state of which this rank has one slice of each bucket.
//!
//! Between steps the masters are whole on every rank, where the weights' body gathers them, so
//! that whoever reads or writes them sees no slices. Before the body runs on masters that the host
//! wrote, each rank takes its slices from there. Moments are nowhere whole: each rank saves and
//! loads its own. Masters that are gathered where a layer needs them (ZeRO 2 and 3) are nowhere
//! whole either: who writes them writes slices.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut, pod_collect_to_vec};
use deepwell_ir::{ByteRange, DType, ParameterState, Program, Shard, ValueId};
use deepwell_plan::Parallel;

use super::Engine;
use crate::TrainError;

/// One of the two moments of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

/// What a slice has of a parameter: elements of the slice, and of the parameter.
pub(crate) fn part(
    slice: Range<usize>,
    offset: usize,
    elements: usize,
) -> Option<(Range<usize>, Range<usize>)> {
    let (begin, end) = (slice.start.max(offset), slice.end.min(offset + elements));
    (begin < end).then(|| (begin - slice.start..end - slice.start, begin - offset..end - offset))
}

/// Whether slices alone have the master of a parameter: it is whole within a step at most, or a
/// copy in BF16 is.
pub(crate) fn is_gathered(program: &Program, state: &ParameterState) -> bool {
    let master = program.value(state.master);
    !master.memory.is_persistent() || master.dtype != DType::F32
}

/// Elements of the bucket of a shard that the slice of a rank has: it is of the ranks with the same
/// experts, or of all that split the batch.
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

impl Engine {
    /// Elements of the bucket that the slice of a rank has.
    fn slice(&self, shard: &Shard, rank: usize) -> Range<usize> {
        slice_of(self.program(), self.plan.parallel, shard, rank)
    }

    /// Whether slices alone have the masters of a shard.
    fn is_gathered(&self, shard: &Shard) -> bool {
        let program = self.program();
        let first = shard.parameters.first();
        first.is_some_and(|(index, _)| is_gathered(program, &program.parameters[*index]))
    }

    /// Takes this rank's slices of the masters from where they are whole.
    pub(super) fn scatter_masters(&mut self) -> Result<(), TrainError> {
        for shard in self.program().shards.clone() {
            if self.is_gathered(&shard) {
                continue;
            }
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

    /// Writes this rank's part of a tensor of a parameter into its slice.
    fn write_slice(
        &mut self,
        parameter: usize,
        slice_of: &dyn Fn(&Shard) -> ValueId,
        whole: &[f32],
    ) -> Result<(), TrainError> {
        for shard in self.program().shards.clone() {
            let place = shard.parameters.iter().find(|(index, _)| *index == parameter);
            let Some(&(_, offset)) = place else { continue };
            let own = self.slice(&shard, self.rank());
            let Some((of_slice, of_parameter)) = part(own, offset, whole.len()) else { continue };
            let range = self.program().value(slice_of(&shard)).range;
            let range = ByteRange {
                offset: range.offset + of_slice.start * size_of::<f32>(),
                bytes: of_slice.len() * size_of::<f32>(),
            };
            self.executor.backend_mut().write(range, cast_slice(&whole[of_parameter]))?;
        }
        Ok(())
    }

    /// Reads this rank's part of the master of a parameter, which slices alone have: its elements
    /// in their places, others zero.
    pub(super) fn read_master_slice(&mut self, parameter: usize) -> Result<Vec<f32>, TrainError> {
        let master = self.program().parameters[parameter].master;
        let mut whole = vec![0f32; self.program().value(master).elements()];
        for shard in self.program().shards.clone() {
            let place = shard.parameters.iter().find(|(index, _)| *index == parameter);
            let Some(&(_, offset)) = place else { continue };
            let own = self.slice(&shard, self.rank());
            let Some((of_slice, of_parameter)) = part(own, offset, whole.len()) else { continue };
            let range = self.program().value(shard.master).range;
            let range = ByteRange {
                offset: range.offset + of_slice.start * size_of::<f32>(),
                bytes: of_slice.len() * size_of::<f32>(),
            };
            let bytes = cast_slice_mut(&mut whole[of_parameter]);
            self.executor.backend_mut().read(range, bytes)?;
        }
        Ok(whole)
    }

    /// Writes a value of the training program, of which this rank may have a slice, given whole.
    ///
    /// # Errors
    /// Bytes of the wrong length.
    pub(crate) fn write_part(&mut self, id: ValueId, whole: &[u8]) -> Result<(), TrainError> {
        let program = self.program();
        let gathered = program
            .parameters
            .iter()
            .position(|state| state.master == id && is_gathered(program, state));
        if let Some(parameter) = gathered {
            let state = &program.parameters[parameter];
            let expected = program.whole_shape(state).iter().product::<usize>() * size_of::<f32>();
            if whole.len() != expected {
                return Err(TrainError::Setting {
                    setting: "weights",
                    expected: format!("{expected} bytes of `{}`", state.name),
                    got: whole.len().to_string(),
                    hint: None,
                });
            }
            let whole: Vec<f32> = pod_collect_to_vec(whole);
            let own = state.split.map(|split| split.extract(&whole, &program.value(id).shape));
            let own = own.unwrap_or(whole);
            return self.write_slice(parameter, &|shard| shard.master, &own);
        }
        let is_of = |state: &&ParameterState| {
            [Some(state.master), state.first_moment, state.second_moment].contains(&Some(id))
        };
        let state = program.parameters.iter().find(is_of);
        let Some((split, state)) = state.and_then(|state| Some((state.split?, state))) else {
            return self.write_value(id, whole);
        };
        let expected = program.whole_shape(state).iter().product::<usize>() * size_of::<f32>();
        if whole.len() != expected {
            return Err(TrainError::Setting {
                setting: "weights",
                expected: format!("{expected} bytes of `{}`", state.name),
                got: whole.len().to_string(),
                hint: None,
            });
        }
        let whole: Vec<f32> = pod_collect_to_vec(whole);
        let own = split.extract(&whole, &program.value(id).shape);
        self.write_value(id, cast_slice(&own))
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
