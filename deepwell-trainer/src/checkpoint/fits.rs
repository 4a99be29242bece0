//! Checks whether a checkpoint will load into a program that has not been compiled.

use std::collections::HashSet;

use deepwell_ckpt::{Checkpoint, CheckpointError, CkptDtype};
use deepwell_ir::Program;
use deepwell_plan::Parallel;
use serde::Serialize;

use super::holdings::{Holding, holdings};

/// A rank's reads when it resumes from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reads {
    /// Tensors.
    pub tensors: usize,
    /// Bytes of the rank's holdings in the checkpoint.
    pub bytes: u64,
    /// Host bytes needed to read the largest holding.
    pub host_bytes: u64,
    /// Tensors that are missing, or have another type or shape.
    pub misfits: Vec<String>,
}

/// Computes the reads of a program's rank: master weights and moments, as in [`super::load`]. For
/// ranks that differ only in their slices, returns the reads of the rank with the most bytes, and
/// the misfits of all these ranks.
pub fn reads(checkpoint: &Checkpoint, program: &Program, parallel: Parallel) -> Reads {
    let mut most = Reads { tensors: 0, bytes: 0, host_bytes: 0, misfits: Vec::new() };
    let mut misfits = Vec::new();
    let mut looked_at = HashSet::new();
    for place in 0..parallel.data {
        let mut rank_reads = Reads { tensors: 0, bytes: 0, host_bytes: 0, misfits: Vec::new() };
        let mut names = HashSet::new();
        let all = holdings(program, parallel, parallel.first_at(place));
        for holding in all.into_iter().filter(|holding| holding.is_state()) {
            let bytes = holding.file_bytes() as u64;
            let Holding { section, name, whole, .. } = holding;
            rank_reads.bytes += bytes;
            rank_reads.host_bytes = rank_reads.host_bytes.max(bytes);
            rank_reads.tensors += usize::from(names.insert((section, name.clone())));
            if looked_at.insert((section, name.clone()))
                && let Err(error) = checkpoint.expect(section, &name, CkptDtype::F32, &whole)
            {
                misfits.push(misfit(&error));
            }
        }
        if rank_reads.bytes > most.bytes {
            most = rank_reads;
        }
    }
    Reads { misfits, ..most }
}

/// Describes a misfit without the checkpoint's path, which is printed once.
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
