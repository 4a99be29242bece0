//! Whether a checkpoint will load into a program that nothing has been compiled for.

use std::collections::HashSet;

use deepwell_ckpt::{Checkpoint, CheckpointError, CkptDtype};
use deepwell_ir::Program;
use deepwell_plan::Parallel;
use serde::Serialize;

use super::holdings::{Holding, holdings};

/// What a rank reads of a checkpoint when it goes on from there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reads {
    /// Tensors.
    pub tensors: usize,
    /// Bytes of what the rank has of them.
    pub bytes: u64,
    /// Bytes of the host that the largest part takes while it is read.
    pub host_bytes: u64,
    /// Tensors that are not there, or are of another type or shape.
    pub misfits: Vec<String>,
}

/// What the rank of a program reads of a checkpoint: master weights and moments, as
/// [`super::load`] does. Of ranks that differ in their slices alone, what the one reads that reads
/// the most, and the misfits of all.
pub fn reads(checkpoint: &Checkpoint, program: &Program, parallel: Parallel) -> Reads {
    let mut most = Reads { tensors: 0, bytes: 0, host_bytes: 0, misfits: Vec::new() };
    let mut misfits = Vec::new();
    let mut looked_at = HashSet::new();
    for place in 0..parallel.data {
        let mut own = Reads { tensors: 0, bytes: 0, host_bytes: 0, misfits: Vec::new() };
        let mut names = HashSet::new();
        let all = holdings(program, parallel, parallel.first_at(place));
        for holding in all.into_iter().filter(|holding| holding.is_state()) {
            let Holding { section, name, whole, range, .. } = holding;
            let bytes = range.bytes as u64;
            own.bytes += bytes;
            own.host_bytes = own.host_bytes.max(bytes);
            own.tensors += usize::from(names.insert((section, name.clone())));
            if looked_at.insert((section, name.clone()))
                && let Err(error) = checkpoint.expect(section, &name, CkptDtype::F32, &whole)
            {
                misfits.push(misfit(&error));
            }
        }
        if own.bytes > most.bytes {
            most = own;
        }
    }
    Reads { misfits, ..most }
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
