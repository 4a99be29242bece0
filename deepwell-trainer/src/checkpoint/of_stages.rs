//! What the other stages of a pipeline have of a model, on its way to the rank that writes.
//!
//! Rank 0 knows what that is: it lowers the program of each stage as the stage's ranks did. Bytes
//! come in the order of those programs, so that nothing but bytes is sent. They stay in the memory
//! of the host until the checkpoint is written.

use std::collections::HashSet;

use bytemuck::cast_slice;
use deepwell_ckpt::{CkptDtype, Section};
use deepwell_ir::{ByteRange, ParameterState, Program};

use super::{Described, own_sections, sections};
use crate::engine::{Moment, Whole};
use crate::{Engine, TrainError};

/// Masters, moments and copies of all stages but the first, on rank 0; nothing on the others, whose
/// first rank of each stage sends them. `parts` are those that a rank has collected of its stage.
/// Of a table that two stages have, one is enough.
pub(super) fn collect(
    engine: &mut Engine,
    parts: &[Whole],
) -> Result<Vec<(Described, Vec<u8>)>, TrainError> {
    let parallel = engine.plan().parallel;
    let ranks = parallel.world_size() / parallel.pipeline;
    if !engine.peers.is_first() {
        if engine.rank().is_multiple_of(ranks) {
            send(engine, parts)?;
        }
        return Ok(Vec::new());
    }
    let mut known: HashSet<String> =
        all_of(engine.program()).into_iter().map(|it| it.name).collect();
    let mut others = Vec::new();
    for stage in 1..parallel.pipeline {
        let from = stage * ranks;
        for tensor in all_of(&engine.lower_for_rank(from)?) {
            let mut bytes = vec![0; tensor.range.bytes];
            engine.peers.receive(from as u32, &mut bytes)?;
            if known.insert(tensor.name.clone()) {
                others.push((tensor, bytes));
            }
        }
    }
    Ok(others)
}

/// Sends what [`all_of`] this rank's program says to rank 0.
fn send(engine: &mut Engine, parts: &[Whole]) -> Result<(), TrainError> {
    for kept in own_sections(engine) {
        let mut bytes = vec![0; engine.program().value(kept.id).range.bytes];
        engine.read_value(kept.id, &mut bytes)?;
        engine.peers.send(0, &bytes)?;
    }
    for part in parts {
        engine.peers.send(0, cast_slice(&part.values))?;
    }
    Ok(())
}

/// What a stage with such a program has: values that its first rank has whole, then what its ranks
/// have slices of, in the order of [`Engine::collect_parts`].
fn all_of(program: &Program) -> Vec<Described> {
    let own = sections(program).into_iter().filter(|kept| kept.whole.is_none());
    let own = own.map(|kept| Described::of(program, kept));
    let sharded: HashSet<usize> = program
        .shards
        .iter()
        .flat_map(|shard| &shard.parameters)
        .map(|(index, _)| *index)
        .collect();
    let of_parameter = |(index, state): (usize, &ParameterState)| {
        let (is_split, is_sharded) = (state.split.is_some(), sharded.contains(&index));
        let shape = program.whole_shape(state);
        let described = move |name: String, section| Described {
            name,
            dtype: CkptDtype::F32,
            range: ByteRange {
                offset: 0,
                bytes: shape.iter().product::<usize>() * size_of::<f32>(),
            },
            shape: shape.clone(),
            section,
            in_tiles: false,
        };
        let moments = [
            (Moment::First, state.first_moment, Section::MomentFirst),
            (Moment::Second, state.second_moment, Section::MomentSecond),
        ];
        let mut parts = Vec::new();
        if is_split {
            parts.push(described(state.name.clone(), Section::Master));
        }
        for (moment, id, section) in moments {
            if is_sharded || (is_split && id.is_some()) {
                parts.push(described(moment.name_of(&state.name), section));
            }
        }
        parts
    };
    own.chain(program.parameters.iter().enumerate().flat_map(of_parameter)).collect()
}
