//! Merges neighbours that read the same memory.

use crate::{Graph, IrError, Node, Op, Stage, ops};

/// A residual add followed at once by the norm of its sum becomes one op: one read of each
/// operand instead of two.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn fuse(graph: &Graph) -> Result<Graph, IrError> {
    if graph.stage != Stage::Quantized {
        return Err(IrError::Stage { pass: "fuse", wants: Stage::Quantized, got: graph.stage });
    }
    let mut result = Graph { stage: Stage::Fused, nodes: Vec::new(), ..graph.clone() };
    let mut nodes = graph.nodes.iter().peekable();
    while let Some(node) = nodes.next() {
        let fused = nodes.peek().and_then(|next| add_and_norm(node, next));
        if fused.is_some() {
            nodes.next();
        }
        result.nodes.push(fused.unwrap_or_else(|| node.clone()));
    }
    crate::verify(&result)?;
    Ok(result)
}

fn add_and_norm(add: &Node, norm: &Node) -> Option<Node> {
    let (Op::Add(_), Op::RmsNorm(rms_norm)) = (&add.op, &norm.op) else { return None };
    if norm.inputs[0] != add.outputs[0] || norm.phase != add.phase {
        return None;
    }
    Some(Node {
        name: norm.name.clone(),
        op: ops::AddRmsNorm { eps: rms_norm.eps }.into(),
        inputs: vec![add.inputs[0], add.inputs[1], norm.inputs[1]],
        outputs: vec![add.outputs[0], norm.outputs[0], norm.outputs[1]],
        ..norm.clone()
    })
}
