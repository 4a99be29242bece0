//! Reads and writes headers of safetensors files, and lists the files of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use deepwell_ir::capture::{StoredTensor, WeightFiles};
use deepwell_ir::{SafetensorsError, SafetensorsHeader};
use serde_json::{Map, Value, json};

use super::QuantizeFileError;

pub(super) const SINGLE_FILE: &str = WeightFiles::SINGLE;
pub(super) const INDEX_FILE: &str = WeightFiles::INDEX;
const METADATA: &str = "__metadata__";

/// Contents of a file's header.
#[derive(Clone, Debug, Default)]
pub(super) struct Header {
    /// In file order.
    pub(super) tensors: Vec<StoredTensor>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Opens a file and reads its header.
pub(super) fn open(path: &Path) -> Result<(File, Header), QuantizeFileError> {
    let file = File::open(path).map_err(QuantizeFileError::io("open", path))?;
    let header = SafetensorsHeader::read(&file).map_err(|error| match error {
        SafetensorsError::Io(source) => QuantizeFileError::io("read", path)(source),
        error => QuantizeFileError::invalid(path, error.to_string()),
    })?;
    let mut tensors = StoredTensor::of_header(&header, path);
    let place = |tensor: &StoredTensor| (tensor.offset_bytes, tensor.size_bytes);
    tensors.sort_by(|a, b| (place(a), &a.name).cmp(&(place(b), &b.name)));
    let metadata = header.metadata.metadata().clone().unwrap_or_default().into_iter().collect();
    Ok((file, Header { tensors, metadata }))
}

/// Bytes of an element, for the types that this module interprets.
fn dtype_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "F32" => Some(4),
        "BF16" | "F16" => Some(2),
        "U8" | "F8_E4M3" => Some(1),
        _ => None,
    }
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(super) struct NewTensor {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

impl NewTensor {
    /// A tensor that is written as it is stored.
    pub(super) fn of(tensor: &StoredTensor) -> NewTensor {
        NewTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            bytes: tensor.size_bytes,
        }
    }
}

/// Rejects two tensors of one name, for a source file at `path`.
pub(super) fn check_names(path: &Path, tensors: &[NewTensor]) -> Result<(), QuantizeFileError> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(twice) => {
            let detail = format!("the output would have two tensors `{}`", twice[0]);
            Err(QuantizeFileError::invalid(path, detail))
        }
    }
}

/// Creates a file with a header and room for its tensors, and returns the offset of each tensor.
/// Tensors are ordered by descending element size, so that each is aligned to its element size.
pub(super) fn create(
    path: &Path,
    tensors: &[NewTensor],
    metadata: &BTreeMap<String, String>,
) -> Result<(File, Vec<u64>), QuantizeFileError> {
    let size = |tensor: &NewTensor| match tensor.dtype.as_str() {
        "F64" | "I64" | "U64" | "C64" => 8,
        "I32" | "U32" => 4,
        "I16" | "U16" => 2,
        dtype => dtype_bytes(dtype).unwrap_or(1),
    };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(size(&tensors[index])));

    let mut object = Map::new();
    if !metadata.is_empty() {
        object.insert(METADATA.to_owned(), json!(metadata));
    }
    let mut begins = vec![0; tensors.len()];
    let mut end = 0;
    for index in order {
        let tensor = &tensors[index];
        begins[index] = end;
        end += tensor.bytes;
        let (dtype, shape) = (&tensor.dtype, &tensor.shape);
        let offsets = [begins[index], end];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        object.insert(tensor.name.clone(), entry);
    }
    let mut text = Value::Object(object).to_string();
    let padded = text.len().next_multiple_of(8);
    text.extend(std::iter::repeat_n(' ', padded - text.len()));

    let mut file = File::create(path).map_err(QuantizeFileError::io("create", path))?;
    let write = QuantizeFileError::io("write", path);
    file.write_all(&(padded as u64).to_le_bytes())
        .and_then(|()| file.write_all(text.as_bytes()))
        .and_then(|()| file.set_len(8 + padded as u64 + end))
        .map_err(write)?;
    begins.iter_mut().for_each(|begin| *begin += 8 + padded as u64);
    Ok((file, begins))
}

/// The files of a model.
#[derive(Debug)]
pub(super) struct Model {
    /// Input path of each file, and its name in the output folder.
    pub(super) files: Vec<(PathBuf, String)>,
    /// Whether the output is a folder.
    pub(super) is_folder: bool,
    /// Whether an index maps tensors to files.
    pub(super) has_index: bool,
}

/// Finds the files of the model at `path`: a safetensors file, an index, or a folder.
pub(super) fn find(path: &Path) -> Result<Model, QuantizeFileError> {
    if path.is_dir() {
        let (index, single) = (path.join(INDEX_FILE), path.join(SINGLE_FILE));
        if index.is_file() {
            return indexed(&index);
        }
        if !single.is_file() {
            return Err(QuantizeFileError::NoModel { path: path.to_path_buf() });
        }
        let files = vec![(single, SINGLE_FILE.to_owned())];
        return Ok(Model { files, is_folder: true, has_index: false });
    }
    if path.extension().is_some_and(|extension| extension == "json") {
        return indexed(path);
    }
    let files = vec![(path.to_path_buf(), String::new())];
    Ok(Model { files, is_folder: false, has_index: false })
}

/// The shards named by an index.
fn indexed(path: &Path) -> Result<Model, QuantizeFileError> {
    let text = fs::read(path).map_err(QuantizeFileError::io("read", path))?;
    let invalid = |detail: &str| QuantizeFileError::invalid(path, detail);
    let index: Value =
        serde_json::from_slice(&text).map_err(|error| invalid(&error.to_string()))?;
    let map: BTreeMap<String, String> = index
        .get("weight_map")
        .and_then(|map| serde_json::from_value(map.clone()).ok())
        .ok_or_else(|| invalid("expected `weight_map`, from names of tensors to files"))?;
    let names: BTreeSet<String> = map.into_values().collect();
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut files = Vec::new();
    for name in names {
        // An index from elsewhere must not lead out of the folder.
        if name.contains(['/', '\\', '\0']) || name == ".." || name.is_empty() {
            return Err(invalid(&format!("shard `{name}` is not a plain file name")));
        }
        files.push((folder.join(&name), name));
    }
    Ok(Model { files, is_folder: true, has_index: true })
}

/// Writes the index of a model of several files.
pub(super) fn write_index(
    folder: &Path,
    files: &[(String, Vec<NewTensor>)],
) -> Result<(), QuantizeFileError> {
    let mut map = BTreeMap::new();
    let mut total = 0;
    for (file, tensors) in files {
        for tensor in tensors {
            map.insert(&tensor.name, file);
            total += tensor.bytes;
        }
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    let path = folder.join(INDEX_FILE);
    fs::write(&path, format!("{index:#}\n")).map_err(QuantizeFileError::io("write", path))
}

/// A tensor without data, for tests of names and shapes.
#[cfg(test)]
pub(super) fn test_tensor(name: String, shape: Vec<usize>) -> StoredTensor {
    let (dtype, file) = (::safetensors::Dtype::F32, PathBuf::new());
    StoredTensor { name, dtype, shape, file, offset_bytes: 0, size_bytes: 0 }
}
