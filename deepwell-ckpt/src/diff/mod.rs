//! Differences between two checkpoints: tensors, steps and JSON sections.

mod elements;
mod json;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

pub use self::json::{JsonDifference, json_differences};
use crate::error::CheckpointError;
use crate::load::{Checkpoint, StoredTensor, load};
use crate::tensor::{CkptDtype, Section};

/// A tensor that only one of the checkpoints has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LoneTensor {
    /// Section of the tensor.
    pub section: Section,
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: CkptDtype,
    /// Shape.
    pub shape: Vec<usize>,
}

/// A tensor with another shape or element type in the second checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedTensor {
    /// Section of the tensor.
    pub section: Section,
    /// Name of the tensor.
    pub name: String,
    /// Element types in the first and in the second checkpoint.
    pub dtypes: [CkptDtype; 2],
    /// Shapes in both checkpoints.
    pub shapes: [Vec<usize>; 2],
}

/// A tensor with other values in the second checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDifference {
    /// Section of the tensor.
    pub section: Section,
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: CkptDtype,
    /// Number of elements.
    pub elements: u64,
    /// Elements whose bits differ.
    pub differing: u64,
    /// Largest difference of two values.
    pub max_abs: f64,
    /// Row-major index of the first element with that difference.
    pub max_abs_at: u64,
    /// Euclidean norm of the difference relative to the norm of the first checkpoint's tensor;
    /// `None` if that tensor is all zeros.
    pub relative: Option<f64>,
}

/// Result of [`diff`]. `{}` prints it as a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckpointDiff {
    /// The first checkpoint.
    pub a: PathBuf,
    /// The second checkpoint.
    pub b: PathBuf,
    /// Training steps of both checkpoints.
    pub steps: [u64; 2],
    /// Number of tensors with the same bits in both checkpoints.
    pub equal: usize,
    /// Tensors of the first checkpoint that are missing in the second.
    pub missing: Vec<LoneTensor>,
    /// Tensors of the second checkpoint that are missing in the first.
    pub added: Vec<LoneTensor>,
    /// Tensors with another shape or element type.
    pub changed: Vec<ChangedTensor>,
    /// Tensors with other values.
    pub differing: Vec<TensorDifference>,
    /// Differences in plan, policy, guards, random numbers, data position and run.
    pub sections: Vec<JsonDifference>,
}

impl CheckpointDiff {
    /// Whether both checkpoints have the same tensors with the same bits.
    #[must_use]
    pub fn has_equal_tensors(&self) -> bool {
        self.missing.is_empty()
            && self.added.is_empty()
            && self.changed.is_empty()
            && self.differing.is_empty()
    }

    /// Whether nothing differs.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.has_equal_tensors() && self.steps[0] == self.steps[1] && self.sections.is_empty()
    }
}

/// Compares the checkpoints in folders `a` and `b`.
///
/// Tensors with the same checksums in both manifests are equal and not read. Other tensors are read
/// together, 2 MiB at a time, and their checksums are verified. Tensors stored in parts are read
/// whole.
///
/// ```
/// use deepwell_ckpt::{CheckpointContents, SaveOptions, Section, TensorView, diff, save};
///
/// # let root = tempfile::tempdir()?;
/// # let root = root.path();
/// let folders = [(1, [1.0f32, 2.0]), (2, [1.0, 2.5])].map(|(step, head)| {
///     let mut contents = CheckpointContents::new(step);
///     contents.tensors = vec![TensorView::from_f32(Section::Master, "head", &[2], &head)];
///     save(root, &contents, &SaveOptions::default()).map(|saved| saved.path)
/// });
/// let [a, b] = folders;
/// let found = diff(&a?, &b?)?;
/// assert_eq!(found.steps, [1, 2]);
/// assert_eq!((found.differing[0].differing, found.differing[0].max_abs), (1, 0.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// As [`load`], for either; [`TensorChecksum`](CheckpointError::TensorChecksum) for a damaged
/// tensor; [`Io`](CheckpointError::Io).
pub fn diff(a: &Path, b: &Path) -> Result<CheckpointDiff, CheckpointError> {
    let (first, second) = (load(a)?, load(b)?);
    let others: HashMap<(Section, &str), &StoredTensor> =
        second.tensors().iter().map(|tensor| (key(tensor), tensor)).collect();
    let mut differences = CheckpointDiff {
        a: a.to_path_buf(),
        b: b.to_path_buf(),
        steps: [first.step(), second.step()],
        equal: 0,
        missing: Vec::new(),
        added: Vec::new(),
        changed: Vec::new(),
        differing: Vec::new(),
        sections: sections(&first, &second),
    };
    let mut buffers = [Vec::new(), Vec::new()];
    for tensor in first.tensors() {
        let Some(&other) = others.get(&key(tensor)) else {
            differences.missing.push(lone(tensor));
            continue;
        };
        let (section, name) = (tensor.section, tensor.name.clone());
        if (tensor.dtype, &tensor.shape) != (other.dtype, &other.shape) {
            differences.changed.push(ChangedTensor {
                section,
                name,
                dtypes: [tensor.dtype, other.dtype],
                shapes: [tensor.shape.clone(), other.shape.clone()],
            });
            continue;
        }
        if has_same_checksums([(&first, tensor), (&second, other)]) {
            differences.equal += 1;
            continue;
        }
        let distance = elements::compare([(&first, tensor), (&second, other)], &mut buffers)?;
        // The same elements, split into other parts.
        if distance.differing == 0 {
            differences.equal += 1;
            continue;
        }
        differences.differing.push(TensorDifference {
            section,
            name,
            dtype: tensor.dtype,
            elements: tensor.bytes / tensor.dtype.element_bytes() as u64,
            differing: distance.differing,
            max_abs: distance.max_abs,
            max_abs_at: distance.max_abs_at,
            relative: distance.relative(),
        });
    }
    let in_first: HashSet<(Section, &str)> = first.tensors().iter().map(key).collect();
    let added = second.tensors().iter().filter(|tensor| !in_first.contains(&key(tensor)));
    differences.added.extend(added.map(lone));
    Ok(differences)
}

/// Whether the manifests alone show that two tensors are equal: the same parts with the same
/// checksums.
fn has_same_checksums([a, b]: [(&Checkpoint, &StoredTensor); 2]) -> bool {
    checksums(a) == checksums(b)
}

/// Offset, shape and checksum of each slice of a tensor, sorted.
fn checksums(
    (checkpoint, tensor): (&Checkpoint, &StoredTensor),
) -> Vec<(Vec<usize>, Vec<usize>, String)> {
    let entries = tensor.entries.iter().map(|&index| &checkpoint.entries()[index]);
    let mut checksums: Vec<_> =
        entries.map(|it| (it.global_offset.clone(), it.shape.clone(), it.blake3.clone())).collect();
    checksums.sort();
    checksums
}

fn key(tensor: &StoredTensor) -> (Section, &str) {
    (tensor.section, &tensor.name)
}

fn lone(tensor: &StoredTensor) -> LoneTensor {
    LoneTensor {
        section: tensor.section,
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
    }
}

fn sections(first: &Checkpoint, second: &Checkpoint) -> Vec<JsonDifference> {
    let mut found = Vec::new();
    let mut compare = |name: &str, section: fn(&Checkpoint) -> &Value| {
        json::compare(name, Some(section(first)), Some(section(second)), &mut found);
    };
    compare("plan", Checkpoint::plan);
    compare("policy", Checkpoint::policy);
    compare("guards", Checkpoint::guards);
    compare("rng", Checkpoint::rng);
    compare("data_position", Checkpoint::data_position);
    compare("run", Checkpoint::run);
    found
}

impl fmt::Display for CheckpointDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "a  {}, step {}", self.a.display(), self.steps[0])?;
        writeln!(f, "b  {}, step {}", self.b.display(), self.steps[1])?;
        for (heading, tensors) in [("only in a", &self.missing), ("only in b", &self.added)] {
            if !tensors.is_empty() {
                writeln!(f, "\n{heading}")?;
            }
            for tensor in tensors {
                let (dtype, shape) = (tensor.dtype, &tensor.shape);
                writeln!(f, "  {:<14} {} {dtype} {shape:?}", tensor.section, tensor.name)?;
            }
        }
        if !self.changed.is_empty() {
            writeln!(f, "\nchanged shape or type, in a / in b")?;
        }
        for ChangedTensor { section, name, dtypes: [a, b], shapes: [from, to] } in &self.changed {
            writeln!(f, "  {section:<14} {name} {a} {from:?} / {b} {to:?}")?;
        }
        if !self.differing.is_empty() {
            writeln!(
                f,
                "\n{:<14} {:<8} {:>14} {:>14} {:>11} {:>11}  differing tensor",
                "section", "type", "elements", "differing", "max abs", "relative"
            )?;
        }
        for tensor in &self.differing {
            let relative = match tensor.relative {
                Some(relative) => format!("{relative:.2e}"),
                None => "-".to_string(),
            };
            writeln!(
                f,
                "{:<14} {:<8} {:>14} {:>14} {:>11} {relative:>11}  {}",
                tensor.section,
                tensor.dtype,
                tensor.elements,
                tensor.differing,
                format!("{:.2e}", tensor.max_abs),
                tensor.name
            )?;
        }
        if !self.sections.is_empty() {
            writeln!(f, "\nsettings and state, in a / in b")?;
        }
        for difference in &self.sections {
            writeln!(f, "  {difference}")?;
        }
        writeln!(
            f,
            "\n{} tensors equal, {} differ, {} changed shape or type, {} only in a, {} only in b",
            self.equal,
            self.differing.len(),
            self.changed.len(),
            self.missing.len(),
            self.added.len()
        )
    }
}
