//! Settings of a run for the routers of a captured model: auxiliary losses and expert capacity.

use deepwell_ir::ops::RouterLoss;
use deepwell_ir::{Graph, IrError, Op, OpError};
use serde::{Deserialize, Serialize};

/// Settings of a run for the routers of its model, not part of model configurations. By default
/// nothing is added and nothing dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterTraining {
    /// Coefficient of the load-balancing loss of each layer, see [`RouterLoss::balance`].
    pub balance: f64,
    /// Coefficient of the z-loss of each layer, see [`RouterLoss::z`].
    pub z: f64,
    /// Limits the pairs of an expert to a multiple of an even share; `None` drops no pairs.
    pub capacity_factor: Option<f64>,
}

/// Applies `training` to a captured graph: adds a [`RouterLoss`] after each router, and sets the
/// capacity factor of each layer's experts.
///
/// # Errors
/// Settings for a graph without routers, a graph without a loss over tokens, or invalid numbers.
pub fn with_router_training(graph: &Graph, training: &RouterTraining) -> Result<Graph, IrError> {
    if *training == RouterTraining::default() {
        return Ok(graph.clone());
    }
    let refuse = |expected: &str, got: &str| IrError::Operands {
        node: graph.name.clone(),
        source: OpError { op: "router_loss", expected: expected.to_string(), got: got.to_string() },
    };
    let head = graph.nodes.iter().find(|node| matches!(node.op, Op::LinearCrossEntropy(_)));
    let (Some(head), Some(loss)) = (head, graph.loss) else {
        return Err(refuse("a graph with a loss over tokens", "none"));
    };
    let (targets, loss_scale) = (head.inputs[2], head.inputs[3]);
    let has_losses = training.balance != 0.0 || training.z != 0.0;
    let mut result = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    let mut routers = 0;
    for node in &graph.nodes {
        let mut node = node.clone();
        if let Op::Experts(op) = &mut node.op {
            op.capacity_factor = training.capacity_factor;
        }
        result.nodes.push(node.clone());
        let Op::Route(route) = &node.op else { continue };
        routers += 1;
        if has_losses {
            let (balance, z) = (training.balance, training.z);
            let op = RouterLoss { score: route.score, balance, z, ranks: 1 };
            let inputs = [node.inputs[0], node.outputs[1], targets, loss_scale];
            let name = format!("{}.loss", node.name);
            let added = result.node_beside(&node, &name, op, &inputs, Some(loss))?;
            result.nodes.push(added);
        }
    }
    if routers == 0 {
        return Err(refuse("a model with routers, or no settings for them", "a model without"));
    }
    deepwell_ir::verify(&result)?;
    Ok(result)
}
