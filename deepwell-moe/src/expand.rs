//! A layer's experts as ops that move tokens and multiply them: the pass before sharding and
//! differentiation.

use deepwell_ir::ops::{
    Dispatch, ExpertSwiGlu, Experts, GroupedGemm, GroupedRows, Permute, Unpermute,
};
use deepwell_ir::{Graph, IrError, Node, NodeId, Op, OpError, Stage};

/// Replaces each [`Experts`] of a captured graph by ops that there are kernels and derivatives of:
/// [`Dispatch`] → [`Permute`] → [`GroupedGemm`] (gate and up) → [`ExpertSwiGlu`] → [`GroupedGemm`]
/// (down) → [`Unpermute`].
///
/// Each group of rows is a multiple of `align` long
/// ([`expert_row_alignment`](deepwell_ir::expert_row_alignment)). A graph without experts is given
/// back as it is, and so is one that was expanded.
///
/// # Errors
/// A graph that is not at [`Stage::Captured`]; experts with biases.
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
    let &[x, gates, chosen, w_gate, w_up, w_down] = node.inputs.as_slice() else {
        return Err(IrError::Operands {
            node: node.name.clone(),
            source: OpError {
                op: "experts",
                expected: "experts without biases".to_string(),
                got: "biases, which no kernel adds yet".to_string(),
            },
        });
    };
    let Some(groups) = graph.tensor(w_gate).shape.0[0].as_fixed() else {
        return Err(IrError::Operands {
            node: node.name.clone(),
            source: OpError {
                op: "experts",
                expected: "a fixed number of experts".to_string(),
                got: graph.tensor(w_gate).shape.to_string(),
            },
        });
    };
    let grouped = GroupedRows { groups, align };
    let at = |name: &str| format!("{}.{name}", node.name);
    let mut nodes: Vec<Node> = Vec::with_capacity(7);
    let mut add = |graph: &mut Graph, name: &str, op: Op, inputs: &[_]| {
        let made = graph.node_beside(node, &at(name), op, inputs, None)?;
        let outputs = made.outputs.clone();
        nodes.push(made);
        Ok::<_, IrError>(outputs)
    };
    let dispatch = Dispatch { grouped, capacity_factor: op.capacity_factor };
    let &[offsets, _, rows, pairs] = add(graph, "dispatch", dispatch.into(), &[chosen])?.as_slice()
    else {
        unreachable!("a dispatch has four outputs");
    };
    let sorted = add(graph, "permute", Permute {}.into(), &[x, rows, pairs])?[0];
    let gemm = Op::from(GroupedGemm { grouped });
    let gate = add(graph, "gate_proj", gemm.clone(), &[sorted, w_gate, offsets])?[0];
    let up = add(graph, "up_proj", gemm.clone(), &[sorted, w_up, offsets])?[0];
    let swiglu = ExpertSwiGlu { activation: op.activation };
    let active = add(graph, "swiglu", swiglu.into(), &[gate, up, gates, rows, pairs])?[0];
    let down = add(graph, "down_proj", gemm, &[active, w_down, offsets])?[0];
    let inputs = [down, rows, pairs];
    nodes.push(graph.node_beside(node, &node.name, Unpermute {}, &inputs, Some(node.outputs[0]))?);
    Ok(nodes)
}
