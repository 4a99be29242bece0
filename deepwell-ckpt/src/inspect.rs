//! Describes a checkpoint without reading its tensors.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::error::CheckpointError;
use crate::load::load;
use crate::manifest::{FileEntry, TensorEntry};
use crate::tensor::{CkptDtype, Section};

/// Summary of one section.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SectionSummary {
    /// The section.
    pub section: Section,
    /// Number of tensors.
    pub tensors: usize,
    /// Total number of elements.
    pub elements: u64,
    /// Total bytes.
    pub bytes: u64,
    /// Element types in use.
    pub dtypes: Vec<CkptDtype>,
    /// Number of shards.
    pub files: usize,
}

/// A checkpoint's contents. `{}` prints a table of sections, `{:#}` also every tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// The checkpoint's folder.
    pub path: PathBuf,
    /// Version of the format.
    pub format_version: u64,
    /// Completed training steps.
    pub step: u64,
    /// Total bytes of all tensors.
    pub tensor_bytes: u64,
    /// Nonempty sections, in the order of the shards.
    pub sections: Vec<SectionSummary>,
    /// All shards.
    pub files: Vec<FileEntry>,
    /// All tensors; those written by several ranks part by part.
    pub tensors: Vec<TensorEntry>,
    /// Layout of the model on the hardware.
    pub plan: Value,
    /// Precision per tensor.
    pub policy: Value,
    /// State of the numeric guards.
    pub guards: Value,
    /// State of the random-number generators.
    pub rng: Value,
    /// Position of the next batch in the data.
    pub data_position: Value,
    /// Options, model configuration, seeds, versions.
    pub run: Value,
}

/// Describes the checkpoint in folder `path`.
///
/// # Errors
///
/// As [`load`].
pub fn inspect(path: &Path) -> Result<Inspection, CheckpointError> {
    let checkpoint = load(path)?;
    let manifest = checkpoint.manifest().clone();
    let sections: Vec<_> = Section::ALL
        .into_iter()
        .filter_map(|section| summarize(section, &manifest.tensors))
        .collect();
    Ok(Inspection {
        path: path.to_path_buf(),
        format_version: manifest.format_version,
        step: manifest.step,
        tensor_bytes: sections.iter().map(|section| section.bytes).sum(),
        sections,
        files: manifest.files,
        tensors: manifest.tensors,
        plan: manifest.plan,
        policy: manifest.policy,
        guards: manifest.guards,
        rng: manifest.rng,
        data_position: manifest.data_position,
        run: manifest.run,
    })
}

fn summarize(section: Section, tensors: &[TensorEntry]) -> Option<SectionSummary> {
    let members: Vec<_> = tensors.iter().filter(|tensor| tensor.section == section).collect();
    if members.is_empty() {
        return None;
    }
    let dtypes: BTreeSet<_> = members.iter().map(|tensor| tensor.dtype).collect();
    let files: BTreeSet<_> = members.iter().map(|tensor| tensor.file.as_str()).collect();
    Some(SectionSummary {
        section,
        tensors: members.iter().map(|tensor| tensor.name.as_str()).collect::<HashSet<_>>().len(),
        elements: members
            .iter()
            .map(|tensor| tensor.bytes / tensor.dtype.element_bytes() as u64)
            .sum(),
        bytes: members.iter().map(|tensor| tensor.bytes).sum(),
        dtypes: dtypes.into_iter().collect(),
        files: files.len(),
    })
}

impl fmt::Display for Inspection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "checkpoint  {}", self.path.display())?;
        writeln!(formatter, "step        {}", self.step)?;
        writeln!(formatter, "format      v{}", self.format_version)?;
        writeln!(
            formatter,
            "\n{:<14} {:>8} {:>16} {:>16} {:>6}  element types",
            "section", "tensors", "elements", "bytes", "files"
        )?;
        for section in &self.sections {
            let dtypes: Vec<_> = section.dtypes.iter().map(|dtype| dtype.name()).collect();
            writeln!(
                formatter,
                "{:<14} {:>8} {:>16} {:>16} {:>6}  {}",
                section.section,
                section.tensors,
                section.elements,
                section.bytes,
                section.files,
                dtypes.join(" ")
            )?;
        }
        writeln!(
            formatter,
            "{:<14} {:>8} {:>16} {:>16} {:>6}",
            "total",
            self.sections.iter().map(|section| section.tensors).sum::<usize>(),
            self.sections.iter().map(|section| section.elements).sum::<u64>(),
            self.tensor_bytes,
            self.files.len()
        )?;
        writeln!(formatter)?;
        for (name, value) in [
            ("plan", &self.plan),
            ("policy", &self.policy),
            ("guards", &self.guards),
            ("rng", &self.rng),
            ("data position", &self.data_position),
            ("run", &self.run),
        ] {
            writeln!(formatter, "{name:<14} {}", one_line(value))?;
        }
        if formatter.alternate() {
            writeln!(formatter)?;
            for tensor in &self.tensors {
                writeln!(
                    formatter,
                    "{:<14} {:<8} {:<20} {}",
                    tensor.section,
                    tensor.dtype,
                    format!("{:?}", tensor.shape),
                    tensor.name_in_file()
                )?;
            }
        }
        Ok(())
    }
}

/// A JSON value in at most one line; long values are summarized.
fn one_line(value: &Value) -> String {
    const COLUMNS_MAX: usize = 80;
    let text = value.to_string();
    if text.chars().count() <= COLUMNS_MAX {
        return text;
    }
    match value {
        Value::Object(fields) => {
            let names: Vec<_> = fields.keys().map(String::as_str).collect();
            let names = names.join(", ");
            let names = match names.char_indices().nth(COLUMNS_MAX - 10) {
                Some((end, _)) => format!("{}...", &names[..end]),
                None => names,
            };
            format!("{} bytes of JSON: {names}", text.len())
        }
        Value::Array(items) => format!("{} bytes of JSON, {} items", text.len(), items.len()),
        _ => format!("{} bytes of JSON", text.len()),
    }
}
