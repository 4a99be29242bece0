//! Moves weight gradients out of the backward pass into a separate phase.
//!
//! Only the optimizer needs weight gradients. A zero-bubble schedule (Qi et al., arXiv 2401.10241)
//! first sends the gradient of a stage's input and computes weight gradients while the stage would
//! be idle.
//!
//! Nodes move if they serve only parameter gradients: GEMMs, bias gradients, embedding table
//! gradients, and computations or collectives for these. The following nodes stay:
//! - a node that computes both an input gradient and a weight gradient, as norms and the loss do,
//! - every writer of a gradient with such a node as a writer, to preserve the order of summation,
//! - quantizations, because their outputs take less memory until then than their inputs,
//! - readers of weights, because ZeRO 3 gathers weights only for the backward.

use std::collections::HashSet;

use crate::{Graph, IrError, Node, Op, Phase, Stage, TensorId, TensorKind};

/// Moves the nodes that serve only parameter gradients to [`Phase::WeightGradients`], in order. The
/// computation itself is unchanged.
///
/// # Errors
/// A graph before differentiation.
pub fn defer_weight_gradients(graph: &Graph) -> Result<Graph, IrError> {
    if graph.stage < Stage::Differentiated {
        return Err(IrError::Stage {
            pass: "defer_weight_gradients",
            wants: Stage::Differentiated,
            got: graph.stage,
        });
    }
    let moves = moving(graph);
    let mut rest = Vec::with_capacity(graph.nodes.len());
    let mut moved = Vec::new();
    for (node, moves) in graph.nodes.iter().cloned().zip(moves) {
        match moves {
            true => moved.push(Node { phase: Phase::WeightGradients, ..node }),
            false => rest.push(node),
        }
    }
    let behind = rest.partition_point(|node| node.phase <= Phase::Backward);
    rest.splice(behind..behind, moved);
    let result = Graph { nodes: rest, ..graph.clone() };
    crate::verify(&result)?;
    Ok(result)
}

/// Nodes that move: starts with all candidates and removes nodes needed by others until stable.
fn moving(graph: &Graph) -> Vec<bool> {
    let mut moves: Vec<bool> = graph.nodes.iter().map(|node| may_move(graph, node)).collect();
    loop {
        let mut read_there: HashSet<TensorId> = HashSet::new();
        let mut needed_before: HashSet<TensorId> = HashSet::new();
        for (node, &moves) in graph.nodes.iter().zip(&moves) {
            if moves {
                read_there.extend(&node.inputs);
            } else {
                // Either all writers of a gradient stay, or none.
                needed_before.extend(node.inputs.iter().chain(&node.outputs));
            }
        }
        let mut is_changed = false;
        for (node, moves) in graph.nodes.iter().zip(&mut moves) {
            let serves_weights = |id: &TensorId| {
                let is_gradient = is_weight_gradient(graph, *id);
                !needed_before.contains(id) && (is_gradient || read_there.contains(id))
            };
            if *moves && !node.outputs.iter().all(serves_weights) {
                (*moves, is_changed) = (false, true);
            }
        }
        if !is_changed {
            return moves;
        }
    }
}

fn may_move(graph: &Graph, node: &Node) -> bool {
    let quantizes = match &node.op {
        Op::Quantize(_) | Op::QuantizeOperands(_) => true,
        Op::Fused(op) => op.quantizations().next().is_some(),
        _ => false,
    };
    let is_weight = |id: &TensorId| {
        matches!(graph.tensor(*id).kind, TensorKind::Parameter { .. } | TensorKind::WeightCopy)
    };
    let is_its = node.phase == Phase::Backward && !node.outputs.is_empty();
    is_its && !quantizes && !node.inputs.iter().any(is_weight)
}

fn is_weight_gradient(graph: &Graph, id: TensorId) -> bool {
    matches!(graph.tensor(id).kind, TensorKind::ParameterGradient { .. })
}
