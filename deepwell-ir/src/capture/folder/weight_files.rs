//! The safetensors files of a model folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::Value;

use super::{StoredTensor, Weights, foreign_weights};
use crate::capture::CaptureError;
use crate::{SafetensorsError, SafetensorsHeader};

const SINGLE: &str = WeightFiles::SINGLE;
const INDEX: &str = WeightFiles::INDEX;

/// The weight files of a model folder.
///
/// The weights are in `model.safetensors`, otherwise in the shards listed by
/// `model.safetensors.index.json`, otherwise in a complete set of shards
/// `model-00001-of-0000N.safetensors`. As in transformers, all tensors of a listed shard count,
/// regardless of the index entry of each tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightFiles {
    folder: PathBuf,
    /// The files, sorted by name.
    pub files: Vec<PathBuf>,
    /// Remarks on ignored files, as sentences.
    pub remarks: Vec<String>,
    /// File of each tensor according to the index; empty without an index.
    mapped: BTreeMap<String, PathBuf>,
}

impl WeightFiles {
    /// The file of a model with all weights in one file.
    pub const SINGLE: &'static str = "model.safetensors";
    /// The file that maps the tensors of a model to its shards.
    pub const INDEX: &'static str = "model.safetensors.index.json";

    /// Finds the weight files of a folder; `None` for a folder without weights in any form, for
    /// example with only a `config.json` and a tokenizer. No weight file is opened.
    ///
    /// # Errors
    /// Weights under another name or in another format, an incomplete set of shards, a dangling
    /// link, a broken index.
    pub fn find(folder: &Path) -> Result<Option<WeightFiles>, CaptureError> {
        let files = |files| WeightFiles {
            folder: folder.to_path_buf(),
            files,
            remarks: Vec::new(),
            mapped: BTreeMap::new(),
        };
        let [single, index] = [SINGLE, INDEX].map(|name| folder.join(name));
        if is_there(&single)? {
            let mut weight_files = files(vec![single]);
            if index.is_file() {
                let remark = format!("`{INDEX}` is ignored: `{SINGLE}` holds the whole model");
                weight_files.remarks.push(remark);
            }
            return Ok(Some(weight_files));
        }
        if is_there(&index)? {
            let mapped = read_index(folder, &index)?;
            let listed: BTreeSet<&PathBuf> = mapped.values().collect();
            for path in &listed {
                if !is_there(path)? {
                    return Err(CaptureError::NotFound {
                        path: path.to_path_buf(),
                        expected: format!("a shard listed in `{INDEX}`"),
                        hint: "download the missing shard".to_string(),
                    });
                }
            }
            let mut weight_files = files(listed.into_iter().cloned().collect());
            weight_files.mapped = mapped;
            weight_files.remarks.extend(
                weight_files
                    .unlisted()
                    .into_iter()
                    .map(|name| format!("`{name}` is ignored: `{INDEX}` lists no tensor of it")),
            );
            return Ok(Some(weight_files));
        }
        let names = names_in(folder)?;
        if let Some(shards) = whole_shards(folder, &names)? {
            return Ok(Some(files(shards)));
        }
        foreign_weights::refuse(folder, &names)?;
        Ok(None)
    }

    /// Opens the files, reads their headers and returns their tensors.
    ///
    /// # Errors
    /// A file with a broken header or a wrong length, an indexed tensor that is in no file, or a
    /// tensor in two files.
    pub fn open(mut self) -> Result<Weights, CaptureError> {
        let mut all: BTreeMap<String, StoredTensor> = BTreeMap::new();
        let mut opened = BTreeMap::new();
        for path in &self.files {
            let (file, tensors) = open_file(path)?;
            opened.insert(path.clone(), Mutex::new(file));
            for tensor in tensors {
                let Some(other) = all.get(&tensor.name) else {
                    all.insert(tensor.name.clone(), tensor);
                    continue;
                };
                match self.mapped.get(&tensor.name) {
                    Some(mapped) if *mapped == other.file => {}
                    Some(mapped) if *mapped == tensor.file => {
                        all.insert(tensor.name.clone(), tensor);
                    }
                    _ => return Err(twice(&tensor, other)),
                }
            }
        }
        let missing = self.mapped.iter().find(|(name, _)| !all.contains_key(*name));
        if let Some((name, path)) = missing {
            return Err(self.missing(name, path));
        }
        let elsewhere = self.mapped.iter().filter(|(name, path)| all[*name].file != **path);
        let elsewhere = elsewhere.count();
        if elsewhere > 0 {
            self.remarks.push(format!(
                "`{INDEX}` maps {elsewhere} tensors to other shards than hold them: they are \
                 taken from where they are"
            ));
        }
        let WeightFiles { folder, remarks, .. } = self;
        Ok(Weights { folder, tensors: all, files: opened, remarks })
    }

    /// Error for an indexed tensor that is in no listed file.
    fn missing(&self, name: &str, path: &Path) -> CaptureError {
        let holds = |file: &String| {
            let opened = open_file(&self.folder.join(file));
            opened.is_ok_and(|(_, tensors)| tensors.iter().any(|tensor| tensor.name == name))
        };
        let hint = match self.unlisted().into_iter().find(holds) {
            Some(file) => format!("`{file}` holds it, and `{INDEX}` does not list that file"),
            None => "index and shards are from different versions of the model".to_string(),
        };
        CaptureError::WeightFile {
            path: path.to_path_buf(),
            problem: format!(
                "tensor `{name}` is not in it, though `{INDEX}` says so, nor in another listed file"
            ),
            hint,
        }
    }

    /// Names of shards that the index does not list.
    fn unlisted(&self) -> Vec<String> {
        let names = names_in(&self.folder).unwrap_or_default();
        let is_listed = |name: &String| self.files.contains(&self.folder.join(name));
        names.into_iter().filter(|name| shard_of(name).is_some() && !is_listed(name)).collect()
    }
}

/// Whether a file exists at this path; a dangling link or a folder is an error.
fn is_there(path: &Path) -> Result<bool, CaptureError> {
    if path.is_file() {
        return Ok(true);
    }
    let Ok(entry) = path.symlink_metadata() else { return Ok(false) };
    let (problem, hint) = if entry.is_symlink() {
        let target = std::fs::read_link(path).unwrap_or_default();
        let target = target.display();
        (
            format!("expected a file, got a link to `{target}`, where there is none"),
            "bring the file itself to where the link leads, or download it again",
        )
    } else {
        ("expected a file, got a folder or a device".to_string(), "move it away")
    };
    let (path, hint) = (path.to_path_buf(), hint.to_string());
    Err(CaptureError::WeightFile { path, problem, hint })
}

/// Sorted names in a folder; empty if the path is not a folder.
fn names_in(folder: &Path) -> Result<Vec<String>, CaptureError> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(folder).map_err(|source| io_error(folder, source))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| io_error(folder, source))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Shard number and shard count, from a name in the format of transformers.
fn shard_of(name: &str) -> Option<(usize, usize)> {
    let numbers = name.strip_prefix("model-")?.strip_suffix(".safetensors")?;
    let (number, count) = numbers.split_once("-of-")?;
    let (number, count) = Some((number, count)).filter(|(a, b)| is_number(a) && is_number(b))?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

fn is_number(text: &str) -> bool {
    text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A complete set of shards, which needs no index.
fn whole_shards(folder: &Path, names: &[String]) -> Result<Option<Vec<PathBuf>>, CaptureError> {
    let shards: Vec<(&String, (usize, usize))> =
        names.iter().filter_map(|name| Some((name, shard_of(name)?))).collect();
    let Some(&(_, (_, count))) = shards.first() else { return Ok(None) };
    let mut paths = Vec::with_capacity(shards.len());
    for (name, _) in &shards {
        let path = folder.join(name);
        is_there(&path)?;
        paths.push(path);
    }
    let numbers: Vec<usize> = shards.iter().map(|(_, (number, _))| *number).collect();
    let is_whole = shards.iter().all(|(_, (_, all))| *all == count)
        && numbers.len() == count
        && numbers.iter().copied().eq(1..=count);
    if is_whole {
        return Ok(Some(paths));
    }
    let shown: Vec<String> = shards.iter().take(4).map(|(name, _)| format!("`{name}`")).collect();
    Err(CaptureError::UnreadWeights {
        folder: folder.to_path_buf(),
        found: format!("{} of the shards: {}", numbers.len(), shown.join(", ")),
        hint: format!("download the others, or `{INDEX}`, which lists the right ones"),
    })
}

/// The file of each tensor according to an index.
fn read_index(folder: &Path, index: &Path) -> Result<BTreeMap<String, PathBuf>, CaptureError> {
    let broken = |problem: String| CaptureError::WeightFile {
        path: index.to_path_buf(),
        problem,
        hint: "download the file again".to_string(),
    };
    let bytes = std::fs::read(index).map_err(|source| io_error(index, source))?;
    if let Some(error) = lfs_pointer(index, &bytes) {
        return Err(error);
    }
    let json: Value =
        serde_json::from_slice(&bytes).map_err(|error| broken(format!("not JSON: {error}")))?;
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .filter(|map| !map.is_empty())
        .ok_or_else(|| broken("expected an object `weight_map` of tensor to file".to_string()))?;
    let mut mapped = BTreeMap::new();
    for (name, file) in map {
        // Only plain names, so that an index cannot refer to other folders.
        let file = file
            .as_str()
            .filter(|file| Path::new(file).file_name().is_some_and(|plain| plain == *file))
            .ok_or_else(|| broken(format!("tensor `{name}`: expected a file name, got {file}")))?;
        mapped.insert(name.clone(), folder.join(file));
    }
    Ok(mapped)
}

/// Error for a Git LFS pointer in place of the file.
fn lfs_pointer(path: &Path, bytes: &[u8]) -> Option<CaptureError> {
    bytes.starts_with(b"version https://git-lfs").then(|| CaptureError::WeightFile {
        path: path.to_path_buf(),
        problem: "expected weights, got a pointer of Git LFS".to_string(),
        hint: "`git lfs pull` in the folder downloads the file".to_string(),
    })
}

/// Opens a safetensors file and reads its header. The file length must match the header.
fn open_file(path: &Path) -> Result<(File, Vec<StoredTensor>), CaptureError> {
    let mut file = File::open(path).map_err(|source| io_error(path, source))?;
    let header = SafetensorsHeader::read(&file).map_err(|error| match error {
        SafetensorsError::Io(source) => io_error(path, source),
        error => {
            let mut beginning = Vec::new();
            let read = file.rewind().and_then(|()| (&file).take(64).read_to_end(&mut beginning));
            let pointer = read.ok().and_then(|_| lfs_pointer(path, &beginning));
            pointer.unwrap_or_else(|| CaptureError::WeightFile {
                path: path.to_path_buf(),
                problem: error.to_string(),
                hint: "download or save the file again".to_string(),
            })
        }
    })?;
    let tensors = StoredTensor::of_header(&header, path);
    Ok((file, tensors))
}

/// Error for a tensor in two files, of which the index names neither.
fn twice(tensor: &StoredTensor, other: &StoredTensor) -> CaptureError {
    let other = other.file.file_name().unwrap_or_default().to_string_lossy();
    CaptureError::WeightFile {
        path: tensor.file.clone(),
        problem: format!("tensor `{}` is in it and in `{other}`", tensor.name),
        hint: "the shards are of different versions of the model: download them again".to_string(),
    }
}

fn io_error(path: &Path, source: std::io::Error) -> CaptureError {
    CaptureError::Io { path: path.to_path_buf(), source }
}
