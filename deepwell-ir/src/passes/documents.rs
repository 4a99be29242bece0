//! Keeps documents of a sequence apart: attention within each, learned positions from its start.

use crate::graph::InputRole;
use crate::ops::{Add, Attention, AttentionHeads, Embedding};
use crate::{Graph, IrError, Node, NodeId, Op, Stage};

/// Tells the documents of a sequence apart in a captured forward graph, whose row is several of
/// them, one behind the other: a token attends to tokens of its own document only, and learned
/// positions are counted from where that begins.
///
/// Where documents begin is the input [`InputRole::Documents`], and with learned positions
/// [`InputRole::Positions`] as well. Rotary positions stay those of the sequence: scores depend on
/// differences alone, which are the same. The loss is a matter of the targets.
///
/// # Errors
/// [`IrError::Invalid`] for a graph that is not as captured, or has attention without a causal mask
/// or ops of which nothing is known.
pub fn mask_documents(graph: &Graph) -> Result<Graph, IrError> {
    let invalid =
        |what: String| IrError::Invalid { graph: graph.name.clone(), stage: graph.stage, what };
    if graph.stage != Stage::Captured {
        return Err(invalid("expected a graph as captured to tell documents apart in".to_string()));
    }
    let nodes = Vec::with_capacity(graph.nodes.len());
    let mut result = Graph { nodes, ..graph.clone() };
    for node in &graph.nodes {
        let mut node = node.clone();
        match &node.op {
            Op::Attention(Attention { heads }) if heads.documents => {
                return Err(invalid(format!("`{}` tells documents apart already", node.name)));
            }
            Op::Attention(Attention { heads }) if !heads.causal => {
                return Err(invalid(format!(
                    "expected attention with a causal mask to tell documents apart in, got `{}` \
                     without\nhint: take joined documents",
                    node.name
                )));
            }
            Op::Attention(Attention { heads }) => {
                let heads = AttentionHeads { documents: true, ..heads.clone() };
                node.inputs.push(result.host_input(InputRole::Documents));
                node.op = Attention { heads }.into();
            }
            Op::AddPositions(_) => {
                let (x, table) = (node.inputs[0], node.inputs[1]);
                let positions = result.host_input(InputRole::Positions);
                let (name, op) = (format!("{}.rows", node.name), Embedding::default());
                let rows = result.node_beside(&node, &name, op, &[positions, table], None)?;
                node.op = Add {}.into();
                node.inputs = vec![x, rows.outputs[0]];
                result.nodes.push(rows);
            }
            Op::Opaque(_) => {
                return Err(invalid(format!(
                    "expected ops that are known to keep documents apart, got `{}`\n\
                     hint: take joined documents",
                    node.name
                )));
            }
            _ => {}
        }
        result.nodes.push(node);
    }
    for (index, Node { source, .. }) in result.nodes.iter_mut().enumerate() {
        *source = NodeId(index as u32);
    }
    crate::verify(&result)?;
    Ok(result)
}
