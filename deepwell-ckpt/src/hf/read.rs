//! Reads the weights of a model folder: `model.safetensors`, or shards.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};

use deepwell_ir::capture::{CaptureError, WeightFiles};
use half::{bf16, f16};
use safetensors::Dtype;

use super::HfError;
use crate::io::{PIECE_BYTES, read_full};

pub(super) const SINGLE_FILE: &str = "model.safetensors";
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Location, type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfTensor {
    /// File of the tensor.
    pub path: PathBuf,
    /// Element type as safetensors names it, such as `BF16`.
    pub dtype: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// First byte in the file.
    begin: u64,
    /// Length in bytes.
    bytes: u64,
}

/// An opened model folder: only headers; tensors are read on request.
#[derive(Debug, Clone)]
pub struct ModelFolder {
    path: PathBuf,
    tensors: BTreeMap<String, HfTensor>,
}

/// Opens the weights of a Hugging Face model folder.
///
/// Reads the headers of the files found by [`WeightFiles`], `model.safetensors` or shards, but no
/// tensors.
///
/// # Errors
///
/// [`NoWeights`](HfError::NoWeights) if there are no weights in a supported form;
/// [`InvalidFile`](HfError::InvalidFile) if a file is missing, malformed or truncated, or if the
/// index does not match the shards; [`Io`](HfError::Io).
pub fn open_model_folder(path: &Path) -> Result<ModelFolder, HfError> {
    let no_weights = |reason| HfError::NoWeights { path: path.to_path_buf(), reason };
    if !path.is_dir() {
        let reason = format!("expected `{SINGLE_FILE}`, but there is no such folder");
        return Err(no_weights(reason));
    }
    let found = WeightFiles::find(path).map_err(of_capture)?;
    let Some(mut files) = found else {
        return Err(no_weights(format!("expected `{SINGLE_FILE}`, or `{INDEX_FILE}` and shards")));
    };
    let tensors = files.tensors().map_err(of_capture)?.into_iter().map(|(name, tensor)| {
        let tensor = HfTensor {
            path: tensor.path,
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape,
            begin: tensor.offset_bytes,
            bytes: tensor.size_bytes,
        };
        (name, tensor)
    });
    Ok(ModelFolder { path: path.to_path_buf(), tensors: tensors.collect() })
}

/// Converts an error of deepwell-ir to this crate's error.
fn of_capture(error: CaptureError) -> HfError {
    match error {
        CaptureError::Io { path, source } => HfError::Io { action: "read", path, cause: source },
        CaptureError::UnreadWeights { folder, found, hint } => HfError::NoWeights {
            path: folder,
            reason: format!(
                "expected `{SINGLE_FILE}`, or `{INDEX_FILE}` and shards, got {found}\nhint: {hint}"
            ),
        },
        CaptureError::NotFound { path, expected, hint } => {
            HfError::InvalidFile { path, detail: format!("expected {expected}\nhint: {hint}") }
        }
        CaptureError::WeightFile { path, problem, hint } => {
            HfError::InvalidFile { path, detail: format!("{problem}\nhint: {hint}") }
        }
        other => HfError::InvalidFile { path: PathBuf::new(), detail: other.to_string() },
    }
}

/// Element types with a conversion to floats.
#[derive(Clone, Copy)]
enum Source {
    F32,
    F16,
    Bf16,
}

impl Source {
    fn element_bytes(self) -> usize {
        match self {
            Source::F32 => 4,
            Source::F16 | Source::Bf16 => 2,
        }
    }

    fn to_f32(self, element: &[u8]) -> f32 {
        match (self, element) {
            (Source::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Source::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Source::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            _ => unreachable!("elements come in chunks of `element_bytes`"),
        }
    }
}

impl ModelFolder {
    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors by name, in alphabetical order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &HfTensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Location, type and shape of a tensor.
    ///
    /// # Errors
    ///
    /// [`HfError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<&HfTensor, HfError> {
        self.tensors.get(name).ok_or_else(|| HfError::MissingTensor {
            path: self.path.clone(),
            name: name.to_string(),
            hint: self.missing_hint(name),
        })
    }

    fn missing_hint(&self, name: &str) -> String {
        // Most often, names differ in a prefix: `model.layers…` against `layers…`.
        let similar = self.tensors.keys().find(|candidate| {
            candidate.ends_with(&format!(".{name}")) || name.ends_with(&format!(".{candidate}"))
        });
        match (similar, self.tensors.keys().next()) {
            (Some(similar), _) => format!("did you mean `{similar}`?"),
            (None, Some(first)) => {
                format!("it has {} tensors, such as `{first}`", self.tensors.len())
            }
            (None, None) => "it has no tensors".to_string(),
        }
    }

    /// Reads a tensor of this shape into `buffer`, one element per value. F32, BF16 and F16 are
    /// converted without loss. Memory: 1 MiB besides the buffer.
    ///
    /// # Errors
    ///
    /// [`MissingTensor`](HfError::MissingTensor), [`WrongDtype`](HfError::WrongDtype),
    /// [`WrongShape`](HfError::WrongShape), [`BufferLength`](HfError::BufferLength),
    /// [`NonFinite`](HfError::NonFinite) and [`Io`](HfError::Io).
    pub fn read_f32_into(
        &self,
        name: &str,
        shape: &[usize],
        buffer: &mut [f32],
    ) -> Result<(), HfError> {
        self.read_converted(name, shape, buffer, |value| value, f32::is_finite)
    }

    /// Reads a tensor of this shape.
    ///
    /// # Errors
    ///
    /// As [`read_f32_into`](ModelFolder::read_f32_into).
    pub fn read_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, HfError> {
        let mut buffer = vec![0.0; self.elements(name, shape)?];
        self.read_f32_into(name, shape, &mut buffer)?;
        Ok(buffer)
    }

    /// Reads a tensor of this shape into `buffer` as BF16 bit patterns, rounding to nearest, ties
    /// to even. A value beyond the range of BF16 is an error.
    ///
    /// # Errors
    ///
    /// As [`read_f32_into`](ModelFolder::read_f32_into).
    pub fn read_bf16_bits_into(
        &self,
        name: &str,
        shape: &[usize],
        buffer: &mut [u16],
    ) -> Result<(), HfError> {
        let convert = |value| bf16::from_f32(value).to_bits();
        self.read_converted(name, shape, buffer, convert, |bits| bits & 0x7F80 != 0x7F80)
    }

    /// Reads the bytes of a tensor of this shape with one byte per element. `dtype` is a
    /// safetensors name, `U8` or `F8_E4M3`, for example for the data of packed weights.
    ///
    /// # Errors
    ///
    /// [`MissingTensor`](HfError::MissingTensor), [`WrongDtype`](HfError::WrongDtype),
    /// [`WrongShape`](HfError::WrongShape) and [`Io`](HfError::Io).
    pub fn read_bytes(
        &self,
        name: &str,
        shape: &[usize],
        dtype: &'static str,
    ) -> Result<Vec<u8>, HfError> {
        let tensor = self.tensor(name)?;
        let elements = self.elements(name, shape)?;
        if tensor.dtype != dtype || tensor.bytes != elements as u64 {
            return Err(HfError::WrongDtype {
                path: tensor.path.clone(),
                name: name.to_string(),
                expected: dtype,
                got: tensor.dtype.clone(),
            });
        }
        let io = |cause| HfError::Io { action: "read", path: tensor.path.clone(), cause };
        let mut file = File::open(&tensor.path).map_err(io)?;
        file.seek(SeekFrom::Start(tensor.begin)).map_err(io)?;
        let mut bytes = vec![0; elements];
        if read_full(&mut file, &mut bytes).map_err(io)? < elements {
            return Err(HfError::InvalidFile {
                path: tensor.path.clone(),
                detail: format!("it became shorter while tensor `{name}` was read"),
            });
        }
        Ok(bytes)
    }

    /// Returns the number of elements of a tensor, which must have this shape.
    fn elements(&self, name: &str, shape: &[usize]) -> Result<usize, HfError> {
        let tensor = self.tensor(name)?;
        if tensor.shape != shape {
            return Err(HfError::WrongShape {
                path: tensor.path.clone(),
                name: name.to_string(),
                expected: shape.to_vec(),
                got: tensor.shape.clone(),
            });
        }
        // The header was checked against the file's length, so the size is valid.
        Ok(shape.iter().product())
    }

    fn read_converted<T: Copy>(
        &self,
        name: &str,
        shape: &[usize],
        buffer: &mut [T],
        convert: impl Fn(f32) -> T,
        is_finite: impl Fn(T) -> bool,
    ) -> Result<(), HfError> {
        let tensor = self.tensor(name)?;
        let elements = self.elements(name, shape)?;
        let source = match tensor.dtype.as_str() {
            dtype if dtype == Dtype::F32.to_string() => Source::F32,
            dtype if dtype == Dtype::F16.to_string() => Source::F16,
            dtype if dtype == Dtype::BF16.to_string() => Source::Bf16,
            other => {
                return Err(HfError::WrongDtype {
                    path: tensor.path.clone(),
                    name: name.to_string(),
                    expected: "one of F32, BF16, F16",
                    got: other.to_string(),
                });
            }
        };
        if buffer.len() != elements {
            return Err(HfError::BufferLength {
                name: name.to_string(),
                expected: elements,
                got: buffer.len(),
            });
        }
        let io = |cause| HfError::Io { action: "read", path: tensor.path.clone(), cause };
        let mut file = File::open(&tensor.path).map_err(io)?;
        file.seek(SeekFrom::Start(tensor.begin)).map_err(io)?;
        let width = source.element_bytes();
        let mut bytes = vec![0; PIECE_BYTES.min(tensor.bytes as usize)];
        let piece_elements = PIECE_BYTES / width;
        for (piece_index, values) in buffer.chunks_mut(piece_elements).enumerate() {
            let piece = &mut bytes[..values.len() * width];
            if read_full(&mut file, piece).map_err(io)? < piece.len() {
                return Err(HfError::InvalidFile {
                    path: tensor.path.clone(),
                    detail: format!("it became shorter while tensor `{name}` was read"),
                });
            }
            for (index, element) in piece.chunks_exact(width).enumerate() {
                let value = source.to_f32(element);
                let converted = convert(value);
                if !is_finite(converted) {
                    // A finite value beyond the range of the target type.
                    let value = if value.is_finite() {
                        format!("{value:e}, beyond the range of BF16,")
                    } else {
                        value.to_string()
                    };
                    return Err(HfError::NonFinite {
                        path: tensor.path.clone(),
                        name: name.to_string(),
                        index: piece_index * piece_elements + index,
                        value,
                    });
                }
                values[index] = converted;
            }
        }
        Ok(())
    }
}
