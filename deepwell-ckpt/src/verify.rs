//! Reads every byte of a checkpoint and reports all damage.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::CheckpointError;
use crate::io::PIECE_BYTES;
use crate::load::{Checkpoint, load};
use crate::manifest::{FileEntry, TensorEntry};
use crate::shard::read_header;

/// A damaged range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// The tensor, as `section/name`; `None` for the header, the padding or the whole file.
    pub tensor: Option<String>,
    /// First byte of the damaged range in the file.
    pub offset: u64,
    /// Length of the range.
    pub bytes: u64,
    /// Expected value: a checksum, or a description.
    pub expected: String,
    /// Actual value.
    pub got: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "`{}`", self.file)?;
        if let Some(tensor) = &self.tensor {
            write!(formatter, ", tensor `{tensor}`")?;
        }
        write!(
            formatter,
            ", {} bytes at offset {}: expected {}, got {}",
            self.bytes, self.offset, self.expected, self.got
        )
    }
}

/// Result of [`verify`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// The checkpoint's folder.
    pub path: PathBuf,
    /// Step of the checkpoint.
    pub step: u64,
    /// Number of shards read.
    pub files: usize,
    /// Number of tensors with a verified checksum.
    pub tensors: usize,
    /// Number of bytes read.
    pub bytes: u64,
    /// All damage; empty for a sound checkpoint.
    pub damages: Vec<Damage>,
}

impl VerifyReport {
    /// Whether no byte has changed.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.damages.is_empty()
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_sound() { "sound" } else { "damaged" };
        writeln!(
            formatter,
            "{verdict}: `{}`, step {}, {} files, {} tensors, {} bytes read",
            self.path.display(),
            self.step,
            self.files,
            self.tensors,
            self.bytes
        )?;
        for damage in &self.damages {
            writeln!(formatter, "  {damage}")?;
        }
        Ok(())
    }
}

/// Reads every byte of the checkpoint in folder `path` and compares all checksums of tensors and of
/// whole files, and each shard's own header, with the manifest.
///
/// Damage in a shard is reported instead of returned as an error, so that one run finds all damage.
///
/// # Errors
///
/// As [`load`]: without a valid manifest there is nothing to compare with. A missing or truncated
/// shard is also such an error.
pub fn verify(path: &Path) -> Result<VerifyReport, CheckpointError> {
    let checkpoint = load(path)?;
    let mut report = VerifyReport {
        path: path.to_path_buf(),
        step: checkpoint.step(),
        files: 0,
        tensors: 0,
        bytes: 0,
        damages: Vec::new(),
    };
    let mut buffer = vec![0; PIECE_BYTES];
    for file in checkpoint.files() {
        verify_file(&checkpoint, file, &mut buffer, &mut report)
            .map_err(CheckpointError::io("read", path.join(&file.name)))?;
    }
    Ok(report)
}

fn verify_file(
    checkpoint: &Checkpoint,
    entry: &FileEntry,
    buffer: &mut [u8],
    report: &mut VerifyReport,
) -> io::Result<()> {
    let path = checkpoint.path().join(&entry.name);
    let mut tensors: Vec<&TensorEntry> =
        checkpoint.entries().iter().filter(|tensor| tensor.file == entry.name).collect();
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.bytes));

    let damages_before = report.damages.len();
    let mut file = File::open(&path)?;
    let mut file_hasher = blake3::Hasher::new();
    let mut position = 0;
    for tensor in &tensors {
        // Tensors are contiguous; only the header precedes the first.
        if tensor.begin < position {
            report.damages.push(Damage {
                file: entry.name.clone(),
                tensor: Some(label(tensor)),
                offset: tensor.begin,
                bytes: tensor.bytes,
                expected: format!("a tensor at {position} or later"),
                got: "one that overlaps another".to_string(),
            });
            continue;
        }
        let gap = tensor.begin - position;
        read_through(&mut file, gap, buffer, |piece| {
            file_hasher.update(piece);
        })?;
        let mut tensor_hasher = blake3::Hasher::new();
        read_through(&mut file, tensor.bytes, buffer, |piece| {
            file_hasher.update(piece);
            tensor_hasher.update(piece);
        })?;
        position = tensor.begin + tensor.bytes;
        report.tensors += 1;
        let got = tensor_hasher.finalize().to_hex().to_string();
        if got != tensor.blake3 {
            report.damages.push(Damage {
                file: entry.name.clone(),
                tensor: Some(label(tensor)),
                offset: tensor.begin,
                bytes: tensor.bytes,
                expected: tensor.blake3.clone(),
                got,
            });
        }
    }
    let rest = entry.bytes.saturating_sub(position);
    read_through(&mut file, rest, buffer, |piece| {
        file_hasher.update(piece);
    })?;
    report.files += 1;
    report.bytes += entry.bytes;

    let got = file_hasher.finalize().to_hex().to_string();
    if got != entry.blake3 && report.damages.len() == damages_before {
        // All tensors are sound, so the damage is in the header or the padding.
        report.damages.push(Damage {
            file: entry.name.clone(),
            tensor: None,
            offset: 0,
            bytes: entry.bytes,
            expected: entry.blake3.clone(),
            got,
        });
    } else if let Err(detail) = compare_header(&path, &tensors) {
        report.damages.push(Damage {
            file: entry.name.clone(),
            tensor: None,
            offset: 0,
            bytes: tensors.first().map_or(entry.bytes, |tensor| tensor.begin),
            expected: "a header that agrees with the manifest".to_string(),
            got: detail,
        });
    }
    Ok(())
}

fn label(tensor: &TensorEntry) -> String {
    format!("{}/{}", tensor.section, tensor.name_in_file())
}

/// Checks that the shard's header, as any safetensors reader sees it, matches the manifest.
fn compare_header(path: &Path, tensors: &[&TensorEntry]) -> Result<(), String> {
    let header = read_header(path)?;
    let in_header = header.metadata.tensors();
    if in_header.len() != tensors.len() {
        return Err(format!(
            "{} tensors where the manifest has {}",
            in_header.len(),
            tensors.len()
        ));
    }
    for tensor in tensors {
        let name = &tensor.name_in_file();
        let Some(info) = in_header.get(name) else {
            return Err(format!("no tensor `{name}`"));
        };
        let begin = header.data_begin + info.data_offsets.0 as u64;
        let same = begin == tensor.begin
            && info.dtype == tensor.dtype.to_safetensors()
            && info.shape == tensor.shape;
        if !same {
            return Err(format!("tensor `{name}` as {:?} {} at {begin}", info.shape, info.dtype));
        }
    }
    Ok(())
}

/// Passes exactly `bytes` bytes to `on_piece`.
fn read_through(
    file: &mut File,
    mut bytes: u64,
    buffer: &mut [u8],
    mut on_piece: impl FnMut(&[u8]),
) -> io::Result<()> {
    while bytes > 0 {
        let length = bytes.min(buffer.len() as u64) as usize;
        file.read_exact(&mut buffer[..length])?;
        on_piece(&buffer[..length]);
        bytes -= length as u64;
    }
    Ok(())
}
