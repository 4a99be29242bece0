//! Writes named tensors as one safetensors file for Hugging Face's loaders.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::HfError;
use crate::error::CheckpointError;
use crate::finite::first_non_finite;
use crate::io::{DiskIo, HashingFile, Io};
use crate::shard::header_bytes;
use crate::tensor::{CkptDtype, tensor_bytes};

/// A tensor to be written: borrowed bytes with type and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteTensor<'a> {
    /// Name, unique within the file.
    pub name: &'a str,
    /// `F32` or `Bf16`.
    pub dtype: CkptDtype,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Row-major little-endian elements.
    pub data: &'a [u8],
}

impl<'a> WriteTensor<'a> {
    /// A tensor of `F32` elements.
    #[must_use]
    pub fn from_f32(name: &'a str, shape: &[usize], data: &'a [f32]) -> Self {
        let data = bytemuck::cast_slice(data);
        WriteTensor { name, dtype: CkptDtype::F32, shape: shape.to_vec(), data }
    }

    /// A tensor of `BF16` elements, given as bit patterns.
    #[must_use]
    pub fn from_bf16_bits(name: &'a str, shape: &[usize], data: &'a [u16]) -> Self {
        let data = bytemuck::cast_slice(data);
        WriteTensor { name, dtype: CkptDtype::Bf16, shape: shape.to_vec(), data }
    }
}

/// Writes `tensors` to the safetensors file `path`, which is replaced only once all data is on
/// disk.
///
/// # Errors
///
/// [`InvalidTensor`](HfError::InvalidTensor) for an unsupported element type, a wrong length or a
/// duplicate name, [`NonFinite`](HfError::NonFinite), both before anything is written;
/// [`Io`](HfError::Io), after which the previous file is unchanged.
pub fn write(path: &Path, tensors: &[WriteTensor<'_>]) -> Result<(), HfError> {
    check(path, tensors)?;
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.element_bytes()));
    let header = header_bytes(sorted.iter().map(|it| (it.name, it.dtype, &it.shape[..])))
        .map_err(|detail| HfError::InvalidFile { path: path.to_path_buf(), detail })?;

    let mut temporary = OsString::from(path);
    temporary.push(format!(".tmp-{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = write_file(&temporary, path, &header, &sorted);
    if written.is_err() {
        // It may not exist. Errors are ignored: the first error is reported.
        let _ = DiskIo.remove_file(&temporary);
    }
    written.map_err(|error| match error {
        CheckpointError::Io { action, path, cause } => HfError::Io { action, path, cause },
        other => HfError::InvalidFile { path: path.to_path_buf(), detail: other.to_string() },
    })
}

fn check(path: &Path, tensors: &[WriteTensor<'_>]) -> Result<(), HfError> {
    let mut names = std::collections::HashSet::new();
    for tensor in tensors {
        let invalid =
            |detail: String| HfError::InvalidTensor { name: tensor.name.to_string(), detail };
        if !matches!(tensor.dtype, CkptDtype::F32 | CkptDtype::Bf16) {
            return Err(invalid(format!("expected F32 or BF16, got {}", tensor.dtype)));
        }
        if tensor.name.is_empty() || tensor.name == "__metadata__" {
            return Err(invalid("the name is empty or reserved by safetensors".to_string()));
        }
        if !names.insert(tensor.name) {
            return Err(invalid("the name occurs twice".to_string()));
        }
        if tensor_bytes(tensor.dtype, &tensor.shape) != Some(tensor.data.len()) {
            return Err(invalid(format!(
                "{} bytes do not make {:?} {}",
                tensor.data.len(),
                tensor.shape,
                tensor.dtype
            )));
        }
        if let Some((index, value)) = first_non_finite(tensor.dtype, tensor.data) {
            return Err(HfError::NonFinite {
                path: path.to_path_buf(),
                name: tensor.name.to_string(),
                index,
                value,
            });
        }
    }
    Ok(())
}

fn write_file(
    temporary: &Path,
    path: &Path,
    header: &[u8],
    tensors: &[&WriteTensor<'_>],
) -> Result<(), CheckpointError> {
    let mut file = HashingFile::create(&DiskIo, temporary.to_path_buf())?;
    file.append(header, |_| {})?;
    for tensor in tensors {
        file.append(tensor.data, |_| {})?;
    }
    file.finish()?;
    DiskIo.rename(temporary, path).map_err(CheckpointError::io("rename", temporary))?;
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    DiskIo.sync_dir(folder).map_err(CheckpointError::io("sync", folder))
}
