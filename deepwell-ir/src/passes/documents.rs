//! Separates documents within a sequence: attention masks and learned positions.

use crate::graph::InputRole;
use crate::ops::{Add, Attention, AttentionHeads, Embedding};
use crate::{Graph, IrError, Node, NodeId, Op, Stage};

/// Masks documents in a captured forward graph whose sequences each hold several consecutive
/// documents: a token attends only to tokens of the same document, and learned positions count from
/// the beginning of the document.
///
/// The document boundaries are the input [`InputRole::Documents`]; learned positions also need
/// [`InputRole::Positions`]. Rotary positions still count from the beginning of the sequence,
/// because scores depend only on position differences. The targets alone determine the loss.
///
/// # Errors
/// [`IrError::Invalid`] for a graph after another pass, and for attention without a causal mask or
/// opaque ops.
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
                let name = format!("{}.rows", node.name);
                let op = Embedding::default();
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
