//! Storage of activations between the forward and the backward pass.
//!
//! Two changes of a quantized graph save memory:
//!
//! - A tensor that the backward pass reads in high precision is not kept quantized as well: its
//!   columnwise operand, which only the weight gradient reads, is quantized in the backward pass.
//!   The bits of all results stay the same. The output of attention is such a tensor.
//! - Inputs of activation functions are kept in MXFP8, one scale per 32 elements of a row, and
//!   dequantized before the backward pass reads them.
//!
//! Other tensors are left alone. A GEMM never reads a dequantized tensor, so that a weight that
//! falls back to BF16 has operands in BF16. An input of a norm costs as much time as an input of an
//! activation function, while recomputing the norm saves more memory in less time. Attention
//! exponentiates the scores of stored queries and keys, which magnifies their errors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use crate::builder::output_name;
use crate::op::input_types;
use crate::ops::{Axis, Dequantize, Quantize};
use crate::{
    Derivation, Graph, IrError, Link, Node, Op, OpRule, Phase, Plane, Stage, Storage, Tensor,
    TensorId, TensorKind,
};

/// Storage of activations between the forward and the backward pass. The text form is `exact`,
/// `once` or `mxfp8`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SavedActivations {
    /// As computed; quantized operands of weight gradients in addition.
    #[default]
    Exact,
    /// No tensor both in high precision and quantized. The bits of results are those of
    /// [`SavedActivations::Exact`].
    Once,
    /// As [`SavedActivations::Once`], with inputs of activation functions in MXFP8.
    Mxfp8,
}

impl SavedActivations {
    /// All values, from the most to the least memory.
    pub const ALL: [SavedActivations; 3] =
        [SavedActivations::Exact, SavedActivations::Once, SavedActivations::Mxfp8];

    /// Name in settings and text forms.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            SavedActivations::Exact => "exact",
            SavedActivations::Once => "once",
            SavedActivations::Mxfp8 => "mxfp8",
        }
    }

    /// The storage with the same numbers and the most memory.
    #[must_use]
    pub const fn in_numbers(self) -> SavedActivations {
        match self {
            SavedActivations::Exact | SavedActivations::Once => SavedActivations::Exact,
            SavedActivations::Mxfp8 => SavedActivations::Mxfp8,
        }
    }

    /// Whether this is the default.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        *self == SavedActivations::Exact
    }
}

impl fmt::Display for SavedActivations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SavedActivations {
    type Err = String;

    fn from_str(text: &str) -> Result<SavedActivations, String> {
        let found = SavedActivations::ALL.into_iter().find(|saved| saved.name() == text);
        found.ok_or_else(|| format!("expected `exact`, `once` or `mxfp8`, got `{text}`"))
    }
}

/// The format of stored activations.
const FORMAT: QuantFormat = QuantFormat::MXFP8;

/// Changes what a quantized graph keeps between its forward and backward passes.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn save_activations(graph: &Graph, saved: SavedActivations) -> Result<Graph, IrError> {
    if graph.stage != Stage::Quantized {
        let pass = "saved_activations";
        return Err(IrError::Stage { pass, wants: Stage::Quantized, got: graph.stage });
    }
    if saved.is_exact() {
        return Ok(graph.clone());
    }
    let mut rewrite = Rewrite::new(graph);
    if saved == SavedActivations::Mxfp8 {
        for (id, readers) in rewrite.activation_inputs() {
            rewrite.store_quantized(id, &readers)?;
        }
    }
    for index in 0..graph.nodes.len() {
        rewrite.quantize_later(index);
    }
    let result = rewrite.finish();
    crate::verify(&result)?;
    Ok(result)
}

/// Whether a node of the backward pass reads the input as the input of an activation function: the
/// derivative of the function, or its recomputation.
fn reads_activation_input(node: &Node, input: usize) -> bool {
    match node.op {
        Op::SwiGluBackward(_) | Op::ExpertSwiGluBackward(_) => (1..=2).contains(&input),
        Op::GeluBackward(_) | Op::ReluBackward(_) => input == 1,
        Op::SwiGlu(_) | Op::ExpertSwiGlu(_) => node.repeats && input <= 1,
        Op::Gelu(_) | Op::Relu(_) => node.repeats && input == 0,
        _ => false,
    }
}

struct Rewrite<'a> {
    source: &'a Graph,
    result: Graph,
    /// Nodes of the forward pass that write each tensor.
    writers: HashMap<TensorId, usize>,
    /// Nodes of the backward pass that read each tensor, with the index of the input.
    readers: BTreeMap<TensorId, Vec<(usize, usize)>>,
    /// What the backward pass reads instead of a tensor.
    dequantized: HashMap<TensorId, TensorId>,
    /// Nodes that take the place of a node; none for a node that moves.
    replaced: HashMap<usize, Option<Node>>,
    /// Nodes to add before and after a node.
    before: BTreeMap<usize, Vec<Node>>,
    after: BTreeMap<usize, Vec<Node>>,
}

impl<'a> Rewrite<'a> {
    fn new(source: &'a Graph) -> Rewrite<'a> {
        let mut writers = HashMap::new();
        let mut readers: BTreeMap<TensorId, Vec<(usize, usize)>> = BTreeMap::new();
        for (index, node) in source.nodes.iter().enumerate() {
            match node.phase {
                Phase::Forward => writers.extend(node.outputs.iter().map(|&id| (id, index))),
                Phase::Backward => {
                    for (input, &id) in node.inputs.iter().enumerate() {
                        readers.entry(id).or_default().push((index, input));
                    }
                }
                _ => {}
            }
        }
        Rewrite {
            source,
            result: Graph { nodes: Vec::new(), ..source.clone() },
            writers,
            readers,
            dequantized: HashMap::new(),
            replaced: HashMap::new(),
            before: BTreeMap::new(),
            after: BTreeMap::new(),
        }
    }

    /// Matrices of the forward pass that the backward pass reads only as inputs of activation
    /// functions, and that are not kept quantized already, with their readers.
    fn activation_inputs(&self) -> Vec<(TensorId, BTreeSet<usize>)> {
        let quantized: BTreeSet<TensorId> = self
            .source
            .tensors
            .iter()
            .filter_map(|tensor| tensor.link.filter(|link| link.plane().is_some()))
            .map(|link| link.of)
            .collect();
        let is_input = |(id, readers): &(&TensorId, &Vec<(usize, usize)>)| {
            let nodes = &self.source.nodes;
            let tensor = self.source.tensor(**id);
            self.writers.contains_key(id)
                && tensor.kind == TensorKind::Activation
                && tensor.dtype.is_high_precision()
                && tensor.shape.rank() == 2
                && !quantized.contains(id)
                && readers.iter().all(|&(node, at)| reads_activation_input(&nodes[node], at))
        };
        let found = self.readers.iter().filter(is_input);
        found.map(|(&id, readers)| (id, readers.iter().map(|&(node, _)| node).collect())).collect()
    }

    /// Quantizes a tensor after its writer and dequantizes it before its first reader.
    fn store_quantized(&mut self, id: TensorId, readers: &BTreeSet<usize>) -> Result<(), IrError> {
        let source = self.source;
        let writer = self.writers[&id];
        let first = *readers.first().expect("a tensor that is read");
        let name = format!("{}.saved", source.tensor(id).name);
        let op = Quantize { format: FORMAT, axis: Axis::Row };
        let types = op
            .infer(&input_types(source, &[id]))
            .map_err(|source| IrError::Operands { node: name.clone(), source })?;
        let planes = types.into_iter().zip(op.planes()).map(|(output, (axis, plane))| {
            let derivation = Derivation::Plane { quantization: 0, axis, plane, format: FORMAT };
            self.result.add_tensor(Tensor {
                name: output_name(&name, output.suffix),
                shape: output.shape,
                dtype: output.dtype,
                kind: TensorKind::Statistic,
                link: Some(Link { of: id, derivation }),
            })
        });
        let planes: Vec<TensorId> = planes.collect();
        let operands = planes[..Storage::plane_count(&FORMAT)].to_vec();
        let quantize = Node {
            name,
            op: op.into(),
            inputs: vec![id],
            outputs: planes,
            recompute: false,
            ..source.nodes[writer].clone()
        };
        self.after.entry(self.last_quantization(writer)).or_default().push(quantize);
        let tensor = source.tensor(id);
        let name = format!("{}.restored", tensor.name);
        let restored = self.result.add_tensor(Tensor {
            name: name.clone(),
            link: Some(Link { of: id, derivation: Derivation::Dequantized { axis: Axis::Row } }),
            ..tensor.clone()
        });
        let dequantize = Node {
            name,
            op: Dequantize { format: FORMAT, axis: Axis::Row, to: tensor.dtype }.into(),
            inputs: operands,
            outputs: vec![restored],
            repeats: false,
            ..source.nodes[first].clone()
        };
        self.before.entry(first).or_default().push(dequantize);
        self.dequantized.insert(id, restored);
        Ok(())
    }

    /// The last of the quantizations after a node: other passes fuse neighbours.
    fn last_quantization(&self, writer: usize) -> usize {
        let quantizes = |node: &&Node| {
            let op = matches!(node.op, Op::Quantize(_) | Op::Amax(_) | Op::StochasticRound(_));
            op && node.phase == Phase::Forward
        };
        writer + self.source.nodes[writer + 1..].iter().take_while(quantizes).count()
    }

    /// Moves the columnwise quantization of a tensor to the backward pass if that pass reads the
    /// tensor in high precision as well.
    fn quantize_later(&mut self, index: usize) {
        let node = &self.source.nodes[index];
        let Op::Quantize(quantize) = &node.op else { return };
        let of = node.inputs[0];
        let is_kept = self.readers.contains_key(&of) && !self.dequantized.contains_key(&of);
        if node.phase != Phase::Forward || quantize.axis == Axis::Row || !is_kept {
            return;
        }
        let planes = Storage::plane_count(&quantize.format);
        let (rowwise, rest) = match quantize.axis {
            Axis::Both => node.outputs.split_at(planes),
            _ => node.outputs.split_at(0),
        };
        let (columnwise, counters) = rest.split_at(planes);
        let is_read_earlier = |node: &Node| {
            node.phase == Phase::Forward && node.inputs.iter().any(|id| columnwise.contains(id))
        };
        let readers = columnwise.iter().filter_map(|id| self.readers.get(id)).flatten();
        let Some(first) = readers.map(|&(reader, _)| reader).min() else { return };
        if self.source.nodes.iter().any(is_read_earlier) {
            return;
        }
        let op = Quantize { axis: Axis::Column, ..*quantize };
        let template = &self.source.nodes[first];
        let mut moved = Node {
            op: op.into(),
            outputs: [columnwise, counters].concat(),
            phase: template.phase,
            ..node.clone()
        };
        let mut left = None;
        if !rowwise.is_empty() {
            moved.name = format!("{}.backward", node.name);
            moved.outputs.truncate(planes);
            moved.outputs.extend(counters.iter().map(|&id| self.counters_of(id, &moved.name)));
            let op = Quantize { axis: Axis::Row, ..*quantize };
            counters.iter().for_each(|&id| self.count_along(id, Axis::Row));
            let outputs = [rowwise, counters].concat();
            left = Some(Node { op: op.into(), outputs, ..node.clone() });
        }
        self.replaced.insert(index, left);
        self.before.entry(first).or_default().push(moved);
    }

    /// Further counters, of a quantization along columns.
    fn counters_of(&mut self, counters: TensorId, node: &str) -> TensorId {
        let name = output_name(node, &Plane::Counters.suffix()[1..]);
        let tensor = Tensor { name, ..self.source.tensor(counters).clone() };
        let id = self.result.add_tensor(tensor);
        self.count_along(id, Axis::Column);
        id
    }

    /// Links counters to a quantization along one axis.
    fn count_along(&mut self, counters: TensorId, along: Axis) {
        let link = &mut self.result.tensors[counters.index()].link;
        if let Some(Link { derivation: Derivation::Plane { axis, .. }, .. }) = link {
            *axis = along;
        }
    }

    fn finish(mut self) -> Graph {
        for (index, node) in self.source.nodes.iter().enumerate() {
            self.result.nodes.extend(self.before.remove(&index).unwrap_or_default());
            let replaced = self.replaced.remove(&index);
            if let Some(mut node) = replaced.unwrap_or_else(|| Some(node.clone())) {
                if node.phase == Phase::Backward {
                    for input in &mut node.inputs {
                        *input = self.dequantized.get(input).copied().unwrap_or(*input);
                    }
                }
                self.result.nodes.push(node);
            }
            self.result.nodes.extend(self.after.remove(&index).unwrap_or_default());
        }
        self.result
    }
}
