//! Whole masters of what ranks have of them.

use bytemuck::cast_slice_mut;
use deepwell_ir::Program;
use deepwell_trainer::{Engine, TrainError};

/// This rank's slices of masters.
pub(crate) fn slices(engine: &mut Engine) -> Result<Vec<Vec<u32>>, TrainError> {
    let program = engine.program().clone();
    let read = |shard: &deepwell_ir::Shard| {
        let mut values = vec![0u32; program.value(shard.master).elements()];
        engine.read_value(shard.master, cast_slice_mut(&mut values))?;
        Ok(values)
    };
    program.shards.iter().map(read).collect()
}

/// Masters of all parameters, whole, of the slices of all ranks.
pub(crate) fn masters(program: &Program, of_ranks: &[Vec<Vec<u32>>]) -> Vec<u32> {
    let mut of_parameters = vec![Vec::new(); program.parameters.len()];
    for (index, shard) in program.shards.iter().enumerate() {
        let whole: Vec<u32> = of_ranks.iter().flat_map(|slices| slices[index].clone()).collect();
        for &(parameter, offset) in &shard.parameters {
            let elements = program.value(program.parameters[parameter].master.value()).elements();
            of_parameters[parameter] = whole[offset..offset + elements].to_vec();
        }
    }
    of_parameters.concat()
}
