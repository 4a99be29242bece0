//! `manifest.json`: contents of a checkpoint, with locations and checksums.
//!
//! The file `manifest.blake3` next to it holds the checksum of the manifest's own bytes, which
//! detects a flipped bit in the manifest.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::CheckpointError;
use crate::region::{Region, wrong_with};
use crate::tensor::{CkptDtype, Section, tensor_bytes};

/// The version that this library writes and reads.
pub const FORMAT_VERSION: u64 = 1;

/// Name of the manifest in a checkpoint's folder.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// Name of the file with the manifest's checksum.
pub(crate) const MANIFEST_CHECKSUM_FILE: &str = "manifest.blake3";

/// A manifest of a million tensors is smaller; a larger file is rejected.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;

/// Location of one stored part of a tensor.
///
/// The entry is one rectangular part of a tensor of `global_shape`, beginning at `global_offset`. A
/// tensor written whole has a single entry: `shape` equals `global_shape` and the offset is zero.
/// The parts of other tensors cover the tensor without overlap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name, unique within `section`.
    pub name: String,
    /// Role of the tensor.
    pub section: Section,
    /// Element type.
    pub dtype: CkptDtype,
    /// Shape of the whole tensor.
    pub global_shape: Vec<usize>,
    /// Offset of this part in the whole tensor, per dimension.
    pub global_offset: Vec<usize>,
    /// Shape of this part.
    pub shape: Vec<usize>,
    /// File name of the shard.
    pub file: String,
    /// First byte in the file.
    pub begin: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 checksum of the part's bytes, 64 hexadecimal digits.
    pub blake3: String,
}

impl TensorEntry {
    /// The region of the tensor in this entry.
    #[must_use]
    pub fn region(&self) -> Region {
        Region { offset: self.global_offset.clone(), shape: self.shape.clone() }
    }

    /// Whether the entry is the whole tensor.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.shape == self.global_shape && self.global_offset.iter().all(|&offset| offset == 0)
    }

    /// Name in the shard's own header: `name@offset` for a part, such as `w@0,128`, since a shard
    /// may have several parts of a tensor.
    #[must_use]
    pub fn name_in_file(&self) -> String {
        if self.is_whole() {
            return self.name.clone();
        }
        let offsets: Vec<String> = self.global_offset.iter().map(usize::to_string).collect();
        format!("{}@{}", self.name, offsets.join(","))
    }
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// File name within the checkpoint's folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 checksum of the whole file, 64 hexadecimal digits, as printed by `b3sum`.
    pub blake3: String,
}

/// The manifest, in the layout of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format_version: u64,
    pub(crate) step: u64,
    pub(crate) plan: Value,
    pub(crate) policy: Value,
    pub(crate) guards: Value,
    pub(crate) rng: Value,
    pub(crate) data_position: Value,
    pub(crate) run: Value,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
}

/// The version alone, parsed first: later versions may have other fields.
#[derive(Deserialize)]
struct VersionOnly {
    format_version: u64,
}

impl Manifest {
    /// Reads the manifest of a checkpoint's folder. Verifies its checksum, its consistency as far
    /// as possible without opening shards, and the presence and length of each shard.
    pub(crate) fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let not_a_checkpoint =
            |reason: String| CheckpointError::NotACheckpoint { path: folder.to_path_buf(), reason };
        if !folder.is_dir() {
            return Err(not_a_checkpoint("no such folder".to_string()));
        }
        let path = folder.join(MANIFEST_FILE);
        let checksum_path = folder.join(MANIFEST_CHECKSUM_FILE);
        for needed in [&path, &checksum_path] {
            if !needed.is_file() {
                if crate::folder::is_checkpoint(folder) {
                    let file = needed.file_name().unwrap_or_default();
                    return Err(CheckpointError::ManifestMissing {
                        path: folder.to_path_buf(),
                        file: file.to_string_lossy().into_owned(),
                    });
                }
                let hint = match crate::folder::latest(folder) {
                    Ok(Some(newest)) => {
                        format!("\nhint: it holds checkpoints, such as `{}`", newest.path.display())
                    }
                    _ => String::new(),
                };
                let name = needed.file_name().unwrap_or_default().to_string_lossy();
                return Err(not_a_checkpoint(format!("it has no `{name}`{hint}")));
            }
        }
        let manifest_bytes =
            fs::metadata(&path).map_err(CheckpointError::io("look at", &path))?.len();
        if manifest_bytes > MANIFEST_BYTES_MAX {
            return Err(CheckpointError::ManifestInvalid {
                path,
                detail: format!(
                    "expected at most {MANIFEST_BYTES_MAX} bytes, got {manifest_bytes}"
                ),
            });
        }
        let bytes = fs::read(&path).map_err(CheckpointError::io("read", &path))?;
        let expected =
            fs::read(&checksum_path).map_err(CheckpointError::io("read", &checksum_path))?;
        let expected = String::from_utf8_lossy(&expected).trim_end_matches('\n').to_string();
        let got = blake3::hash(&bytes).to_hex().to_string();
        if got != expected {
            return Err(CheckpointError::ManifestChecksum { path, expected, got });
        }
        let invalid =
            |detail: String| CheckpointError::ManifestInvalid { path: path.clone(), detail };
        let version: VersionOnly =
            serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        if version.format_version != FORMAT_VERSION {
            return Err(CheckpointError::FormatVersion {
                path,
                expected: FORMAT_VERSION,
                got: version.format_version,
            });
        }
        let manifest: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        manifest.check_consistency().map_err(invalid)?;
        manifest.check_lengths(folder)?;
        Ok(manifest)
    }

    /// Checks the consistency of the entries.
    pub(crate) fn check_consistency(&self) -> Result<(), String> {
        let mut file_bytes = std::collections::HashMap::new();
        for file in &self.files {
            // A name must not lead out of the folder.
            let plain = !file.name.is_empty()
                && file.name != "."
                && file.name != ".."
                && !file.name.contains(['/', '\\', '\0']);
            if !plain {
                return Err(format!("file name `{}` is not a plain name", file.name));
            }
            if file_bytes.insert(file.name.as_str(), file.bytes).is_some() {
                return Err(format!("file `{}` is listed twice", file.name));
            }
        }
        let mut seen = HashSet::new();
        let mut slices: BTreeMap<(Section, &str), Vec<&TensorEntry>> = BTreeMap::new();
        for tensor in &self.tensors {
            let name = &tensor.name;
            if !seen.insert((tensor.section, name, &tensor.global_offset)) {
                return Err(format!("tensor `{name}` ({}) is listed twice", tensor.section));
            }
            let Some(&file_bytes) = file_bytes.get(tensor.file.as_str()) else {
                return Err(format!("tensor `{name}` is in an unlisted file `{}`", tensor.file));
            };
            let ends_within =
                tensor.begin.checked_add(tensor.bytes).is_some_and(|end| end <= file_bytes);
            if !ends_within {
                return Err(format!(
                    "tensor `{name}`: {} bytes at {} end after file `{}` of {file_bytes} bytes",
                    tensor.bytes, tensor.begin, tensor.file
                ));
            }
            let expected = tensor_bytes(tensor.dtype, &tensor.shape);
            if expected.is_none_or(|expected| expected as u64 != tensor.bytes) {
                return Err(format!(
                    "tensor `{name}`: {} bytes do not make {:?} {}",
                    tensor.bytes, tensor.shape, tensor.dtype
                ));
            }
            if tensor_bytes(tensor.dtype, &tensor.global_shape).is_none() {
                return Err(format!("tensor `{name}`: {:?} is no shape", tensor.global_shape));
            }
            slices.entry((tensor.section, name.as_str())).or_default().push(tensor);
        }
        for ((section, name), slices) in slices {
            let (dtype, shape) = (slices[0].dtype, &slices[0].global_shape);
            if let Some(other) =
                slices.iter().find(|slice| (slice.dtype, &slice.global_shape) != (dtype, shape))
            {
                return Err(format!(
                    "tensor `{name}` ({section}): parts of {shape:?} {dtype} and of {:?} {}",
                    other.global_shape, other.dtype
                ));
            }
            let regions: Vec<Region> = slices.iter().map(|slice| slice.region()).collect();
            if let Some(wrong) = wrong_with(&regions, shape) {
                return Err(format!("tensor `{name}` ({section}): {wrong}"));
            }
        }
        Ok(())
    }

    /// Checks the presence and length of each file.
    pub(crate) fn check_lengths(&self, folder: &Path) -> Result<(), CheckpointError> {
        for file in &self.files {
            let path = folder.join(&file.name);
            let got_bytes = match fs::metadata(&path) {
                Ok(found) => found.len(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(CheckpointError::FileMissing { path, expected_bytes: file.bytes });
                }
                Err(error) => return Err(CheckpointError::io("find", path)(error)),
            };
            if got_bytes != file.bytes {
                return Err(CheckpointError::FileLength {
                    path,
                    expected_bytes: file.bytes,
                    got_bytes,
                });
            }
        }
        Ok(())
    }
}
