//! Master weights in BF16: calls that read a BF16 copy of a matrix read the master itself.

use std::collections::{HashMap, HashSet};

use crate::{DType, Graph, IrError, Op, Phase, Stage, TensorId};

/// Stores matrices in BF16 and removes their casts. A matrix stays in FP32 if a call reads the
/// master as FP32, as routers do. Vectors stay in FP32, too: a norm's weights are close to 1, where
/// BF16 has steps of a 128th.
///
/// The choice does not depend on the precision policy, so that a program compiled under another
/// policy has the same masters.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn bf16_masters(graph: &Graph) -> Result<Graph, IrError> {
    if graph.stage != Stage::Quantized {
        let pass = "bf16_masters";
        return Err(IrError::Stage { pass, wants: Stage::Quantized, got: graph.stage });
    }
    let is_matrix = |id: &TensorId| graph.tensor(*id).shape.0.len() >= 2;
    let mut masters: HashSet<TensorId> =
        graph.parameters().map(|(id, _)| id).filter(is_matrix).collect();
    for node in &graph.nodes {
        // Conversions of weights take both types.
        if node.phase != Phase::Weights {
            node.inputs.iter().for_each(|id| {
                masters.remove(id);
            });
        }
    }
    let mut result = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    masters.iter().for_each(|id| result.tensors[id.index()].dtype = DType::Bf16);
    // The BF16 copy of each master.
    let mut master_of: HashMap<TensorId, TensorId> = HashMap::new();
    for node in &graph.nodes {
        if let (Op::Cast(cast), &[id]) = (&node.op, &node.inputs[..])
            && cast.to == DType::Bf16
            && masters.contains(&id)
        {
            master_of.insert(node.outputs[0], id);
            continue;
        }
        let mut node = node.clone();
        for input in &mut node.inputs {
            *input = master_of.get(input).copied().unwrap_or(*input);
        }
        result.nodes.push(node);
    }
    crate::verify(&result)?;
    Ok(result)
}
