//! Reads a checkpoint: the manifest at once, each tensor when it is asked for.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::CheckpointError;
use crate::io::PIECE_BYTES;
use crate::manifest::{FileEntry, Manifest, TensorEntry};
use crate::tensor::{CkptDtype, Section};

/// An opened checkpoint. Holds the manifest only; tensors stay on the disk until they are read.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    index: HashMap<(Section, String), usize>,
}

/// Opens the checkpoint in folder `path`, such as `runs/a/step-00000120`.
///
/// Checks the manifest's checksum, its consistency, and the presence and length of every shard.
/// The shards' bytes are checked as tensors are read, or all at once by [`verify`](crate::verify).
///
/// # Errors
///
/// [`NotACheckpoint`](CheckpointError::NotACheckpoint),
/// [`ManifestChecksum`](CheckpointError::ManifestChecksum),
/// [`ManifestInvalid`](CheckpointError::ManifestInvalid),
/// [`FormatVersion`](CheckpointError::FormatVersion),
/// [`FileLength`](CheckpointError::FileLength) and [`Io`](CheckpointError::Io).
pub fn load(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let manifest = Manifest::read(path)?;
    let index = manifest
        .tensors
        .iter()
        .enumerate()
        .map(|(position, tensor)| ((tensor.section, tensor.name.clone()), position))
        .collect();
    Ok(Checkpoint { path: path.to_path_buf(), manifest, index })
}

impl Checkpoint {
    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Training steps done when it was written.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// How the model was laid out on the hardware.
    #[must_use]
    pub fn plan(&self) -> &Value {
        &self.manifest.plan
    }

    /// Precision per tensor.
    #[must_use]
    pub fn policy(&self) -> &Value {
        &self.manifest.policy
    }

    /// State of the numeric guards.
    #[must_use]
    pub fn guards(&self) -> &Value {
        &self.manifest.guards
    }

    /// State of the random-number generators.
    #[must_use]
    pub fn rng(&self) -> &Value {
        &self.manifest.rng
    }

    /// Where in the data the next batch begins.
    #[must_use]
    pub fn data_position(&self) -> &Value {
        &self.manifest.data_position
    }

    /// Options, model configuration, seeds, versions.
    #[must_use]
    pub fn run(&self) -> &Value {
        &self.manifest.run
    }

    /// All tensors, in the order in which they are stored.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.manifest.tensors
    }

    /// All shards.
    #[must_use]
    pub fn files(&self) -> &[FileEntry] {
        &self.manifest.files
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The entry of one tensor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`].
    pub fn tensor(&self, section: Section, name: &str) -> Result<&TensorEntry, CheckpointError> {
        match self.index.get(&(section, name.to_string())) {
            Some(&position) => Ok(&self.manifest.tensors[position]),
            None => Err(CheckpointError::MissingTensor {
                path: self.path.clone(),
                section,
                name: name.to_string(),
                hint: self.missing_hint(section, name),
            }),
        }
    }

    fn missing_hint(&self, section: Section, name: &str) -> String {
        let elsewhere: Vec<_> = self
            .manifest
            .tensors
            .iter()
            .filter(|tensor| tensor.name == name)
            .map(|tensor| tensor.section.name())
            .collect();
        if !elsewhere.is_empty() {
            return format!("the name is in {}", elsewhere.join(", "));
        }
        let mut members = self.manifest.tensors.iter().filter(|tensor| tensor.section == section);
        match (members.next(), members.count()) {
            (None, _) => "the section is empty".to_string(),
            (Some(first), others) => {
                format!("the section has {} tensors, such as `{}`", others + 1, first.name)
            }
        }
    }

    /// The entry of one tensor, which must have this type and shape.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`] and [`CheckpointError::TensorMismatch`].
    pub fn expect(
        &self,
        section: Section,
        name: &str,
        dtype: CkptDtype,
        shape: &[usize],
    ) -> Result<&TensorEntry, CheckpointError> {
        let entry = self.tensor(section, name)?;
        if entry.dtype != dtype || entry.shape != shape {
            return Err(CheckpointError::TensorMismatch {
                path: self.path.clone(),
                section,
                name: name.to_string(),
                expected_dtype: dtype,
                expected_shape: shape.to_vec(),
                got_dtype: entry.dtype,
                got_shape: entry.shape.clone(),
            });
        }
        Ok(entry)
    }

    /// Reads one tensor into `buffer`, whose length must be the tensor's bytes, and checks its
    /// checksum on the way. After an error the buffer's contents are unspecified.
    ///
    /// # Errors
    ///
    /// [`MissingTensor`](CheckpointError::MissingTensor),
    /// [`BufferLength`](CheckpointError::BufferLength),
    /// [`TensorChecksum`](CheckpointError::TensorChecksum) and [`Io`](CheckpointError::Io).
    pub fn read_into(
        &self,
        section: Section,
        name: &str,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let entry = self.tensor(section, name)?;
        if buffer.len() as u64 != entry.bytes {
            return Err(CheckpointError::BufferLength {
                section,
                name: name.to_string(),
                expected_bytes: entry.bytes,
                got_bytes: buffer.len(),
            });
        }
        let path = self.path.join(&entry.file);
        let mut file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
        file.seek(SeekFrom::Start(entry.begin)).map_err(CheckpointError::io("read", &path))?;
        let mut hasher = blake3::Hasher::new();
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            file.read_exact(piece).map_err(CheckpointError::io("read", &path))?;
            hasher.update(piece);
        }
        let got = hasher.finalize().to_hex().to_string();
        if got != entry.blake3 {
            return Err(CheckpointError::TensorChecksum {
                path,
                section,
                name: name.to_string(),
                offset: entry.begin,
                bytes: entry.bytes,
                expected: entry.blake3.clone(),
                got,
            });
        }
        Ok(())
    }

    /// Reads one tensor's bytes.
    ///
    /// # Errors
    ///
    /// As [`read_into`](Checkpoint::read_into).
    pub fn read(&self, section: Section, name: &str) -> Result<Vec<u8>, CheckpointError> {
        // The length was compared with the file's at loading: no absurd allocation can follow.
        let mut buffer = vec![0; self.tensor(section, name)?.bytes as usize];
        self.read_into(section, name, &mut buffer)?;
        Ok(buffer)
    }

    /// Reads an `F32` tensor of this shape into `buffer`, one element per value.
    ///
    /// # Errors
    ///
    /// As [`expect`](Checkpoint::expect) and [`read_into`](Checkpoint::read_into).
    pub fn read_f32_into(
        &self,
        section: Section,
        name: &str,
        shape: &[usize],
        buffer: &mut [f32],
    ) -> Result<(), CheckpointError> {
        self.expect(section, name, CkptDtype::F32, shape)?;
        self.read_into(section, name, bytemuck::cast_slice_mut(buffer))
    }

    /// Reads a `BF16` tensor of this shape into `buffer`, as bit patterns.
    ///
    /// # Errors
    ///
    /// As [`expect`](Checkpoint::expect) and [`read_into`](Checkpoint::read_into).
    pub fn read_bf16_bits_into(
        &self,
        section: Section,
        name: &str,
        shape: &[usize],
        buffer: &mut [u16],
    ) -> Result<(), CheckpointError> {
        self.expect(section, name, CkptDtype::Bf16, shape)?;
        self.read_into(section, name, bytemuck::cast_slice_mut(buffer))
    }
}
