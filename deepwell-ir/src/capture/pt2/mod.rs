//! Models from PyTorch: the `.pt2` archive that `torch.export.save` writes.
//!
//! # Brief overview
//!
//! [`Pt2Model::open`] reads the archive: the graph of ATen ops that PyTorch traced, as JSON, and
//! the table of weights. One pass over the graph evaluates calls that depend only on sizes
//! (positions, masks, sines and cosines), turns ops that only move values into views, and matches
//! the remaining calls with patterns: Llama- and GPT-2-style modules and PyTorch's own
//! (`nn.TransformerEncoder`, `nn.MultiheadAttention`), before and after PyTorch's decomposition to
//! Core ATen. The result is a [`Graph`] of the same ops as from a `config.json`, with symbolic
//! batch and sequence sizes, and with tags. A call without a matching pattern remains an
//! [`Opaque`](crate::ops::Opaque) under its original name; [`Pt2Model::opaque`] lists these calls.

mod archive;
mod attention;
mod budget;
mod constant;
mod emit;
mod evaluate;
mod exported;
mod layout;
mod lower;
mod rope;
mod rules;
mod schema;
mod tags;
mod trace;
mod turned;
mod value;

use std::collections::HashMap;
use std::path::Path;

use self::archive::Archive;
use self::exported::Exported;
use self::trace::Trace;
use super::{CaptureError, StoredSlice};
use crate::{Graph, Op, Tag};

/// Location of a graph parameter in a stored tensor.
#[derive(Clone, Debug)]
struct SourceSlice {
    /// The stored tensor.
    name: String,
    /// First output of the parameter.
    start: usize,
    /// Whether the tensor is stored as `[inputs, outputs]`.
    transposed: bool,
}

/// A tensor in the state of an exported module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveTensor {
    /// Name in the module's `state_dict`.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Whether elements are floats.
    pub holds_floats: bool,
    /// Other names of the same tensor: a tied head has the name of the token table as an alias.
    pub aliases: Vec<String>,
}

/// A call of the exported graph without an equivalent op here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpaqueCall {
    /// The node of the graph.
    pub node: String,
    /// Name of the op in PyTorch, `aten.sin.default` for example.
    pub target: String,
    /// Part of the model that contains the call.
    pub tag: Tag,
}

/// An exported model.
///
/// ```
/// use deepwell_ir::Tag;
/// use deepwell_ir::capture::Pt2Model;
///
/// # fn main() -> Result<(), deepwell_ir::capture::CaptureError> {
/// // A tiny GPT-2 with random weights, exported by `scripts/make_pt2_fixtures.py`.
/// let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pt2/gpt2.pt2");
/// let mut model = Pt2Model::open(path)?;
/// assert!(model.opaque().is_empty());
/// assert!(model.graph.nodes.iter().any(|node| node.tag == Tag::Attn));
/// // The three projections of attention are stored in one tensor and apart in the graph.
/// let query = model.graph.find("transformer.h.0.attn.c_attn.q.weight");
/// assert!(query.is_some());
/// assert_eq!(model.read("transformer.h.0.attn.c_attn.q.weight")?.len(), 32 * 32);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pt2Model {
    /// The captured graph: with the loss if the model ends in an output head without bias,
    /// otherwise up to the first output. Parameters have their PyTorch names; a parameter that is a
    /// part of a stored tensor has a label before the last component (`c_attn.q.weight`).
    pub graph: Graph,
    /// Version of PyTorch that wrote the archive.
    pub torch_version: String,
    /// Sequences and tokens per sequence of the export. The graph works for any sizes.
    pub exported_for: (usize, usize),
    /// Ignored features and assumptions, as sentences.
    pub remarks: Vec<String>,
    /// Parameters of the graph exported with `requires_grad = false`, in graph order.
    pub frozen: Vec<String>,
    stored: HashMap<String, SourceSlice>,
    archive: Archive,
}

impl Pt2Model {
    /// Reads an archive. Weights are read only by [`Pt2Model::read`].
    ///
    /// # Errors
    /// A file that is missing, is not an archive of `torch.export.save`, or has an unsupported
    /// version; a graph without an input of token ids or without an output.
    pub fn open(path: impl AsRef<Path>) -> Result<Pt2Model, CaptureError> {
        let path = path.as_ref();
        let mut archive = Archive::open(path)?;
        let (name, json) = archive.graph()?;
        let location = format!("{} (models/{name}.json)", path.display());
        let exported = Exported::from_json(&json, &location)?;
        drop(json);
        let trace = Trace::new(&exported, &mut archive, &location)?;
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let lowered = lower::lower(&exported, &trace, &stem.unwrap_or(name), &location)?;
        let sizes = trace.exprs.sizes;
        let mut remarks = trace.remarks;
        if exported.outputs.len() > 1 {
            remarks.push(format!(
                "the program gives {} tensors: the first is taken for its logits",
                exported.outputs.len()
            ));
        }
        Ok(Pt2Model {
            graph: lowered.graph,
            torch_version: exported.torch_version,
            exported_for: (sizes.batch, sizes.seq),
            remarks,
            frozen: lowered
                .stored
                .iter()
                .filter(|(_, slice)| exported.frozen.contains(&slice.name))
                .map(|(name, _)| name.clone())
                .collect(),
            stored: lowered.stored.into_iter().collect(),
            archive,
        })
    }

    /// Whether a path has the extension of an archive.
    pub fn is_archive(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension == "pt2")
    }

    /// Calls without a matching pattern, in order.
    pub fn opaque(&self) -> Vec<OpaqueCall> {
        let nodes = self.graph.nodes.iter();
        nodes
            .filter_map(|node| match &node.op {
                Op::Opaque(op) => Some(OpaqueCall {
                    node: node.name.clone(),
                    target: op.target.clone(),
                    tag: node.tag,
                }),
                _ => None,
            })
            .collect()
    }

    /// Values of a graph parameter, row-major, as F32.
    ///
    /// # Errors
    /// A name that is not a parameter of the graph, or an archive without the values.
    pub fn read(&mut self, parameter: &str) -> Result<Vec<f32>, CaptureError> {
        let location = self.archive.path.display().to_string();
        let failed = |what: String| CaptureError::Export {
            location: location.clone(),
            what,
            hint: "parameters are those of the captured graph".to_string(),
        };
        let (Some(part), Some(shape)) = (self.part(parameter), self.shape(parameter)) else {
            return Err(failed(format!("there is no parameter `{parameter}`")));
        };
        let stored = self.archive.values(&part.name)?;
        part.extract(&stored, &shape).ok_or_else(|| {
            failed(format!(
                "tensor `{}`: expected one that holds {shape:?}, got {:?}",
                part.name, part.shape
            ))
        })
    }

    /// Location of a graph parameter in the archive's tensors, which have their PyTorch names.
    pub fn part(&self, parameter: &str) -> Option<StoredSlice> {
        let SourceSlice { name, start, transposed } = self.stored.get(parameter)?.clone();
        let shape = self.archive.meta(&name)?.shape.clone();
        Some(StoredSlice { start, transposed, ..StoredSlice::whole(&name, &shape) })
    }

    /// Stored weights and buffers sorted by name, including tensors that the graph does not read.
    pub fn stored(&self) -> Vec<ArchiveTensor> {
        self.archive.weights()
    }

    /// Values of a stored tensor, row-major, as F32.
    ///
    /// # Errors
    /// An archive without the values, or with values that are not floats.
    pub fn read_stored(&mut self, name: &str) -> Result<Vec<f32>, CaptureError> {
        self.archive.values(name)
    }

    fn shape(&self, parameter: &str) -> Option<Vec<usize>> {
        self.graph.tensor(self.graph.find(parameter)?).shape.as_fixed()
    }
}
