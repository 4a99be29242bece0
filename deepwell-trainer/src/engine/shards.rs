//! Sharded optimizer state: this rank has one slice of each bucket.
//!
//! Between steps every rank has the whole masters, which the weights' body gathers, so readers and
//! writers need not know about slices. Before this body runs on masters written by the host, each
//! rank copies its slices from the whole masters. Moments are never gathered: each rank saves and
//! loads its own slices. Masters that are gathered per layer (ZeRO 2 and 3) are never whole either:
//! writes go to the slices.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut, pod_collect_to_vec};
use deepwell_ir::{ByteRange, DType, ParameterState, ValueId};
use half::bf16;
use rayon::prelude::*;

use super::Engine;
use super::slices::{part, slice_of};
use crate::TrainError;

impl Engine {
    /// Copies this rank's slices from the whole masters.
    pub(super) fn scatter_masters(&mut self) -> Result<(), TrainError> {
        for shard in self.program().shards.clone() {
            let parameters = &self.program().parameters;
            let mut members = shard.parameters.iter().map(|(index, _)| parameters[*index].master);
            if members.any(|master| master.only_in_shard().is_some()) {
                continue;
            }
            let rank_range = slice_of(self.program(), self.plan.parallel, &shard, self.rank());
            let mut values = vec![0f32; rank_range.len()];
            for &(index, offset) in &shard.parameters {
                let master = self.program().parameters[index].master.value();
                let value = self.program().value(master);
                let Some((of_slice, of_parameter)) =
                    part(rank_range.clone(), offset, value.elements())
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

    /// Writes zeros to this rank's moments, whole ones and slices.
    pub(crate) fn clear_moments(&mut self) -> Result<(), TrainError> {
        let program = self.program();
        let of_state = |state: &ParameterState| [state.first_moment, state.second_moment];
        let whole = program.parameters.iter().flat_map(of_state).flatten();
        let slices =
            program.shards.iter().flat_map(|shard| [shard.first_moment, shard.second_moment]);
        for moment in whole.chain(slices).collect::<Vec<ValueId>>() {
            self.executor.clear(self.training.program(), moment)?;
        }
        Ok(())
    }

    /// Bytes of a sharded master on this rank, and the elements of the whole master at these bytes;
    /// `None` if the slices of other ranks cover the master.
    fn master_slice(&self, parameter: usize) -> Option<(ByteRange, Range<usize>)> {
        let program = self.program();
        let master = program.parameters[parameter].master;
        let shard = &program.shards[master.only_in_shard()?];
        let &(_, offset) = shard.parameters.iter().find(|(index, _)| *index == parameter)?;
        let own = slice_of(program, self.plan.parallel, shard, self.rank());
        let (of_slice, of_parameter) = part(own, offset, program.value(master.value()).elements())?;
        let range = ByteRange {
            offset: program.value(shard.master).range.offset + of_slice.start * size_of::<f32>(),
            bytes: of_slice.len() * size_of::<f32>(),
        };
        Some((range, of_parameter))
    }

    /// Reads this rank's slice of a master that exists only as slices. The result has the shape of
    /// the whole master, with zeros for elements of other ranks.
    pub(super) fn read_master_slice(&mut self, parameter: usize) -> Result<Vec<f32>, TrainError> {
        let master = self.program().parameters[parameter].master.value();
        let mut whole = vec![0f32; self.program().value(master).elements()];
        if let Some((range, of_parameter)) = self.master_slice(parameter) {
            let bytes = cast_slice_mut(&mut whole[of_parameter]);
            self.executor.backend_mut().read(range, bytes)?;
        }
        Ok(whole)
    }

    /// Writes a value of the training program from the whole tensor; this rank may have a slice of
    /// it.
    ///
    /// # Errors
    /// Bytes of the wrong length.
    pub(crate) fn write_part(&mut self, id: ValueId, whole: &[u8]) -> Result<(), TrainError> {
        let program = self.program();
        let is_sliced = |state: &ParameterState| {
            state.master.value() == id && state.master.only_in_shard().is_some()
        };
        if let Some(parameter) = program.parameters.iter().position(is_sliced) {
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
            let slice = state.split.map(|split| split.extract(&whole, &program.value(id).shape));
            let slice = slice.unwrap_or(whole);
            let Some((range, own)) = self.master_slice(parameter) else { return Ok(()) };
            return Ok(self.executor.backend_mut().write(range, cast_slice(&slice[own]))?);
        }
        let is_of = |state: &&ParameterState| {
            [Some(state.master.value()), state.first_moment, state.second_moment]
                .contains(&Some(id))
        };
        let state = program.parameters.iter().find(is_of);
        let Some((split, state)) = state.and_then(|state| Some((state.split?, state))) else {
            return self.write_stored(id, whole);
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
        let slice = split.extract(&whole, &program.value(id).shape);
        self.write_stored(id, cast_slice(&slice))
    }

    /// Writes a value from bytes of FP32, which a master in BF16 rounds to nearest.
    fn write_stored(&mut self, id: ValueId, bytes: &[u8]) -> Result<(), TrainError> {
        let value = self.program().value(id);
        let expected = value.elements() * size_of::<f32>();
        if value.dtype != DType::Bf16 || bytes.len() != expected {
            return self.write_value(id, bytes);
        }
        let values: Vec<f32> = pod_collect_to_vec(bytes);
        let rounded: Vec<bf16> = values.into_par_iter().map(bf16::from_f32).collect();
        self.write_value(id, cast_slice(&rounded))
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
