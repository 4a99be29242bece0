//! What the other stages of a pipeline have of a model, on its way to the rank that writes.
//!
//! Rank 0 knows what that is: it lowers the program of each stage as the stage's ranks did. Bytes
//! come in the order of those programs, so that nothing but bytes is sent. They stay in the memory
//! of the host until the checkpoint is written.

use std::collections::HashSet;

use bytemuck::cast_slice;
use deepwell_ckpt::{CkptDtype, Section};
use deepwell_ir::{ByteRange, Program};

use super::{Described, sections};
use crate::engine::{Moment, Whole};
use crate::{Engine, TrainError};

/// Masters, moments and copies of all stages but the first, on rank 0; nothing on the others, whose
/// first rank of each stage sends them. `moments` are those that a rank has collected of its stage.
/// Of a table that two stages have, one is enough.
pub(super) fn collect(
    engine: &mut Engine,
    moments: &[Whole],
) -> Result<Vec<(Described, Vec<u8>)>, TrainError> {
    let parallel = engine.plan().parallel;
    let ranks = parallel.world_size() / parallel.pipeline;
    if !engine.peers.is_first() {
        if engine.rank().is_multiple_of(ranks) {
            send(engine, moments)?;
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
fn send(engine: &mut Engine, moments: &[Whole]) -> Result<(), TrainError> {
    for kept in sections(engine.program()) {
        let mut bytes = vec![0; engine.program().value(kept.id).range.bytes];
        engine.read_value(kept.id, &mut bytes)?;
        engine.peers.send(0, &bytes)?;
    }
    for moment in moments {
        engine.peers.send(0, cast_slice(&moment.values))?;
    }
    Ok(())
}

/// What a stage with such a program has: values of its own, then the moments that its ranks have
/// slices of, in the order of [`Engine::collect_parts`].
fn all_of(program: &Program) -> Vec<Described> {
    let own = sections(program).into_iter().map(|kept| Described::of(program, kept));
    let mut sharded: Vec<usize> = program
        .shards
        .iter()
        .flat_map(|shard| &shard.parameters)
        .map(|(index, _)| *index)
        .collect();
    sharded.sort_unstable();
    let of_parameter = |index: usize| {
        let state = &program.parameters[index];
        let master = program.value(state.master);
        Moment::ALL.map(|moment| Described {
            name: moment.name_of(&state.name),
            dtype: CkptDtype::F32,
            shape: master.shape.clone(),
            section: match moment {
                Moment::First => Section::MomentFirst,
                Moment::Second => Section::MomentSecond,
            },
            range: ByteRange { offset: 0, bytes: master.range.bytes },
            in_tiles: false,
        })
    };
    own.chain(sharded.into_iter().flat_map(of_parameter)).collect()
}
