//! Takes the gradients of weights out of the backward pass, into a phase of their own.
//!
//! Nobody but the optimizer waits for a gradient of a weight. A zero-bubble schedule (Qi et al.,
//! arXiv 2401.10241) sends the gradient of a stage's input first and makes those of its weights
//! where the stage would wait.
//!
//! What moves are the nodes that serve gradients of parameters alone: GEMMs, bias gradients, those
//! of embedding tables, and what is computed or gathered for them. What stays:
//! - a node that makes a gradient of an input beside that of a weight, as norms and the loss do,
//! - every writer of a gradient that one of those writes, so that sums keep their order,
//! - quantizations: what they make takes less room until then than what they read,
//! - what reads weights, which ZeRO 3 has there in the backward alone.

use std::collections::HashSet;

use crate::{Graph, IrError, Node, Op, Phase, Stage, TensorId, TensorKind};

/// The graph with the nodes that serve gradients of parameters alone in
/// [`Phase::WeightGradients`], in the order that they had. They compute what they did.
///
/// # Errors
/// A graph that is not differentiated.
pub fn defer_weight_gradients(graph: &Graph) -> Result<Graph, IrError> {
    if graph.stage < Stage::Differentiated {
        return Err(IrError::Stage {
            pass: "defer_weight_gradients",
            wants: Stage::Differentiated,
            got: graph.stage,
        });
    }
    let moves = moving(graph);
    let (mut rest, mut moved) = (Vec::with_capacity(graph.nodes.len()), Vec::new());
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

/// Which nodes move: of all that could, one falls out with each other that needs it, until none
/// does.
fn moving(graph: &Graph) -> Vec<bool> {
    let mut moves: Vec<bool> = graph.nodes.iter().map(|node| may_move(graph, node)).collect();
    loop {
        let mut read_there: HashSet<TensorId> = HashSet::new();
        let mut needed_before: HashSet<TensorId> = HashSet::new();
        for (node, &moves) in graph.nodes.iter().zip(&moves) {
            if moves {
                read_there.extend(&node.inputs);
            } else {
                // Of a gradient all writers stay, or none.
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
        Op::Quantize(_) => true,
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
