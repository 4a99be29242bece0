//! The archive of an exported program: a zip file with the graph as JSON and tensors as raw bytes.
//!
//! ```text
//! NAME/archive_format            pt2
//! NAME/byteorder                 little
//! NAME/models/model.json         the graph
//! NAME/data/weights/…_config.json    which file holds which weight, and its shape and type
//! NAME/data/weights/weight_0         its bytes
//! NAME/data/constants/…              the same for tensors that are not stored with the weights
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::Value;
use zip::ZipArchive;
use zip::read::{ArchiveOffset, Config};
use zip::result::ZipError;

use super::ArchiveTensor;
use super::exported::{Scalar, TensorMeta};
use super::schema::stored_meta;
use crate::capture::CaptureError;

/// Upper limit of the graph's JSON in bytes, ten times the size for models with hundreds of layers.
const GRAPH_BYTES_MAX: u64 = 1 << 30;

/// Folder of the module's state.
const WEIGHTS: &str = "data/weights/";

/// Maximum number of elements of a tensor whose strides repeat stored elements, such as positions
/// that are the same for each sequence. Other tensors have at most as many elements as are stored.
const REPEATED_MAX: usize = 1 << 20;

/// A tensor of the archive.
#[derive(Clone, Debug)]
struct Stored {
    /// The tensor's file in the zip.
    entry: String,
    meta: TensorMeta,
}

/// An opened archive.
#[derive(Debug)]
pub(super) struct Archive {
    pub(super) path: PathBuf,
    zip: ZipArchive<BufReader<File>>,
    /// Names of the zip entries.
    names: Vec<String>,
    /// Common prefix of all names.
    root: String,
    stored: BTreeMap<String, Stored>,
}

impl Archive {
    pub(super) fn open(path: &Path) -> Result<Archive, CaptureError> {
        let io = |source| CaptureError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        // torch.export.save writes nothing before the archive. When detecting an offset, the zip
        // crate may mistake the start of the entry list for the ZIP64 records after the list.
        let config = Config { archive_offset: ArchiveOffset::Known(0) };
        let zip =
            ZipArchive::with_config(config, BufReader::new(file)).map_err(|error| match error {
                ZipError::Io(source) => io(source),
                other => export_error(path, format!("not a zip file: {other}"), AGAIN),
            })?;
        let names: Vec<String> =
            zip.file_names().filter_map(|name| Some(name.ok()?.into_owned())).collect();
        let root = names.iter().find_map(|name| name.strip_suffix("archive_format"));
        let Some(root) = root.map(str::to_string) else {
            let old = names.iter().any(|name| name.ends_with("serialized_exported_program.json"));
            let what = if old {
                "an export of PyTorch 2.8 or earlier, whose weights are pickled"
            } else {
                "a zip file without `archive_format`"
            };
            return Err(export_error(path, format!("expected a .pt2 archive, got {what}"), AGAIN));
        };
        let (path, stored) = (path.to_path_buf(), BTreeMap::new());
        let mut archive = Archive { path, zip, names, root, stored };
        for (name, expected) in [("archive_format", "pt2"), ("byteorder", "little")] {
            let found = archive.text(name)?;
            if found.trim() != expected {
                let what = format!("`{name}`: expected `{expected}`, got `{}`", found.trim());
                return Err(archive.error(what, "export it on a little-endian machine"));
            }
        }
        archive.read_tables()?;
        Ok(archive)
    }

    /// Name and JSON of the first graph by name.
    pub(super) fn graph(&mut self) -> Result<(String, Vec<u8>), CaptureError> {
        let folder = format!("{}models/", self.root);
        let mut names: Vec<String> = self
            .names
            .iter()
            .filter_map(|name| name.strip_prefix(&folder)?.strip_suffix(".json"))
            .map(str::to_string)
            .collect();
        names.sort();
        let Some(name) = names.into_iter().next() else {
            return Err(self.error("expected a graph `models/….json`, got none", AGAIN));
        };
        let bytes = self.bytes(&format!("models/{name}.json"), GRAPH_BYTES_MAX)?;
        Ok((name, bytes))
    }

    /// Shape and type of a stored tensor.
    pub(super) fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.stored.get(name).map(|stored| &stored.meta)
    }

    /// Tensors of the module's state, sorted by name.
    pub(super) fn weights(&self) -> Vec<ArchiveTensor> {
        let of_state = || {
            let is_weight = |stored: &Stored| stored.entry.starts_with(WEIGHTS);
            self.stored.iter().filter(move |(_, stored)| is_weight(stored))
        };
        let mut names: HashMap<(&str, usize), Vec<&String>> = HashMap::new();
        for (name, stored) in of_state() {
            names.entry((stored.entry.as_str(), stored.meta.offset)).or_default().push(name);
        }
        let tensor = |(name, stored): (&String, &Stored)| {
            let all = names[&(stored.entry.as_str(), stored.meta.offset)].iter();
            ArchiveTensor {
                name: name.clone(),
                shape: stored.meta.shape.clone(),
                holds_floats: stored.meta.scalar.is_float(),
                aliases: all.filter(|alias| **alias != name).map(|a| a.to_string()).collect(),
            }
        };
        of_state().map(tensor).collect()
    }

    /// Values of a stored tensor in F32, row-major.
    pub(super) fn values(&mut self, name: &str) -> Result<Vec<f32>, CaptureError> {
        let Some(Stored { entry, meta }) = self.stored.get(name).cloned() else {
            let what = format!("tensor `{name}` is in no file of the archive");
            return Err(self.error(what, AGAIN));
        };
        let width = meta.scalar.bytes();
        let count: usize = meta.shape.iter().product();
        let bytes = self.bytes(&entry, u64::MAX)?;
        let stored = bytes.len() / width;
        let needed = meta.storage_elements().unwrap_or(usize::MAX);
        if stored < needed {
            let needed = needed.saturating_mul(width);
            let what = format!(
                "tensor `{name}` {:?}: expected {needed} bytes in `{entry}`, got {}",
                meta.shape,
                bytes.len()
            );
            return Err(self.error(what, AGAIN));
        }
        if count > stored.max(REPEATED_MAX) {
            let what = format!(
                "tensor `{name}` {:?}: expected {REPEATED_MAX} elements at most of one that \
                 repeats the {stored} of `{entry}`, got {count}",
                meta.shape
            );
            return Err(self.error(what, "make it contiguous before the export"));
        }
        let convert: fn(&[u8]) -> f32 = match meta.scalar {
            Scalar::F32 => |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Scalar::Bf16 => |b| bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Scalar::F16 => |b| f16::from_le_bytes([b[0], b[1]]).to_f32(),
            _ => {
                let what = format!("tensor `{name}`: expected float32, bfloat16 or float16");
                return Err(self.error(what, "export the model in one of these types"));
            }
        };
        let mut values = Vec::with_capacity(count);
        let mut at = vec![0; meta.shape.len()];
        for _ in 0..count {
            let steps = at.iter().zip(&meta.strides);
            let element = meta.offset + steps.map(|(index, step)| index * step).sum::<usize>();
            values.push(convert(&bytes[element * width..][..width]));
            for axis in (0..at.len()).rev() {
                at[axis] += 1;
                if at[axis] < meta.shape[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
        Ok(values)
    }

    fn read_tables(&mut self) -> Result<(), CaptureError> {
        for folder in [WEIGHTS, "data/constants/"] {
            let prefix = format!("{}{folder}", self.root);
            let tables: Vec<String> = self
                .names
                .iter()
                .filter(|name| name.starts_with(&prefix) && name.ends_with("_config.json"))
                .map(|name| name[self.root.len()..].to_string())
                .collect();
            for table in tables {
                let bytes = self.bytes(&table, GRAPH_BYTES_MAX)?;
                let value: Value = serde_json::from_slice(&bytes)
                    .map_err(|error| self.error(format!("`{table}`: not JSON: {error}"), AGAIN))?;
                for (name, entry) in
                    value.get("config").and_then(Value::as_object).into_iter().flatten()
                {
                    self.read_entry(folder, name, entry)?;
                }
            }
        }
        Ok(())
    }

    fn read_entry(&mut self, folder: &str, name: &str, entry: &Value) -> Result<(), CaptureError> {
        if entry.get("use_pickle").and_then(Value::as_bool) == Some(true) {
            let hint = "pickled tensors are not read; export plain tensors, not subclasses of them";
            return Err(self.error(format!("tensor `{name}` is pickled"), hint));
        }
        let file = entry.get("path_name").and_then(Value::as_str);
        let meta = entry.get("tensor_meta").and_then(stored_meta);
        // Constants need not be tensors; only those read by the graph are required.
        if let (Some(file), Some(meta)) = (file, meta) {
            let stored = Stored { entry: format!("{folder}{file}"), meta };
            self.stored.insert(name.to_string(), stored);
        }
        Ok(())
    }

    fn text(&mut self, name: &str) -> Result<String, CaptureError> {
        let bytes = self.bytes(name, 1 << 10)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn bytes(&mut self, name: &str, bytes_max: u64) -> Result<Vec<u8>, CaptureError> {
        let full = format!("{}{name}", self.root);
        let path = self.path.clone();
        let failed = |what: String| export_error(&path, format!("`{name}`: {what}"), AGAIN);
        let entry = self.zip.by_name(&full).map_err(|error| match error {
            ZipError::FileNotFound => failed("not in the archive".to_string()),
            ZipError::UnsupportedArchive(what) => {
                let hint = "torch.export.save writes entries without compression";
                export_error(&path, format!("`{name}`: {what}"), hint)
            }
            other => failed(other.to_string()),
        })?;
        if entry.size() > bytes_max {
            return Err(failed(format!(
                "{} bytes, over the {bytes_max} that are read",
                entry.size()
            )));
        }
        let mut bytes = Vec::new();
        entry
            .take(bytes_max)
            .read_to_end(&mut bytes)
            .map_err(|source| failed(source.to_string()))?;
        Ok(bytes)
    }

    fn error(&self, what: impl Into<String>, hint: &str) -> CaptureError {
        export_error(&self.path, what, hint)
    }
}

const AGAIN: &str = "save it again with torch.export.save of PyTorch 2.9 or later";

fn export_error(path: &Path, what: impl Into<String>, hint: &str) -> CaptureError {
    CaptureError::Export {
        location: path.display().to_string(),
        what: what.into(),
        hint: hint.to_string(),
    }
}
