//! Optimizer state of which this rank has one slice of each bucket.
//!
//! Between steps the masters are whole on every rank, where the weights' body gathers them, so
//! that whoever reads or writes them sees no slices. Before the body runs on masters that the host
//! wrote, each rank takes its slices from there. Moments are nowhere whole: rank 0 collects them
//! for a checkpoint, and with them what tensor-parallel ranks have slices of. Masters that are
//! gathered where a layer needs them (ZeRO 2 and 3) are nowhere whole either: who writes them
//! writes slices.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut, pod_collect_to_vec};
use deepwell_ir::{ByteRange, ParameterState, Program, Shard, Split, ValueId};

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

/// A master or a moment of a parameter, of all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    /// Which parameter.
    pub(crate) parameter: usize,
    /// Which moment; none of a master.
    pub(crate) moment: Option<Moment>,
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

/// Whether the master of a parameter is whole within a step alone.
pub(crate) fn is_gathered(program: &Program, state: &ParameterState) -> bool {
    !program.value(state.master).memory.is_persistent()
}

impl Engine {
    /// Elements of the bucket that the slice of a rank has.
    fn slice(&self, shard: &Shard, rank: usize) -> Range<usize> {
        let place = self.plan.parallel.data_place(rank);
        let elements = self.program().value(shard.master).elements();
        place * elements..(place + 1) * elements
    }

    /// Whether the masters of a shard are whole within a step alone.
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

    /// Writes this rank's part of a moment, given whole, into its slice.
    pub(crate) fn write_moment(
        &mut self,
        parameter: usize,
        moment: Moment,
        whole: &[f32],
    ) -> Result<(), TrainError> {
        let state = &self.program().parameters[parameter];
        let own = state
            .split
            .map(|split| split.extract(whole, &self.program().value(state.master).shape));
        let whole = own.as_deref().unwrap_or(whole);
        self.write_slice(parameter, &|shard| moment.slice_of(shard), whole)
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
            let expected = program.value(id).range.bytes;
            if whole.len() != expected {
                return Err(TrainError::Setting {
                    setting: "weights",
                    expected: format!(
                        "{expected} bytes of `{}`",
                        program.parameters[parameter].name
                    ),
                    got: whole.len().to_string(),
                    hint: None,
                });
            }
            let whole: Vec<f32> = pod_collect_to_vec(whole);
            return self.write_slice(parameter, &|shard| shard.master, &whole);
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

    /// The masters and moments that ranks have slices of, whole: on rank 0, which the others give
    /// theirs to; of the other stages of a pipeline on the first rank of each group. All ranks ask
    /// at the same time.
    pub(crate) fn collect_parts(&mut self) -> Result<Vec<Whole>, TrainError> {
        let mut parts = self.collect_splits()?;
        for shard in self.program().shards.clone() {
            let ranks = self.ranks_of_stage();
            let masters = self.is_gathered(&shard).then_some(None);
            for moment in masters.into_iter().chain(Moment::ALL.map(Some)) {
                let mut own = vec![0f32; self.program().value(shard.master).elements()];
                let slice = moment.map_or(shard.master, |moment| moment.slice_of(&shard));
                self.read_value(slice, cast_slice_mut(&mut own))?;
                let slices = self.collect_of_stage(&ranks, &own)?;
                if slices.is_empty() {
                    continue;
                }
                for &(parameter, offset) in &shard.parameters {
                    let master = self.program().parameters[parameter].master;
                    let elements = self.program().value(master).elements();
                    let of_tensor_rank = |place: usize| {
                        let mut values = vec![0f32; elements];
                        for (&rank, slice) in ranks.iter().zip(&slices) {
                            let rank = rank as usize;
                            let is_its = self.plan.parallel.split_place(rank) == place;
                            let range = self.slice(&shard, rank);
                            if let Some((from, to)) = part(range, offset, elements)
                                && is_its
                            {
                                values[to].copy_from_slice(&slice[from]);
                            }
                        }
                        values
                    };
                    let values = self.joined(parameter, &of_tensor_rank);
                    parts.push(Whole { parameter, moment, values });
                }
            }
        }
        parts.sort_by_key(|it| (it.parameter, it.moment));
        Ok(parts)
    }

    /// The ranks of this rank's stage of a pipeline: all, where there is one stage.
    fn ranks_of_stage(&self) -> Vec<u32> {
        let parallel = self.plan.parallel;
        let stage = parallel.pipeline_place(self.rank());
        let ranks = 0..parallel.world_size();
        let is_of_stage = |rank: &usize| parallel.pipeline_place(*rank) == stage;
        ranks.filter(is_of_stage).map(|rank| rank as u32).collect()
    }

    /// The numbers of this stage's ranks on the first of them; nothing on the others.
    fn collect_of_stage(
        &mut self,
        ranks: &[u32],
        own: &[f32],
    ) -> Result<Vec<Vec<f32>>, TrainError> {
        match self.plan.parallel.pipeline {
            1 => self.peers.collect(own),
            _ => self.peers.collect_among(ranks, own),
        }
    }

    /// Masters, and moments that are no shards, of which tensor-parallel ranks have slices.
    fn collect_splits(&mut self) -> Result<Vec<Whole>, TrainError> {
        let ranks = self.ranks_of_stage();
        let mut wholes = Vec::new();
        for parameter in 0..self.program().parameters.len() {
            let state = self.program().parameters[parameter].clone();
            if state.split.is_none() {
                continue;
            }
            for (moment, id) in [
                (None, Some(state.master)),
                (Some(Moment::First), state.first_moment),
                (Some(Moment::Second), state.second_moment),
            ] {
                let Some(id) = id else { continue };
                let mut own = vec![0f32; self.program().value(id).elements()];
                self.read_value(id, cast_slice_mut(&mut own))?;
                let slices = self.collect_of_stage(&ranks, &own)?;
                if slices.is_empty() {
                    continue;
                }
                let parallel = self.plan.parallel;
                let of_tensor_rank = |place: usize| {
                    let is_its =
                        |(rank, _): &(&u32, _)| parallel.split_place(**rank as usize) == place;
                    let slice = ranks.iter().zip(&slices).find(is_its);
                    slice.map(|(_, slice)| slice.clone()).unwrap_or_default()
                };
                let values = self.joined(parameter, &of_tensor_rank);
                wholes.push(Whole { parameter, moment, values });
            }
        }
        Ok(wholes)
    }

    /// A tensor of the shape of a parameter, from what the tensor-parallel rank at each place has.
    fn joined(&self, parameter: usize, of_rank: &dyn Fn(usize) -> Vec<f32>) -> Vec<f32> {
        let program = self.program();
        let state = &program.parameters[parameter];
        let Some(split) = state.split else { return of_rank(0) };
        let own = &program.value(state.master).shape;
        let mut whole = vec![0f32; program.whole_shape(state).iter().product()];
        for place in 0..split.parts {
            Split { place, ..split }.insert(&of_rank(place), own, &mut whole);
        }
        whole
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
