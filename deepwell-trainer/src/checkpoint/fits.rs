//! Whether a checkpoint will load into a program that nothing has been compiled for.

use deepwell_ckpt::{Checkpoint, CheckpointError, CkptDtype, Section};
use deepwell_ir::Program;
use serde::Serialize;

use super::{sections, stored};
use crate::engine::Moment;

/// What a rank reads of a checkpoint when it goes on from there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reads {
    /// Tensors.
    pub tensors: usize,
    /// Their bytes in the checkpoint: of tensors that ranks share, each reads the whole.
    pub bytes: u64,
    /// Bytes of the host that the largest of them takes while it is read.
    pub host_bytes: u64,
    /// Tensors that are not there, or are of another type or shape.
    pub misfits: Vec<String>,
}

/// What the rank of a program reads of a checkpoint: master weights and moments, as
/// [`super::load`] does.
pub fn reads(checkpoint: &Checkpoint, program: &Program) -> Reads {
    let mut reads = Reads { tensors: 0, bytes: 0, host_bytes: 0, misfits: Vec::new() };
    let mut read = |section, name: &str, dtype, shape: &[usize]| {
        match checkpoint.expect(section, name, dtype, shape) {
            Ok(_) => {
                let bytes = (shape.iter().product::<usize>() * size_of::<f32>()) as u64;
                reads.tensors += 1;
                reads.bytes += bytes;
                reads.host_bytes = reads.host_bytes.max(bytes);
            }
            Err(error) => reads.misfits.push(misfit(&error)),
        };
    };
    for kept in sections(program) {
        let section = kept.section;
        if matches!(section, Section::Master | Section::MomentFirst | Section::MomentSecond) {
            let (dtype, own) = stored(program.value(kept.id));
            read(section, &kept.name, dtype, kept.whole.as_deref().unwrap_or(&own));
        }
    }
    for &(index, _) in program.shards.iter().flat_map(|shard| &shard.parameters) {
        let state = &program.parameters[index];
        let shape = program.whole_shape(state);
        for (moment, section) in
            [(Moment::First, Section::MomentFirst), (Moment::Second, Section::MomentSecond)]
        {
            read(section, &moment.name_of(&state.name), CkptDtype::F32, &shape);
        }
    }
    reads
}

/// What is wrong, without the checkpoint's path, which is said once.
fn misfit(error: &CheckpointError) -> String {
    match error {
        CheckpointError::MissingTensor { section, name, .. } => {
            format!("`{name}` ({section}) is not there")
        }
        CheckpointError::TensorMismatch {
            section,
            name,
            expected_dtype,
            expected_shape,
            got_dtype,
            got_shape,
            ..
        } => format!(
            "`{name}` ({section}): the plan has {expected_shape:?} {expected_dtype}, the \
             checkpoint {got_shape:?} {got_dtype}"
        ),
        other => other.to_string(),
    }
}
