//! Writes a model folder: configuration, tokenizer, and weights in one safetensors file or in
//! shards with an index. The folder is complete or absent.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use serde::Serialize;

use deepwell_ir::capture::WeightFiles;

use super::HfError;
use crate::error::CheckpointError;
use crate::io::{DiskIo, HashingFile, Io, PIECE_BYTES};
use crate::shard::header_bytes;
use crate::tensor::{CkptDtype, tensor_bytes};

/// A tensor to be written to a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderTensor {
    /// Name, unique within the folder.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Whether the tensor is always stored as F32, because BF16 would lose its precision.
    pub keeps_f32: bool,
}

impl FolderTensor {
    /// Bytes if other tensors are stored as `dtype`, `None` on overflow.
    #[must_use]
    pub fn bytes(&self, dtype: CkptDtype) -> Option<usize> {
        tensor_bytes(self.dtype(dtype), &self.shape)
    }

    fn dtype(&self, of_others: CkptDtype) -> CkptDtype {
        if self.keeps_f32 { CkptDtype::F32 } else { of_others }
    }
}

/// How weights are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FolderOptions {
    /// `F32`, or `Bf16` rounded to nearest, ties to even; for all tensors without `keeps_f32`.
    pub dtype: CkptDtype,
    /// Maximum bytes of tensors per file; a larger tensor gets a file of its own.
    pub shard_bytes_max: u64,
}

/// Summary of the written files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WrittenFolder {
    /// The folder.
    pub path: PathBuf,
    /// Files, in the order of writing.
    pub files: Vec<String>,
    /// Number of tensors in the weight files.
    pub tensors: usize,
    /// Total bytes of the tensors.
    pub tensor_bytes: u64,
}

/// The index of shards, in the format of transformers.
#[derive(Serialize)]
struct Index {
    metadata: BTreeMap<&'static str, u64>,
    weight_map: BTreeMap<String, String>,
}

/// Writes a folder of `files` (name and contents) and weights. `values` fills the elements of one
/// tensor at a time, row-major; `progress` receives the number of tensor bytes written so far.
///
/// Everything is written to a temporary folder next to `path`, synced, and renamed into place.
/// Memory: the elements of the largest tensor and 1 MiB.
///
/// # Errors
///
/// [`HfError::Exists`] unless `path` is absent or an empty folder; [`HfError::InvalidTensor`] for
/// an unsupported element type or a duplicate name, and [`HfError::NonFinite`] for a value that is
/// NaN or infinite, or becomes infinite in BF16; [`HfError::Io`]; errors of `values`. After an
/// error nothing is at `path`.
pub fn write_folder<E: From<HfError>>(
    path: &Path,
    files: &[(String, Vec<u8>)],
    tensors: &[FolderTensor],
    options: FolderOptions,
    mut values: impl FnMut(&FolderTensor, &mut [f32]) -> Result<(), E>,
    mut progress: impl FnMut(u64),
) -> Result<WrittenFolder, E> {
    let shards = shards_of(tensors, options)?;
    let partial = Partial::create(path)?;
    let mut written = WrittenFolder {
        path: path.to_path_buf(),
        files: Vec::new(),
        tensors: tensors.len(),
        tensor_bytes: 0,
    };
    for (name, contents) in files {
        let mut file = partial.file(name)?;
        file.append(contents, |_| {}).and_then(|()| file.finish()).map_err(plain)?;
        written.files.push(name.clone());
    }
    let mut index = Index { metadata: BTreeMap::new(), weight_map: BTreeMap::new() };
    let mut elements: Vec<f32> = Vec::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => WeightFiles::SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let mut file = partial.file(&name)?;
        file.append(&header(shard, options.dtype, &partial.folder)?, |_| {}).map_err(plain)?;
        for tensor in *shard {
            elements.clear();
            elements.resize(tensor.shape.iter().product(), 0.0);
            values(tensor, &mut elements)?;
            let path = partial.folder.join(&name);
            let dtype = tensor.dtype(options.dtype);
            append(&mut file, tensor, &elements, dtype, &path, &mut |bytes| {
                written.tensor_bytes += bytes as u64;
                progress(written.tensor_bytes);
            })?;
            index.weight_map.insert(tensor.name.clone(), name.clone());
        }
        file.finish().map_err(plain)?;
        written.files.push(name);
    }
    if shards.len() > 1 {
        index.metadata.insert("total_size", written.tensor_bytes);
        let text = serde_json::to_vec_pretty(&index).map_err(|error| HfError::InvalidFile {
            path: partial.folder.join(WeightFiles::INDEX),
            detail: error.to_string(),
        })?;
        let mut file = partial.file(WeightFiles::INDEX)?;
        file.append(&text, |_| {}).and_then(|()| file.finish()).map_err(plain)?;
        written.files.push(WeightFiles::INDEX.to_string());
    }
    partial.rename_to(path)?;
    Ok(written)
}

/// Splits a list of tensors into shards, in order.
fn shards_of(
    tensors: &[FolderTensor],
    options: FolderOptions,
) -> Result<Vec<&[FolderTensor]>, HfError> {
    let mut names = std::collections::HashSet::new();
    let (mut shards, mut begin, mut filled) = (Vec::new(), 0, 0u64);
    for (at, tensor) in tensors.iter().enumerate() {
        let invalid = |detail: &str| HfError::InvalidTensor {
            name: tensor.name.clone(),
            detail: detail.to_string(),
        };
        if !matches!(options.dtype, CkptDtype::F32 | CkptDtype::Bf16) {
            return Err(invalid(&format!("expected F32 or BF16, got {}", options.dtype)));
        }
        if tensor.name.is_empty() || tensor.name == "__metadata__" || !names.insert(&tensor.name) {
            return Err(invalid("the name is empty, reserved by safetensors, or occurs twice"));
        }
        let bytes = tensor.bytes(options.dtype);
        let bytes = bytes.ok_or_else(|| invalid("its size overflows"))? as u64;
        if at > begin && filled.saturating_add(bytes) > options.shard_bytes_max {
            shards.push(&tensors[begin..at]);
            (begin, filled) = (at, 0);
        }
        filled += bytes;
    }
    shards.push(&tensors[begin..]);
    Ok(shards)
}

fn header(shard: &[FolderTensor], dtype: CkptDtype, folder: &Path) -> Result<Vec<u8>, HfError> {
    let tensors = shard.iter().map(|it| (it.name.as_str(), it.dtype(dtype), &it.shape[..]));
    header_bytes(tensors)
        .map_err(|detail| HfError::InvalidFile { path: folder.to_path_buf(), detail })
}

/// Appends the elements of a tensor as `dtype`.
fn append(
    file: &mut HashingFile<'_, DiskIo>,
    tensor: &FolderTensor,
    elements: &[f32],
    dtype: CkptDtype,
    path: &Path,
    on_piece: &mut dyn FnMut(usize),
) -> Result<(), HfError> {
    let mut bytes = Vec::with_capacity(PIECE_BYTES);
    for (piece, values) in elements.chunks(PIECE_BYTES / 4).enumerate() {
        bytes.clear();
        for (at, &value) in values.iter().enumerate() {
            let rounded = match dtype {
                CkptDtype::Bf16 => bf16::from_f32(value).to_f32(),
                _ => value,
            };
            if !rounded.is_finite() {
                return Err(HfError::NonFinite {
                    path: path.to_path_buf(),
                    name: tensor.name.clone(),
                    index: piece * (PIECE_BYTES / 4) + at,
                    value: rounded.to_string(),
                });
            }
            match dtype {
                CkptDtype::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                _ => bytes.extend(value.to_le_bytes()),
            }
        }
        file.append(&bytes, |_| {}).map_err(plain)?;
        on_piece(bytes.len());
    }
    Ok(())
}

/// A temporary folder next to its destination; dropping it removes the folder unless renamed.
struct Partial {
    folder: PathBuf,
}

impl Partial {
    fn create(path: &Path) -> Result<Partial, HfError> {
        let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if path.symlink_metadata().is_ok() && !is_empty() {
            return Err(HfError::Exists { path: path.to_path_buf() });
        }
        let parent = parent(path);
        fs::create_dir_all(parent).map_err(io("create", parent))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let folder = parent.join(format!(".{name}.tmp-{}", std::process::id()));
        fs::create_dir(&folder).map_err(io("create", &folder))?;
        Ok(Partial { folder })
    }

    fn file(&self, name: &str) -> Result<HashingFile<'static, DiskIo>, HfError> {
        HashingFile::create(&DiskIo, self.folder.join(name)).map_err(plain)
    }

    fn rename_to(self, path: &Path) -> Result<(), HfError> {
        let parent = parent(path);
        DiskIo.sync_dir(&self.folder).map_err(io("sync", &self.folder))?;
        // A rename replaces an empty folder on Unix only.
        let _ = fs::remove_dir(path);
        fs::rename(&self.folder, path).map_err(io("rename", &self.folder))?;
        DiskIo.sync_dir(parent).map_err(io("sync", parent))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Nothing is left after a rename. Errors are ignored: the first error is reported.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> HfError {
    let path = path.to_path_buf();
    move |cause| HfError::Io { action, path, cause }
}

fn plain(error: CheckpointError) -> HfError {
    match error {
        CheckpointError::Io { action, path, cause } => HfError::Io { action, path, cause },
        other => HfError::InvalidFile { path: PathBuf::new(), detail: other.to_string() },
    }
}
