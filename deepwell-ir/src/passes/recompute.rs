//! Trades memory for time: marked forward nodes run again in the backward instead of keeping
//! their outputs.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Graph, IrError, Node, Op, Phase, Stage, Tensor, TensorId, TensorKind};

/// What the backward makes again.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Outputs of a layer's norms and activation functions: cheap to make, large to keep.
    Selective,
    /// Everything inside a layer; only what crosses layers is kept.
    Full,
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        })
    }
}

impl FromStr for Recompute {
    type Err = String;

    fn from_str(text: &str) -> Result<Recompute, String> {
        match text {
            "none" => Ok(Recompute::None),
            "selective" => Ok(Recompute::Selective),
            "full" => Ok(Recompute::Full),
            _ => Err(format!("expected `none`, `selective` or `full`, got `{text}`")),
        }
    }
}

/// Marks forward nodes by `rule` and inserts their second run before its first use.
///
/// # Errors
/// A graph that is not at [`Stage::Differentiated`].
pub fn recompute(graph: &Graph, rule: Recompute) -> Result<Graph, IrError> {
    if graph.stage != Stage::Differentiated {
        return Err(IrError::Stage {
            pass: "recompute",
            wants: Stage::Differentiated,
            got: graph.stage,
        });
    }
    let mut result = Graph { stage: Stage::Recomputed, nodes: Vec::new(), ..graph.clone() };
    let marked: Vec<bool> = graph.nodes.iter().map(|node| is_marked(graph, node, rule)).collect();
    let mut second_run = SecondRun { graph, marked: &marked, made: HashMap::new() };
    for (node, &mark) in graph.nodes.iter().zip(&marked) {
        let mut node = node.clone();
        node.recompute = mark;
        if node.phase == Phase::Backward {
            for input in &mut node.inputs {
                *input = second_run.of(*input, &mut result);
            }
        }
        result.nodes.push(node);
    }
    crate::verify(&result)?;
    Ok(result)
}

fn is_marked(graph: &Graph, node: &Node, rule: Recompute) -> bool {
    if node.phase != Phase::Forward {
        return false;
    }
    match rule {
        Recompute::None => false,
        // The final norm's output is read by the very next node: nothing is won there.
        Recompute::Selective => {
            let is_cheap =
                matches!(node.op, Op::RmsNorm(_) | Op::LayerNorm(_) | Op::SwiGlu(_) | Op::Gelu(_));
            node.layer.is_some() && is_cheap
        }
        Recompute::Full => {
            let crosses_layers = graph.nodes.iter().any(|reader| {
                reader.phase == Phase::Forward
                    && reader.layer != node.layer
                    && reader.inputs.iter().any(|id| node.outputs.contains(id))
            });
            // The loss node is replaced by its backward: what it reads counts as crossing too.
            let read_by_loss = graph.nodes.iter().any(|reader| {
                matches!(reader.op, Op::LinearCrossEntropyGrad(_))
                    && reader.inputs.iter().any(|id| node.outputs.contains(id))
            });
            node.layer.is_some() && !crosses_layers && !read_by_loss
        }
    }
}

struct SecondRun<'a> {
    graph: &'a Graph,
    marked: &'a [bool],
    /// First-run tensor to second-run tensor.
    made: HashMap<TensorId, TensorId>,
}

impl SecondRun<'_> {
    /// The tensor to read in the backward in place of `tensor`.
    fn of(&mut self, tensor: TensorId, result: &mut Graph) -> TensorId {
        if let Some(&made) = self.made.get(&tensor) {
            return made;
        }
        let writer = self
            .graph
            .nodes
            .iter()
            .zip(self.marked)
            .find(|(node, mark)| **mark && node.outputs.contains(&tensor));
        let Some((writer, _)) = writer else { return tensor };
        let inputs = writer.inputs.iter().map(|&id| self.of(id, result)).collect();
        let outputs = writer
            .outputs
            .iter()
            .map(|&id| {
                let first = self.graph.tensor(id);
                debug_assert!(!matches!(first.kind, TensorKind::Loss));
                let made = result.add_tensor(Tensor {
                    name: format!("{}.recomputed", first.name),
                    ..first.clone()
                });
                self.made.insert(id, made);
                made
            })
            .collect();
        result.nodes.push(Node {
            name: format!("{}.recomputed", writer.name),
            inputs,
            outputs,
            phase: Phase::Backward,
            recompute: false,
            ..writer.clone()
        });
        self.made[&tensor]
    }
}
