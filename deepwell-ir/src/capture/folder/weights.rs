//! The tensors of weight files: their headers, and their values on request.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorInfo};

use super::WeightFiles;
use crate::SafetensorsHeader;
use crate::capture::CaptureError;

/// Size of the buffer for reading: memory use does not grow with the model.
const PIECE_BYTES: usize = 1 << 20;
const QUANTIZED: &str = "weights that are already quantized have to be converted first";

/// A tensor in a weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the file. [`ModelWeights::stored_name`](crate::capture::ModelWeights::stored_name)
    /// maps the name of a [`StoredSlice`](crate::capture::StoredSlice) to this name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// The file of the tensor.
    pub file: PathBuf,
    /// Offset of the data from the start of the file.
    pub offset_bytes: u64,
    /// Size of the data.
    pub size_bytes: u64,
}

impl StoredTensor {
    /// The tensors of a header, of the file at `path`.
    pub fn of_header(header: &SafetensorsHeader, path: &Path) -> Vec<StoredTensor> {
        let tensor = |(name, info): (String, &TensorInfo)| {
            let (start, end) = info.data_offsets;
            StoredTensor {
                name,
                dtype: info.dtype,
                shape: info.shape.clone(),
                file: path.to_path_buf(),
                offset_bytes: header.data_begin + start as u64,
                size_bytes: (end - start) as u64,
            }
        };
        header.metadata.tensors().into_iter().map(tensor).collect()
    }
}

/// The opened weights of a model folder.
///
/// Each header is read once. The files stay open, so that values come from the files whose headers
/// were checked.
///
/// ```
/// use deepwell_ir::capture::Weights;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let header = br#"{"norm": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend(header);
/// file.extend([0.5f32, -1.0].map(f32::to_le_bytes).concat());
/// std::fs::write(folder.join("model.safetensors"), file)?;
///
/// let weights = Weights::open(folder)?;
/// assert_eq!(weights.read_f32("norm", &[2])?, [0.5, -1.0]);
/// let error = weights.read_f32("norm", &[1, 2]).unwrap_err();
/// assert!(error.to_string().contains("expected shape [1, 2], got shape [2]"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Weights {
    pub(super) folder: PathBuf,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
    /// A read moves the position of its file.
    pub(super) files: BTreeMap<PathBuf, Mutex<File>>,
    /// Remarks on ignored files and on the index, as sentences.
    pub remarks: Vec<String>,
}

impl Weights {
    /// Opens the weights of a folder: finds its files, reads their headers, and no tensor.
    ///
    /// # Errors
    /// A folder without weights, and errors of [`WeightFiles::find`] and [`WeightFiles::open`].
    pub fn open(folder: &Path) -> Result<Weights, CaptureError> {
        let files = WeightFiles::find(folder)?.ok_or_else(|| CaptureError::NotFound {
            path: folder.to_path_buf(),
            expected: format!(
                "`{}`, or `{}` and its shards",
                WeightFiles::SINGLE,
                WeightFiles::INDEX
            ),
            hint: "download the weights too; the config.json alone begins from fresh weights"
                .to_string(),
        })?;
        files.open()
    }

    /// All tensors of the files, in the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &StoredTensor> {
        self.tensors.values()
    }

    /// The tensor of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// Reads a tensor of this shape into `buffer`, one element per value. F32, BF16 and F16 are
    /// converted without loss. Memory: 1 MiB besides the buffer.
    ///
    /// # Errors
    /// A tensor that is missing, or of another shape or element type; a buffer of another length; a
    /// value that is not finite; a failed read.
    pub fn read_f32_into(
        &self,
        name: &str,
        shape: &[usize],
        buffer: &mut [f32],
    ) -> Result<(), CaptureError> {
        let tensor = self.of_shape(name, shape)?;
        let Some((width, convert)) = float_of(tensor.dtype) else {
            let got = tensor.dtype.to_string();
            return Err(tensor.mismatch("one of F32, BF16, F16", &got, QUANTIZED));
        };
        let elements: usize = shape.iter().product();
        if buffer.len() != elements {
            let (expected, got) = (format!("a buffer of {elements} elements"), buffer.len());
            let hint = "the buffer holds one value per element";
            return Err(tensor.mismatch(&expected, &got.to_string(), hint));
        }
        let mut bytes = vec![0; PIECE_BYTES.min(tensor.size_bytes as usize)];
        let piece_elements = PIECE_BYTES / width;
        for (piece_index, values) in buffer.chunks_mut(piece_elements).enumerate() {
            let begin = piece_index * piece_elements;
            let piece = &mut bytes[..values.len() * width];
            self.read_at(tensor, (begin * width) as u64, piece)?;
            for (index, element) in piece.chunks_exact(width).enumerate() {
                values[index] = convert(element);
            }
            if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                return Err(CaptureError::NonFinite {
                    name: name.to_string(),
                    path: tensor.file.clone(),
                    index: begin + index,
                    value: values[index],
                });
            }
        }
        Ok(())
    }

    /// Reads a tensor of this shape.
    ///
    /// # Errors
    /// As [`read_f32_into`](Weights::read_f32_into).
    pub fn read_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CaptureError> {
        let elements = self.of_shape(name, shape)?.shape.iter().product();
        let mut buffer = vec![0.0; elements];
        self.read_f32_into(name, shape, &mut buffer)?;
        Ok(buffer)
    }

    /// Reads the bytes of a tensor of this shape and of an element type of one byte, for example
    /// the data of packed weights.
    ///
    /// # Errors
    /// A tensor that is missing, or of another shape or element type; a failed read.
    pub fn read_bytes(
        &self,
        name: &str,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<Vec<u8>, CaptureError> {
        let tensor = self.of_shape(name, shape)?;
        let elements: usize = shape.iter().product();
        if tensor.dtype != dtype || tensor.size_bytes != elements as u64 {
            let (expected, got) = (dtype.to_string(), tensor.dtype.to_string());
            return Err(tensor.mismatch(&expected, &got, QUANTIZED));
        }
        let mut bytes = vec![0; elements];
        self.read_at(tensor, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// The tensor of this name, which must have this shape. The header was checked against the
    /// length of the file, so that the shape gives a valid size.
    fn of_shape(&self, name: &str, shape: &[usize]) -> Result<&StoredTensor, CaptureError> {
        let tensor = self.tensor(name).ok_or_else(|| CaptureError::MissingTensor {
            name: name.to_string(),
            expected: format!("shape {shape:?}"),
            folder: self.folder.clone(),
            hint: self.missing_hint(name),
        })?;
        if tensor.shape == shape {
            return Ok(tensor);
        }
        let (expected, got) = (format!("shape {shape:?}"), format!("shape {:?}", tensor.shape));
        let hint = "config.json and the weights are of different models";
        Err(tensor.mismatch(&expected, &got, hint))
    }

    /// Most often, names differ in a prefix: `model.layers…` and `layers…`.
    fn missing_hint(&self, name: &str) -> String {
        let similar = self.tensors.keys().find(|candidate| {
            candidate.ends_with(&format!(".{name}")) || name.ends_with(&format!(".{candidate}"))
        });
        match (similar, self.tensors.keys().next()) {
            (Some(similar), _) => format!("did you mean `{similar}`?"),
            (None, Some(first)) => {
                format!("the files hold {} tensors, such as `{first}`", self.tensors.len())
            }
            (None, None) => "the files hold no tensor".to_string(),
        }
    }

    /// Fills `bytes` from the tensor's data, starting `begin` bytes after its first byte.
    fn read_at(
        &self,
        tensor: &StoredTensor,
        begin: u64,
        bytes: &mut [u8],
    ) -> Result<(), CaptureError> {
        let mut file = self.files[&tensor.file].lock().unwrap_or_else(PoisonError::into_inner);
        let read = file
            .seek(SeekFrom::Start(tensor.offset_bytes + begin))
            .and_then(|_| file.read_exact(bytes));
        read.map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => CaptureError::WeightFile {
                path: tensor.file.clone(),
                problem: format!("it became shorter while tensor `{}` was read", tensor.name),
                hint: "download or save the file again".to_string(),
            },
            _ => CaptureError::Io { path: tensor.file.clone(), source },
        })
    }
}

/// Conversion of the bytes of an element.
type Convert = fn(&[u8]) -> f32;

/// Bytes of an element and its conversion, for the types that FP32 represents.
fn float_of(dtype: Dtype) -> Option<(usize, Convert)> {
    // Elements come in chunks of as many bytes.
    fn array<const N: usize>(element: &[u8]) -> [u8; N] {
        element.first_chunk().copied().unwrap_or([0; N])
    }
    match dtype {
        Dtype::F32 => Some((4, |element| f32::from_le_bytes(array(element)))),
        Dtype::F16 => Some((2, |element| f16::from_le_bytes(array(element)).to_f32())),
        Dtype::BF16 => Some((2, |element| bf16::from_le_bytes(array(element)).to_f32())),
        _ => None,
    }
}
