//! A layer's experts as ops that move tokens and multiply them: the pass before sharding and
//! differentiation.

use deepwell_ir::ops::{
    Collective, CollectiveKind, Dispatch, DispatchToRanks, ExpertSwiGlu, Experts, GroupedBias,
    GroupedGemm, GroupedRows, Permute, Unpermute,
};
use deepwell_ir::{
    Dim, Graph, GroupId, IrError, Node, NodeId, Op, OpError, Split, SplitOver, Stage, TensorId,
    TensorKind,
};

/// A rank of a group whose ranks have some of the experts of each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRank {
    /// Among which of its groups it exchanges.
    pub group: GroupId,
    /// Its place in the group.
    pub place: usize,
    /// How many ranks the group has.
    pub ranks: usize,
}

/// Replaces each [`Experts`] of a captured graph by ops that there are kernels and derivatives of:
/// [`Dispatch`] → [`Permute`] → [`GroupedGemm`] (gate and up) → [`ExpertSwiGlu`] → [`GroupedGemm`]
/// (down) → [`Unpermute`], with a [`GroupedBias`] behind each projection that has biases.
///
/// Each group of rows is a multiple of `align` long
/// ([`expert_row_alignment`](deepwell_ir::expert_row_alignment)). A graph without experts is given
/// back as it is, and so is one that was expanded.
///
/// # Errors
/// A graph that is not at [`Stage::Captured`].
pub fn expand(graph: &Graph, align: usize) -> Result<Graph, IrError> {
    Ok(expand_with(graph, align, None)?.0)
}

/// [`expand`] for a rank that has some of the experts of each layer, and which slice it has of each
/// parameter, in the order of [`Graph::parameters`]; none of one that is whole.
///
/// A rank sorts its pairs by the rank that has their experts ([`DispatchToRanks`]) and exchanges
/// rows, gates and choices; it sorts what came by its own experts, multiplies, and sends the rows
/// back to where they came from. Activations of a token pass through the same numbers as with one
/// rank. The gradient of an expert is summed over the tokens of all ranks of the group, in their
/// order.
///
/// # Errors
/// As [`expand`]; [`IrError::Split`] for experts that the ranks do not divide, and for a graph
/// without experts.
pub fn expand_on_rank(
    graph: &Graph,
    align: usize,
    rank: ExpertRank,
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
    rank: Option<ExpertRank>,
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
    let Some(ExpertRank { place, ranks, .. }) = rank else { return Ok((result, whole())) };
    let is_split = |id| result.tensor(id).shape != graph.tensor(id).shape;
    let split = |(id, _)| {
        is_split(id).then_some(Split { dim: 0, place, parts: ranks, over: SplitOver::Expert })
    };
    let splits = graph.parameters().map(split).collect();
    Ok((result, splits))
}

/// Gives a node's stacks of weights and biases the experts of one rank.
fn split_parameters(graph: &mut Graph, node: &Node, rank: ExpertRank) -> Result<(), IrError> {
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
    rank: Option<ExpertRank>,
) -> Result<Vec<Node>, IrError> {
    // The op has checked how many there are.
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
    let grouped = GroupedRows { groups, align };
    let mut made = Expansion { graph, node, nodes: Vec::with_capacity(10) };
    let sent = match rank {
        Some(rank) => Some(made.send(op, rank, groups, [x, gates, chosen])?),
        None => None,
    };
    let [x, gates, chosen] = sent.as_ref().map_or([x, gates, chosen], |sent| sent.received);
    let capacity_factor = op.capacity_factor.filter(|_| sent.is_none());
    let dispatch = Dispatch { grouped, capacity_factor, from_ranks: sent.is_some() };
    let &[offsets, _, rows, pairs] = made.add("dispatch", dispatch, &[chosen])?.as_slice() else {
        unreachable!("a dispatch has four outputs");
    };
    // A projection and its bias, if there is one. What goes into the last has been multiplied by
    // the gates, so that its bias must be, too.
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
    let mut down = project(&mut made, "down_proj", active, 2, true)?;
    let (mut rows, mut pairs) = (rows, pairs);
    if let (Some(sent), Some(rank)) = (sent, rank) {
        let unsorted = made.add("unpermute.received", Unpermute {}, &[down, rows, pairs])?[0];
        down = made.exchange("returned", rank, unsorted)?;
        (rows, pairs) = (sent.rows, sent.pairs);
    }
    let Expansion { graph, mut nodes, .. } = made;
    let (inputs, output) = ([down, rows, pairs], Some(node.outputs[0]));
    nodes.push(graph.node_beside(node, &node.name, Unpermute {}, &inputs, output)?);
    Ok(nodes)
}

/// What a rank sent to the others, and what came from them.
struct Sent {
    /// The row of each own pair among those for all ranks.
    rows: TensorId,
    /// The own pair of each row.
    pairs: TensorId,
    /// Rows, gates and choices that ranks sent here.
    received: [TensorId; 3],
}

/// The ops that take the place of a node so far.
struct Expansion<'a> {
    graph: &'a mut Graph,
    node: &'a Node,
    nodes: Vec<Node>,
}

impl Expansion<'_> {
    /// Adds an op under the node's name, and gives what comes out.
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

    /// Slab `q` of the rank at place `p` becomes slab `p` of that at place `q`.
    fn exchange(&mut self, name: &str, rank: ExpertRank, x: TensorId) -> Result<TensorId, IrError> {
        let op = Collective::new(CollectiveKind::AllToAll, rank.group, rank.ranks as u32);
        Ok(self.add(&format!("all_to_all.{name}"), op, &[x])?[0])
    }

    /// Sends rows, gates and choices to the ranks that have the experts, `groups` each.
    fn send(
        &mut self,
        op: &Experts,
        rank: ExpertRank,
        groups: usize,
        [x, gates, chosen]: [TensorId; 3],
    ) -> Result<Sent, IrError> {
        let (ranks, capacity_factor) = (rank.ranks, op.capacity_factor);
        let to_ranks = DispatchToRanks { experts: groups * ranks, ranks, capacity_factor };
        let outputs = self.add("dispatch_to_ranks", to_ranks, &[chosen])?;
        let &[rows, _, pairs, wanted] = outputs.as_slice() else {
            unreachable!("a dispatch to ranks has four outputs");
        };
        let x = self.add("permute.sent", Permute {}, &[x, rows, pairs])?[0];
        // A row takes all gates of its token along; the receiver reads the one of its pair.
        let gates = self.add("permute.gates", Permute {}, &[gates, rows, pairs])?[0];
        let received = [
            self.exchange("rows", rank, x)?,
            self.exchange("gates", rank, gates)?,
            self.exchange("wanted", rank, wanted)?,
        ];
        Ok(Sent { rows, pairs, received })
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::{LlamaConfig, capture};
    use deepwell_ir::{
        PrecisionPolicy, TensorType, apply_precision, differentiate, expert_row_alignment, fuse,
    };

    use super::*;
    use crate::{RouterTraining, with_router_training};

    fn graph() -> Graph {
        capture(&LlamaConfig::preset("moe-micro").unwrap()).unwrap()
    }

    fn names(graph: &Graph) -> Vec<&'static str> {
        let of_first = graph.nodes.iter().filter(|node| node.layer == Some(0));
        let of_experts = of_first.skip_while(|node| !matches!(node.op, Op::RouterLogits(_)));
        of_experts.map(|node| node.op.rule().name()).collect()
    }

    #[test]
    fn experts_become_ops() {
        let captured = graph();
        assert_eq!(names(&captured), ["router_logits", "route", "experts", "add"]);
        let expanded = expand(&captured, 32).unwrap();
        let expected = [
            "router_logits",
            "route",
            "dispatch",
            "permute",
            "grouped_gemm",
            "grouped_gemm",
            "expert_swiglu",
            "grouped_gemm",
            "unpermute",
            "add",
        ];
        assert_eq!(names(&expanded), expected);
        // What follows reads the same tensor; parameters are the same; sources are by node.
        assert_eq!(expanded.parameter_count(), captured.parameter_count());
        for (index, node) in expanded.nodes.iter().enumerate() {
            assert_eq!(node.source.0 as usize, index);
        }
        assert_eq!(expand(&expanded, 32).unwrap(), expanded);
        let error = expand(&Graph { stage: Stage::Fused, ..graph() }, 32).unwrap_err();
        assert!(error.to_string().contains("expand"), "{error}");
    }

    /// Those of gpt-oss: that of the down projection is multiplied by the gates, and no bias counts
    /// as a linear tensor of a policy.
    #[test]
    fn biases_stand_behind_their_projections() {
        let captured = capture(&LlamaConfig::preset("gpt-oss-micro").unwrap()).unwrap();
        let expanded = expand(&captured, 32).unwrap();
        let gemm_and_bias = ["grouped_gemm", "grouped_bias"];
        let expected = [
            &["router_logits", "route", "dispatch", "permute"][..],
            &gemm_and_bias,
            &gemm_and_bias,
            &["expert_swiglu"],
            &gemm_and_bias,
            &["unpermute", "add"],
        ];
        assert_eq!(names(&expanded), expected.concat());
        let gated = expanded.nodes.iter().filter_map(|node| match &node.op {
            Op::GroupedBias(op) => Some(op.gated),
            _ => None,
        });
        assert_eq!(gated.collect::<Vec<_>>(), [false, false, true, false, false, true]);
        assert_eq!(expanded.parameter_count(), captured.parameter_count());
        let differentiated = differentiate(&expanded).unwrap();
        let (_, report) = apply_precision(&differentiated, &PrecisionPolicy::mxfp8()).unwrap();
        let mut biases = report.iter().filter(|tensor| tensor.tensor.ends_with(".bias"));
        assert!(biases.all(|bias| !bias.format.is_quantized()), "{report:?}");
        let in_bf16 = report
            .iter()
            .filter(|tensor| tensor.tensor.contains("proj") && !tensor.format.is_quantized());
        let in_bf16: Vec<&str> = in_bf16.map(|tensor| tensor.tensor.as_str()).collect();
        let [first, last] = in_bf16.as_slice() else { panic!("{in_bf16:?}") };
        assert!(first.ends_with("layers.0.self_attn.q_proj.weight"), "{first}");
        assert!(last.ends_with("layers.1.mlp.experts.down_proj.weight"), "{last}");
    }

    #[test]
    fn groups_fit_the_blocks_of_a_policy() {
        for (name, rows) in [("bf16", 32), ("mxfp8", 32), ("mxfp8-2d", 32), ("mxfp8-128", 128)] {
            let policy = PrecisionPolicy::preset(name).unwrap();
            let align = expert_row_alignment(&graph(), &policy).unwrap();
            assert_eq!(align, rows, "{name}");
            let expanded = expand(&graph(), align).unwrap();
            apply_precision(&differentiate(&expanded).unwrap(), &policy).unwrap();
        }
    }

    /// The gradients that both projections give the permuted rows are added where they are brought
    /// back to tokens, if something does both, on one rank and on several.
    #[test]
    fn gradients_of_rows_are_added_on_their_way() {
        let rank = ExpertRank { group: GroupId(0), place: 1, ranks: 2 };
        for expanded in
            [expand(&graph(), 32).unwrap(), expand_on_rank(&graph(), 32, rank).unwrap().0]
        {
            let differentiated = differentiate(&expanded).unwrap();
            let (quantized, _) =
                apply_precision(&differentiated, &PrecisionPolicy::mxfp8()).unwrap();
            let count = |graph: &Graph, name: &str| {
                graph.nodes.iter().filter(|node| node.op.rule().name() == name).count()
            };
            let fused = |serves: bool| {
                let time = |op: &Op, _: &[TensorType], _: &[TensorType]| match op {
                    Op::Fused(_) => None,
                    Op::AddUnpermute(_) => serves.then_some(1.0),
                    _ => Some(1.0),
                };
                fuse(&quantized, &time).unwrap()
            };
            let (apart, together) = (fused(false), fused(true));
            assert_eq!(count(&apart, "add_unpermute"), 0);
            assert_eq!(count(&together, "add_unpermute"), 2, "one of each layer");
            for (name, fewer) in [("add", 2), ("unpermute", 2)] {
                assert_eq!(count(&apart, name), count(&together, name) + fewer, "{name}");
            }
            for node in &together.nodes {
                let before = apart.nodes.iter().find(|other| other.name == node.name).unwrap();
                assert_eq!(node.outputs, before.outputs, "`{}`", node.name);
            }
        }
    }

    /// A format with a scale for a whole tensor has no stacks: experts stay in BF16, and the report
    /// says so.
    #[test]
    fn experts_are_not_in_nvfp4() {
        let policy = PrecisionPolicy::nvfp4();
        let expanded = expand(&graph(), 32).unwrap();
        let (_, report) = apply_precision(&differentiate(&expanded).unwrap(), &policy).unwrap();
        let kept = report.iter().filter(|it| it.reason.contains("`grouped_gemm` has no GEMM"));
        assert_eq!(kept.count(), 5);
    }

    #[test]
    fn a_run_adds_losses_and_a_limit() {
        let training = RouterTraining { balance: 0.01, z: 0.001, capacity_factor: Some(1.25) };
        let with = with_router_training(&graph(), &training).unwrap();
        assert_eq!(with.loss, graph().loss);
        let count = |graph: &Graph, name: &str| {
            graph.nodes.iter().filter(|node| node.op.rule().name() == name).count()
        };
        assert_eq!(count(&with, "router_loss"), 2);
        let expanded = expand(&with, 32).unwrap();
        let limits = expanded.nodes.iter().filter_map(|node| match &node.op {
            Op::Dispatch(op) => op.capacity_factor,
            _ => None,
        });
        assert_eq!(limits.collect::<Vec<_>>(), [1.25; 2]);
        let differentiated = differentiate(&expanded).unwrap();
        assert_eq!(count(&differentiated, "router_loss"), 0);
        assert_eq!(count(&differentiated, "router_loss_grad"), 2);
        // They add behind the head, which overwrites.
        let at =
            |name: &str| differentiated.nodes.iter().position(|node| node.op.rule().name() == name);
        assert!(at("linear_cross_entropy_grad") < at("router_loss_grad"));
        let none = with_router_training(&graph(), &RouterTraining::default()).unwrap();
        assert_eq!(none, graph());
        let dense = capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap();
        let error = with_router_training(&dense, &training).unwrap_err().to_string();
        assert!(error.contains("expected a model with routers"), "{error}");
    }
}
