//! Checkpoints of a training run: complete or absent, checksummed, never with a NaN.
//!
//! # Brief overview
//!
//! A checkpoint is a folder `step-00000120` with safetensors shards, one `manifest.json` and the
//! manifest's checksum. [`save`] takes [`CheckpointContents`]: borrowed [`TensorView`]s, each in a
//! [`Section`] (weights, master weights, moments, scales, …), and JSON sections that belong to the
//! caller (plan, policy, guards, random numbers, data position, run). It writes them to a temporary
//! folder, syncs it to disk, and renames it into place, so that a run killed at any moment leaves
//! only complete checkpoints. Tensors are streamed from the caller's memory: saving needs buffers
//! of 1 MiB, not a second copy of the model.
//!
//! Several ranks save a sharded model together: the first rank begins a [`CheckpointWriter`], each
//! rank writes its parts of tensors, with their offsets, with [`write_shards`], and the first rank
//! publishes the checkpoint once all ranks have finished. Readers get whole tensors, or any
//! [`Region`] of a tensor, regardless of the ranks that wrote it.
//!
//! [`list`] and [`latest`] find complete checkpoints; [`load`] opens a checkpoint and reads tensors
//! on demand, with checksums verified; [`verify`] reads every byte and reports all damage;
//! [`inspect`] describes the contents; [`diff`] compares two checkpoints. [`hf`] writes Hugging
//! Face weights.
//!
//! Tensors are identified by name and bytes only. Of Deepwell's crates only `deepwell-ir` is used,
//! for safetensors headers.
//!
//! # Example
//!
//! ```
//! use deepwell_ckpt::{CheckpointContents, SaveOptions, Section, TensorView};
//! use serde_json::json;
//!
//! # let root = tempfile::tempdir()?;
//! # let root = root.path();
//! let weights = [1.0f32, 2.0, 3.0, 4.0];
//! let mut contents = CheckpointContents::new(120);
//! contents.tensors = vec![TensorView::from_f32(Section::Weights, "head", &[2, 2], &weights)];
//! contents.data_position = json!({ "epoch": 0, "batch": 120 });
//! let options = SaveOptions { keep_last: Some(3), ..SaveOptions::default() };
//! deepwell_ckpt::save(root, &contents, &options)?;
//!
//! let newest = deepwell_ckpt::latest(root)?.expect("one was just saved");
//! let checkpoint = deepwell_ckpt::load(&newest.path)?;
//! assert_eq!(checkpoint.step(), 120);
//! assert_eq!(checkpoint.data_position()["batch"], 120);
//! let mut restored = [0.0; 4];
//! checkpoint.read_f32_into(Section::Weights, "head", &[2, 2], &mut restored)?;
//! assert_eq!(restored, weights);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(target_endian = "big")]
compile_error!("checkpoints hold little-endian elements, which this crate reads without swapping");

mod checkpoint_writer;
mod diff;
mod error;
mod finite;
mod folder;
pub mod hf;
mod inspect;
mod io;
mod load;
mod manifest;
mod region;
mod save;
mod shard;
mod tensor;
mod verify;

pub use checkpoint_writer::{CheckpointWriter, RankShards, write_shards};
pub use diff::{
    ChangedTensor, CheckpointDiff, JsonDifference, LoneTensor, TensorDifference, diff,
    json_differences,
};
pub use error::CheckpointError;
pub use folder::{CheckpointEntry, DamagedCheckpoint, Listing, is_checkpoint, latest, list, scan};
pub use inspect::{Inspection, SectionSummary, inspect};
pub use load::{Checkpoint, StoredTensor, load};
pub use manifest::{FORMAT_VERSION, FileEntry, TensorEntry};
pub use region::Region;
pub use save::{CheckpointContents, SaveOptions, SavedCheckpoint, save};
pub use tensor::{CkptDtype, Section, SliceView, TensorView};
pub use verify::{Damage, VerifyReport, verify};
