//! Replaces a layer's experts by ops that move tokens and multiply: the pass before sharding and
//! differentiation.

mod on_ranks;
#[cfg(test)]
mod tests;

use deepwell_ir::ops::{
    Dispatch, ExpertSwiGlu, Experts, GroupedBias, GroupedGemm, GroupedRows, Permute,
    capacity_sizes_rows,
};
use deepwell_ir::{
    Dim, Graph, GroupRank, IrError, Node, NodeId, Op, OpError, Split, SplitOver, Stage, TensorId,
    TensorKind,
};

use self::on_ranks::Tokens;

/// Replaces each [`Experts`] of a captured graph by ops with kernels and derivatives: [`Dispatch`]
/// → [`Permute`] → [`GroupedGemm`] (gate and up) → [`ExpertSwiGlu`] → [`GroupedGemm`] (down) →
/// [`Unpermute`](deepwell_ir::ops::Unpermute), with a [`GroupedBias`] after each projection with
/// biases.
///
/// The length of each group of rows is a multiple of `align`
/// ([`expert_row_alignment`](deepwell_ir::expert_row_alignment)). A graph without experts, such as
/// an already expanded one, is returned unchanged.
///
/// # Errors
/// A graph that is not at [`Stage::Captured`].
pub fn expand(graph: &Graph, align: usize) -> Result<Graph, IrError> {
    Ok(expand_with(graph, align, None)?.0)
}

/// [`expand`] for a rank with some of the experts of each layer. Also returns the rank's slice of
/// each parameter, in the order of [`Graph::parameters`]; `None` for an unsplit parameter.
///
/// Without a capacity factor, a rank all-gathers the tokens of the group with gates and choices,
/// sorts the pairs of its own experts ([`RowsOf::Here`](deepwell_ir::ops::RowsOf::Here)) and
/// multiplies. The outputs of its experts are summed per token and rounded. A reduce-scatter adds
/// these sums in FP32 on the token's rank and rounds again. Compared with a single rank, which
/// rounds once, `n` ranks add a rounding error of at most `u` (half a unit in the last place) times
/// the sum of the absolute values of `n` partial sums. The gradient of a token is summed in the
/// same way. In gradients of experts, rows are summed in the same order as on a single rank with
/// all tokens.
///
/// With a capacity factor, which applies to the tokens of one rank, each rank sorts its pairs by
/// destination rank ([`DispatchToRanks`](deepwell_ir::ops::DispatchToRanks)) and sends rows, gates
/// and choices by all-to-all. The receiver sorts the rows by expert, multiplies, and sends the rows
/// back. All activations of a token then equal those on a single rank. A token is sent once per
/// chosen expert. Without a capacity factor, both methods would have buffers of the same length,
/// because no size depends on the routing, and the all-gather moves fewer bytes.
///
/// # Errors
/// As [`expand`]; [`IrError::Split`] if the number of ranks does not divide the number of experts,
/// and for a graph without experts.
pub fn expand_on_rank(
    graph: &Graph,
    align: usize,
    rank: GroupRank,
) -> Result<(Graph, Vec<Option<Split>>), IrError> {
    if !graph.nodes.iter().any(|node| matches!(node.op, Op::Experts(_))) {
        let what = "expected a model with experts, got one without".to_string();
        return Err(IrError::Split { name: graph.name.clone(), ranks: rank.ranks, what });
    }
    expand_with(graph, align, Some(rank))
}

fn expand_with(
    graph: &Graph,
    align: usize,
    rank: Option<GroupRank>,
) -> Result<(Graph, Vec<Option<Split>>), IrError> {
    let whole = || vec![None; graph.parameters().count()];
    let has_experts = graph.nodes.iter().any(|node| matches!(node.op, Op::Experts(_)));
    if !has_experts {
        return Ok((graph.clone(), whole()));
    }
    if graph.stage != Stage::Captured {
        let (pass, wants) = ("expand", Stage::Captured);
        return Err(IrError::Stage { pass, wants, got: graph.stage });
    }
    let mut result = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    for node in &graph.nodes {
        match &node.op {
            Op::Experts(op) => {
                if let Some(rank) = rank {
                    split_parameters(&mut result, node, rank)?;
                }
                let nodes = experts(&mut result, node, op, align, rank)?;
                result.nodes.extend(nodes);
            }
            _ => result.nodes.push(node.clone()),
        }
    }
    for (index, node) in result.nodes.iter_mut().enumerate() {
        node.source = NodeId(index as u32);
    }
    deepwell_ir::verify(&result)?;
    let Some(GroupRank { place, ranks, .. }) = rank else { return Ok((result, whole())) };
    let is_split = |id| result.tensor(id).shape != graph.tensor(id).shape;
    let split = |(id, _)| {
        is_split(id).then_some(Split { dim: 0, place, parts: ranks, over: SplitOver::Expert })
    };
    let splits = graph.parameters().map(split).collect();
    Ok((result, splits))
}

/// Reduces a node's stacked weights and biases to the experts of one rank.
fn split_parameters(graph: &mut Graph, node: &Node, rank: GroupRank) -> Result<(), IrError> {
    for &id in &node.inputs[3..] {
        let tensor = &mut graph.tensors[id.index()];
        let refuse = |what: String| {
            let (name, ranks) = (tensor.name.clone(), rank.ranks);
            Err(IrError::Split { name, ranks, what })
        };
        let experts = tensor.shape.0[0].as_fixed().unwrap_or_default();
        if !matches!(tensor.kind, TensorKind::Parameter { .. }) {
            return refuse("expected the experts to be parameters".to_string());
        }
        if rank.ranks == 0 || !experts.is_multiple_of(rank.ranks) {
            return refuse(format!("expected experts that they divide, got {experts}"));
        }
        tensor.shape.0[0] = Dim::fixed(experts / rank.ranks);
    }
    Ok(())
}

fn experts(
    graph: &mut Graph,
    node: &Node,
    op: &Experts,
    align: usize,
    rank: Option<GroupRank>,
) -> Result<Vec<Node>, IrError> {
    // The op has checked the number of inputs.
    let [x, gates, chosen] = std::array::from_fn(|index| node.inputs[index]);
    let (weights, biases) = node.inputs[3..].split_at(3);
    let Some(groups) = graph.tensor(weights[0]).shape.0[0].as_fixed() else {
        return Err(IrError::Operands {
            node: node.name.clone(),
            source: OpError {
                op: "experts",
                expected: "a fixed number of experts".to_string(),
                got: graph.tensor(weights[0]).shape.to_string(),
            },
        });
    };
    let top_k = graph.tensor(chosen).shape.0[1].as_fixed().unwrap_or_default();
    let experts = groups * rank.map_or(1, |rank| rank.ranks);
    let sizes_rows = |factor| capacity_sizes_rows(factor, experts, groups, top_k);
    let limited = op.capacity_factor.is_some_and(sizes_rows);
    let grouped = GroupedRows { limited, ..GroupedRows::new(groups, align) };
    let mut made = Expansion { graph, node, nodes: Vec::with_capacity(10) };
    let Tokens { operands, came } = made.tokens(op, rank, groups, [x, gates, chosen])?;
    let [x, gates, chosen] = operands;
    let (rows_of, capacity_factor) = (came.rows_of(groups), came.own_limit(op.capacity_factor));
    let dispatch = Dispatch { grouped, capacity_factor, rows_of };
    let &[offsets, _, rows, pairs] = made.add("dispatch", dispatch, &[chosen])?.as_slice() else {
        unreachable!("a dispatch has four outputs");
    };
    // A projection, with a bias if present. The input of the down projection is multiplied by the
    // gates, so its bias must be as well.
    let project = |made: &mut Expansion<'_>, name: &str, x, index: usize, gated| {
        let y = made.add(name, GroupedGemm { grouped }, &[x, weights[index], offsets])?[0];
        let Some(&bias) = biases.get(index) else { return Ok::<_, IrError>(y) };
        let inputs = [y, bias, offsets, gates, rows, pairs];
        Ok(made.add(&format!("{name}.bias"), GroupedBias { grouped, gated }, &inputs)?[0])
    };
    let sorted = made.add("permute", Permute {}, &[x, rows, pairs])?[0];
    let gate = project(&mut made, "gate_proj", sorted, 0, false)?;
    let up = project(&mut made, "up_proj", sorted, 1, false)?;
    let swiglu = ExpertSwiGlu { activation: op.activation };
    let active = made.add("swiglu", swiglu, &[gate, up, gates, rows, pairs])?[0];
    let down = project(&mut made, "down_proj", active, 2, true)?;
    made.back(came, [down, rows, pairs])?;
    Ok(made.nodes)
}

/// Replacement ops for a node.
struct Expansion<'a> {
    graph: &'a mut Graph,
    node: &'a Node,
    nodes: Vec<Node>,
}

impl Expansion<'_> {
    /// Adds an op named after the node and returns the outputs.
    fn add(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<Vec<TensorId>, IrError> {
        let name = format!("{}.{name}", self.node.name);
        let made = self.graph.node_beside(self.node, &name, op, inputs, None)?;
        let outputs = made.outputs.clone();
        self.nodes.push(made);
        Ok(outputs)
    }

    /// Adds the op that writes the node's output.
    fn finish(&mut self, op: impl Into<Op>, inputs: &[TensorId]) -> Result<(), IrError> {
        let output = Some(self.node.outputs[0]);
        let made = self.graph.node_beside(self.node, &self.node.name, op, inputs, output)?;
        self.nodes.push(made);
        Ok(())
    }
}
