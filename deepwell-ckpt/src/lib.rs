//! Checkpoints of a training run: complete or absent, checksummed, never with a NaN in them.
//!
//! # Brief overview
//!
//! A checkpoint is a folder `step-00000120` with safetensors shards, one `manifest.json` and the
//! manifest's checksum. [`save`] takes [`CheckpointContents`]: borrowed [`TensorView`]s, each in a
//! [`Section`] (weights, master weights, moments, scales, …), and JSON sections that belong to
//! the caller (plan, policy, guards, random numbers, data position, run). It writes them aside,
//! waits for the disk, and renames the folder into place, so that a run killed at any moment
//! leaves only whole checkpoints behind. Tensors are streamed from where they lie: saving needs
//! buffers of 1 MiB, not a second copy of the model.
//!
//! Ranks that have a model together save it together: one begins a [`Draft`], each writes what it
//! has with [`write_shards`], parts of tensors with their offsets in the whole, and the first one
//! publishes it when all of them have. What is read is whole tensors, or any [`Region`] of one,
//! whoever wrote them.
//!
//! [`list`] and [`latest`] find complete checkpoints; [`load`] opens one and reads tensors on
//! demand, each checked as it is read; [`verify`] reads every byte and names each damaged place;
//! [`inspect`] says what is inside; [`diff`] says what differs between two. [`hf`] reads and writes
//! Hugging Face weights.
//!
//! This crate knows tensors by name and bytes only. It depends on no other Deepwell crate.
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

mod diff;
mod draft;
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

pub use diff::{
    ChangedTensor, CheckpointDiff, JsonDifference, LoneTensor, TensorDifference, diff,
    json_differences,
};
pub use draft::{Draft, RankShards, write_shards};
pub use error::CheckpointError;
pub use folder::{CheckpointEntry, DamagedCheckpoint, Listing, is_checkpoint, latest, list, scan};
pub use inspect::{Inspection, SectionSummary, inspect};
pub use load::{Checkpoint, StoredTensor, load};
pub use manifest::{FORMAT_VERSION, FileEntry, TensorEntry};
pub use region::Region;
pub use save::{CheckpointContents, SaveOptions, SavedCheckpoint, save};
pub use tensor::{CkptDtype, PartView, Section, TensorView};
pub use verify::{Damage, VerifyReport, verify};
