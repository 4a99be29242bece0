//! A layer's experts as ops that move tokens and multiply them: the pass before sharding and
//! differentiation.

use deepwell_ir::ops::{
    Dispatch, ExpertSwiGlu, Experts, GroupedBias, GroupedGemm, GroupedRows, Permute, Unpermute,
};
use deepwell_ir::{Graph, IrError, Node, NodeId, Op, OpError, Stage, TensorId};

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
    let has_experts = graph.nodes.iter().any(|node| matches!(node.op, Op::Experts(_)));
    if !has_experts {
        return Ok(graph.clone());
    }
    if graph.stage != Stage::Captured {
        let (pass, wants) = ("expand", Stage::Captured);
        return Err(IrError::Stage { pass, wants, got: graph.stage });
    }
    let mut result = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    for node in &graph.nodes {
        match &node.op {
            Op::Experts(op) => {
                let nodes = experts(&mut result, node, op, align)?;
                result.nodes.extend(nodes);
            }
            _ => result.nodes.push(node.clone()),
        }
    }
    for (index, node) in result.nodes.iter_mut().enumerate() {
        node.source = NodeId(index as u32);
    }
    deepwell_ir::verify(&result)?;
    Ok(result)
}

fn experts(
    graph: &mut Graph,
    node: &Node,
    op: &Experts,
    align: usize,
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
    let dispatch = Dispatch { grouped, capacity_factor: op.capacity_factor };
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
    let down = project(&mut made, "down_proj", active, 2, true)?;
    let Expansion { graph, mut nodes, .. } = made;
    let (inputs, output) = ([down, rows, pairs], Some(node.outputs[0]));
    nodes.push(graph.node_beside(node, &node.name, Unpermute {}, &inputs, output)?);
    Ok(nodes)
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
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::{LlamaConfig, capture};
    use deepwell_ir::{PrecisionPolicy, apply_precision, differentiate, expert_row_alignment};

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
