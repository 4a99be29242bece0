//! Splits a captured graph over the ranks of a tensor-parallel group, with sequence parallelism
//! (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198).
//!
//! Between GEMMs a rank has some rows of an activation (its part of a micro-batch's tokens); within
//! attention and feed-forward it has some columns (its heads or hidden units) of all tokens. A
//! linear layer goes from rows to columns (input all-gathered, weight split along N) or from
//! columns to rows (weight split along K, results reduce-scattered). The layout of a layer's input
//! determines which, independent of names.
//!
//! In latent attention, projections to latents and norms of latents need all columns. A rank
//! computes them for its own rows with whole weights. Projections from latents to heads are split,
//! and the columns of keys that all heads share are all-gathered.
//!
//! The pass precedes differentiation, which derives the collectives of the backward: the gradient
//! of an all-gather is a reduce-scatter and vice versa. A split parameter has its whole gradient on
//! its rank. Every other parameter sees only part of the tokens or heads, and lowering adds an
//! all-reduce of its gradient.

use std::collections::{HashMap, HashSet};

use crate::ops::{
    AddBias, AddPositionsOfPart, Attention, AttentionHeads, Collective, CollectiveKind,
    LatentKeyValue, Linear, Reduction, Rope, RouterLoss, VocabParallelCrossEntropy,
    VocabParallelEmbedding, VocabParallelSums, VocabSlice,
};
use crate::{
    Dim, Graph, GroupRank, IrError, Node, Op, Split, SplitOver, Stage, TensorId, TensorKind,
};

/// Returns a rank's part of `graph` and the rank's slice of each parameter, in the order of
/// [`Graph::parameters`]; `None` for an unsplit parameter.
///
/// # Errors
/// [`IrError::Split`] for a size that the number of ranks does not divide, and for unsupported ops.
pub fn tensor_parallel(
    graph: &Graph,
    rank: GroupRank,
) -> Result<(Graph, Vec<Option<Split>>), IrError> {
    if graph.stage != Stage::Captured {
        let (wants, got) = (Stage::Captured, graph.stage);
        return Err(IrError::Stage { pass: "tensor_parallel", wants, got });
    }
    let mut splitter = Splitter::new(graph, rank);
    // First split attention: head counts are needed for norms and rotations of queries and keys.
    for node in &graph.nodes {
        if let Op::Attention(op) = &node.op {
            splitter.heads(node, op)?;
        }
    }
    for node in &graph.nodes {
        splitter.node(node)?;
    }
    let splits = graph.parameters().map(|(id, _)| splitter.splits.get(&id).copied().flatten());
    let splits = splits.collect();
    let result = splitter.result;
    crate::verify(&result)?;
    Ok((result, splits))
}

/// A rank's part of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// The whole tensor.
    Whole,
    /// Some of the rows (tokens).
    Rows,
    /// Some of the columns, for all tokens.
    Columns,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Layout::Whole => "whole on each rank",
            Layout::Rows => "split by tokens",
            Layout::Columns => "split by columns",
        }
    }
}

struct Splitter<'a> {
    source: &'a Graph,
    rank: GroupRank,
    result: Graph,
    /// Tensors of the source, each with the tensor of the result.
    made: HashMap<TensorId, (TensorId, Layout)>,
    /// All-gathered tensors, by their slices.
    gathered: HashMap<TensorId, TensorId>,
    /// Splits of the parameters used so far.
    splits: HashMap<TensorId, Option<Split>>,
    /// Tensors of the source of which an op reads all columns of a row: a norm, or the split of a
    /// latent from the shared part of the keys.
    read_by_row: HashSet<TensorId>,
}

impl<'a> Splitter<'a> {
    fn new(source: &'a Graph, rank: GroupRank) -> Splitter<'a> {
        let (tensors, nodes) = (Vec::new(), Vec::new());
        let mut result = Graph { tensors, nodes, loss: None, ..source.clone() };
        let mut made = HashMap::new();
        for (id, tensor) in source.tensors_with_ids() {
            let is_given = matches!(
                tensor.kind,
                TensorKind::Input { .. } | TensorKind::Parameter { .. } | TensorKind::Loss
            );
            if is_given {
                made.insert(id, (result.add_tensor(tensor.clone()), Layout::Whole));
            }
        }
        result.loss = source.loss.and_then(|id| made.get(&id)).map(|(id, _)| *id);
        let reads_rows =
            |op: &Op| matches!(op, Op::RmsNorm(_) | Op::LayerNorm(_) | Op::SplitColumns(_));
        let readers = source.nodes.iter().filter(|node| reads_rows(&node.op));
        let read_by_row = readers.map(|node| node.inputs[0]).collect();
        let (gathered, splits) = (HashMap::new(), HashMap::new());
        Splitter { source, rank, result, made, gathered, splits, read_by_row }
    }

    fn refuse(&self, name: &str, what: impl Into<String>) -> IrError {
        IrError::Split { name: name.to_string(), ranks: self.rank.ranks, what: what.into() }
    }

    /// Divides a size equally over the ranks.
    fn part(&self, name: &str, size: usize, of_what: &str) -> Result<usize, IrError> {
        let ranks = self.rank.ranks;
        if ranks > 0 && size.is_multiple_of(ranks) {
            return Ok(size / ranks);
        }
        Err(self.refuse(name, format!("expected {of_what} that they divide, got {size}")))
    }

    fn layout(&self, id: TensorId) -> Layout {
        self.made[&id].1
    }

    /// Returns input `index` of a node, which must have this layout.
    fn input(&self, node: &Node, index: usize, layout: Layout) -> Result<TensorId, IrError> {
        let (id, got) = self.made[&node.inputs[index]];
        if got == layout {
            return Ok(id);
        }
        let name = &self.source.tensor(node.inputs[index]).name;
        let op = node.op.name();
        let what = format!(
            "expected `{name}` {} for op `{op}`, got it {}\nhint: train on data-parallel, \
             expert-parallel or pipeline ranks (`--dp`, `--ep`, `--pp`)",
            layout.name(),
            got.name()
        );
        Err(self.refuse(&node.name, what))
    }

    /// Returns input `index` of a node, a parameter, split along a dimension or whole.
    fn parameter(
        &mut self,
        node: &Node,
        index: usize,
        dim: Option<usize>,
    ) -> Result<TensorId, IrError> {
        let of_source = node.inputs[index];
        let tensor = self.source.tensor(of_source);
        if !matches!(tensor.kind, TensorKind::Parameter { .. }) {
            let what = format!("expected `{}` to be a parameter", tensor.name);
            return Err(self.refuse(&node.name, what));
        }
        let GroupRank { place, ranks, .. } = self.rank;
        let split = dim.map(|dim| Split { dim, place, parts: ranks, over: SplitOver::Tensor });
        let id = self.made[&of_source].0;
        match self.splits.insert(of_source, split) {
            None => {}
            Some(earlier) if earlier == split => return Ok(id),
            Some(_) => {
                let what = "another layer needs it cut in another way";
                return Err(self.refuse(&tensor.name, what));
            }
        }
        if let Some(dim) = dim {
            let size = tensor.shape.0[dim].as_fixed().unwrap_or_default();
            let name = tensor.name.clone();
            let part = self.part(&name, size, &format!("a size of dimension {dim}"))?;
            self.result.tensors[id.index()].shape.0[dim] = Dim::fixed(part);
        }
        Ok(id)
    }

    /// Adds a node next to `place` and returns the first output.
    fn push(
        &mut self,
        place: &Node,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<TensorId, IrError> {
        let node = self.result.node_beside(place, name, op, inputs, None)?;
        let output = node.outputs[0];
        self.result.nodes.push(node);
        Ok(output)
    }

    /// Adds the replacement of a node; all outputs have the same layout.
    fn replace(
        &mut self,
        node: &Node,
        op: impl Into<Op>,
        inputs: &[TensorId],
        layout: Layout,
    ) -> Result<(), IrError> {
        let new = self.result.node_beside(node, &node.name, op, inputs, None)?;
        let outputs = node.outputs.iter().copied().zip(new.outputs.iter().copied());
        self.made.extend(outputs.map(|(of_source, made)| (of_source, (made, layout))));
        self.result.nodes.push(new);
        Ok(())
    }

    fn exchange(&self, kind: CollectiveKind) -> Collective {
        Collective::new(kind, self.rank.group, self.rank.ranks as u32)
    }

    /// All-gathers the rows of all ranks, once for all readers.
    fn gather(&mut self, place: &Node, rows: TensorId) -> Result<TensorId, IrError> {
        if let Some(&whole) = self.gathered.get(&rows) {
            return Ok(whole);
        }
        let name = format!("{}.all_gather", self.result.tensor(rows).name);
        let op = self.exchange(CollectiveKind::AllGather);
        let whole = self.push(place, &name, op, &[rows])?;
        self.gathered.insert(rows, whole);
        Ok(whole)
    }

    /// Reduce-scatters partial sums into this rank's rows.
    fn scatter(&mut self, node: &Node, partial: TensorId) -> Result<TensorId, IrError> {
        let op = self.exchange(CollectiveKind::ReduceScatter { reduction: Reduction::Sum });
        self.push(node, &format!("{}.reduce_scatter", node.name), op, &[partial])
    }

    fn node(&mut self, node: &Node) -> Result<(), IrError> {
        match &node.op {
            Op::Embedding(op) => self.embedding(node, op),
            Op::AddPositions(_) => {
                let x = self.input(node, 0, Layout::Rows)?;
                let table = self.parameter(node, 1, None)?;
                let GroupRank { place, ranks, .. } = self.rank;
                let op = AddPositionsOfPart { place, ranks };
                self.replace(node, op, &[x, table], Layout::Rows)
            }
            Op::Linear(linear) => self.linear(node, linear),
            Op::RmsNorm(_) | Op::LayerNorm(_) | Op::SplitColumns(_) => {
                self.beside(node, 1, Layout::Rows)
            }
            Op::HeadRmsNorm(_) => {
                let width_of =
                    |id| self.source.tensor(id).shape.0.last().and_then(|dim| dim.as_fixed());
                if let [Some(width), Some(head)] = [0, 1].map(|at| width_of(node.inputs[at])) {
                    self.part(&node.name, width / head.max(1), "heads")?;
                }
                self.beside(node, 1, Layout::Columns)
            }
            // Routing is per token; expert parallelism distributes the experts.
            Op::RouterLogits(_) | Op::Route(_) => self.beside(node, 1, Layout::Rows),
            Op::Experts(_) => self.beside(node, 3, Layout::Rows),
            Op::Rope(rope) => self.rope(node, rope),
            Op::LatentKeyValue(op) => {
                let inputs =
                    [self.input(node, 0, Layout::Columns)?, self.input(node, 1, Layout::Whole)?];
                let heads = self.part(&node.name, op.heads, "heads")?;
                let op = LatentKeyValue { heads, ..op.clone() };
                self.replace(node, op, &inputs, Layout::Columns)
            }
            Op::Attention(op) => self.attention(node, op),
            Op::Gelu(_) | Op::Relu(_) | Op::SwiGlu(_) | Op::Add(_) => self.elementwise(node),
            Op::LinearCrossEntropy(_) => self.head(node),
            Op::RouterLoss(op) => self.router_loss(node, op),
            op => {
                let what = format!(
                    "op `{}` cannot be split yet\nhint: take data-parallel ranks",
                    op.name()
                );
                Err(self.refuse(&node.name, what))
            }
        }
    }

    fn vocab_slice(&self, node: &Node) -> Result<VocabSlice, IrError> {
        let table = self.source.tensor(node.inputs[1]);
        let vocab = table.shape.0.first().and_then(|dim| dim.as_fixed()).unwrap_or_default();
        let rows = self.part(&table.name, vocab, "a vocabulary")?;
        Ok(VocabSlice { first: self.rank.place * rows, rows, vocab })
    }

    fn embedding(&mut self, node: &Node, op: &crate::ops::Embedding) -> Result<(), IrError> {
        let slice = self.vocab_slice(node)?;
        let tokens = self.input(node, 0, Layout::Whole)?;
        let table = self.parameter(node, 1, Some(0))?;
        let op = VocabParallelEmbedding { slice, padding: op.padding };
        let partial = self.push(node, &node.name, op, &[tokens, table])?;
        let rows = self.scatter(node, partial)?;
        self.made.insert(node.outputs[0], (rows, Layout::Rows));
        Ok(())
    }

    fn linear(&mut self, node: &Node, linear: &Linear) -> Result<(), IrError> {
        let x = self.made[&node.inputs[0]].0;
        let layout = self.layout(node.inputs[0]);
        if layout == Layout::Rows && self.read_by_row.contains(&node.outputs[0]) {
            return self.beside(node, 1, Layout::Rows);
        }
        if layout != Layout::Columns {
            let rows = self.input(node, 0, Layout::Rows)?;
            let mut inputs = vec![self.gather(node, rows)?, self.parameter(node, 1, Some(0))?];
            if linear.bias {
                inputs.push(self.parameter(node, 2, Some(0))?);
            }
            return self.replace(node, linear.clone(), &inputs, Layout::Columns);
        }
        let w = self.parameter(node, 1, Some(1))?;
        let partial = self.push(node, &node.name, Linear { bias: false }, &[x, w])?;
        let mut rows = self.scatter(node, partial)?;
        if linear.bias {
            let bias = self.parameter(node, 2, None)?;
            rows =
                self.push(node, &format!("{}.with_bias", node.name), AddBias {}, &[rows, bias])?;
        }
        self.made.insert(node.outputs[0], (rows, Layout::Rows));
        Ok(())
    }

    /// Rotates a rank's heads, or all tokens of columns that all heads share.
    fn rope(&mut self, node: &Node, rope: &Rope) -> Result<(), IrError> {
        if self.layout(node.inputs[0]) == Layout::Rows {
            let rows = self.input(node, 0, Layout::Rows)?;
            let shared = self.gather(node, rows)?;
            return self.replace(node, rope.clone(), &[shared], Layout::Whole);
        }
        let x = self.input(node, 0, Layout::Columns)?;
        let op = Rope { heads: self.part(&node.name, rope.heads, "heads")?, ..rope.clone() };
        self.replace(node, op, &[x], Layout::Columns)
    }

    /// Replaces an op whose first `operands` operands are split and whose other operands are
    /// unsplit parameters.
    fn beside(&mut self, node: &Node, operands: usize, layout: Layout) -> Result<(), IrError> {
        let own = (0..operands).map(|index| self.input(node, index, layout));
        let mut inputs = own.collect::<Result<Vec<TensorId>, IrError>>()?;
        for index in operands..node.inputs.len() {
            inputs.push(self.parameter(node, index, None)?);
        }
        self.replace(node, node.op.clone(), &inputs, layout)
    }

    /// The rank's heads of an attention.
    fn heads(&self, node: &Node, op: &Attention) -> Result<AttentionHeads, IrError> {
        Ok(AttentionHeads {
            heads: self.part(&node.name, op.heads.heads, "query heads")?,
            kv_heads: self.part(&node.name, op.heads.kv_heads, "key-value heads")?,
            ..op.heads.clone()
        })
    }

    fn attention(&mut self, node: &Node, op: &Attention) -> Result<(), IrError> {
        let heads = self.heads(node, op)?;
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for index in 0..node.inputs.len() {
            // Sinks, one per head, follow queries, keys and values; then come the documents, common
            // to all heads.
            inputs.push(match index {
                0..3 => self.input(node, index, Layout::Columns)?,
                _ if op.heads.documents_at(3) == Some(index) => {
                    self.input(node, index, Layout::Whole)?
                }
                _ => self.parameter(node, index, Some(0))?,
            });
        }
        self.replace(node, Attention { heads }, &inputs, Layout::Columns)
    }

    /// Replaces an element-wise op on tensors of equal layout.
    fn elementwise(&mut self, node: &Node) -> Result<(), IrError> {
        let layout = self.layout(node.inputs[0]);
        let inputs = (0..node.inputs.len()).map(|index| self.input(node, index, layout));
        let inputs = inputs.collect::<Result<Vec<TensorId>, IrError>>()?;
        self.replace(node, node.op.clone(), &inputs, layout)
    }

    /// Computes the loss for all tokens of a micro-batch on every rank, because expert balance is a
    /// property of all tokens. The gradient of the all-gather sums over ranks, so each rank
    /// contributes a fraction.
    fn router_loss(&mut self, node: &Node, op: &RouterLoss) -> Result<(), IrError> {
        let [logits, chosen] = [0, 1].map(|index| self.input(node, index, Layout::Rows));
        let logits = self.gather(node, logits?)?;
        let chosen = self.gather(node, chosen?)?;
        let [targets, scale] = [2, 3].map(|index| self.made[&node.inputs[index]].0);
        let op = RouterLoss { ranks: self.rank.ranks as u32, ..op.clone() };
        let (inputs, loss) = ([logits, chosen, targets, scale], self.result.loss);
        let new = self.result.node_beside(node, &node.name, op, &inputs, loss)?;
        self.result.nodes.push(new);
        Ok(())
    }

    fn head(&mut self, node: &Node) -> Result<(), IrError> {
        let slice = self.vocab_slice(node)?;
        let rows = self.input(node, 0, Layout::Rows)?;
        let x = self.gather(node, rows)?;
        let w = self.parameter(node, 1, Some(0))?;
        let [targets, scale] = [2, 3].map(|index| self.made[&node.inputs[index]].0);
        let name = |part: &str| format!("{}.{part}", node.name);
        let op = VocabParallelSums { slice };
        let sums = self.push(node, &name("sums"), op, &[x, w, targets])?;
        let op = self.exchange(CollectiveKind::AllGather);
        let sums = self.push(node, &name("sums.all_gather"), op, &[sums])?;
        let op = VocabParallelCrossEntropy { slice, ranks: self.rank.ranks };
        let (inputs, loss) = ([x, w, targets, scale, sums], self.result.loss);
        let new = self.result.node_beside(node, &node.name, op, &inputs, loss)?;
        self.result.nodes.push(new);
        Ok(())
    }
}
