//! Saves memory at the cost of time: the backward recomputes the outputs of marked forward nodes.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{
    Derivation, Graph, IrError, Link, Node, Op, Phase, Stage, Tensor, TensorId, TensorKind,
};

/// What the backward recomputes. The text form is `none`, `norms`, `activations`, `selective`,
/// `full`, or `full:8` for [`Recompute::FullOf`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(into = "String", try_from = "String")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Outputs of a layer's norms: cheap to compute, large to keep.
    Norms,
    /// Outputs of a layer's activation functions: cheap to compute, large to keep.
    Activations,
    /// Outputs of norms and of activation functions.
    Selective,
    /// Everything inside of this many layers, evenly spread over the model and so over pipeline
    /// stages; in the other layers the outputs of norms and activation functions.
    FullOf(NonZeroU32),
    /// Everything inside a layer; only tensors between layers are kept.
    Full,
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Recompute::None => "none",
            Recompute::Norms => "norms",
            Recompute::Activations => "activations",
            Recompute::Selective => "selective",
            Recompute::FullOf(layers) => return write!(f, "full:{layers}"),
            Recompute::Full => "full",
        })
    }
}

impl FromStr for Recompute {
    type Err = String;

    fn from_str(text: &str) -> Result<Recompute, String> {
        let layers = text.strip_prefix("full:").and_then(|layers| layers.parse().ok());
        match text {
            "none" => Ok(Recompute::None),
            "norms" => Ok(Recompute::Norms),
            "activations" => Ok(Recompute::Activations),
            "selective" => Ok(Recompute::Selective),
            "full" => Ok(Recompute::Full),
            _ => layers.map(Recompute::FullOf).ok_or_else(|| {
                format!(
                    "expected `none`, `norms`, `activations`, `selective`, `full`, or `full:8` for \
                     8 of the layers, got `{text}`"
                )
            }),
        }
    }
}

impl From<Recompute> for String {
    fn from(rule: Recompute) -> String {
        rule.to_string()
    }
}

impl TryFrom<String> for Recompute {
    type Error = String;

    fn try_from(text: String) -> Result<Recompute, String> {
        text.parse()
    }
}

/// Marks forward nodes by `rule` and inserts their recomputation before its first use.
///
/// # Errors
/// A graph that is not at [`Stage::Differentiated`], or more whole layers than the graph has.
pub fn recompute(graph: &Graph, rule: Recompute) -> Result<Graph, IrError> {
    if graph.stage != Stage::Differentiated {
        return Err(IrError::Stage {
            pass: "recompute",
            wants: Stage::Differentiated,
            got: graph.stage,
        });
    }
    let mut result = Graph { stage: Stage::Recomputed, nodes: Vec::new(), ..graph.clone() };
    let crossing = crossing_layers(graph);
    let layers = graph.layer_count();
    if let Recompute::FullOf(whole) = rule
        && whole.get() as usize > layers
    {
        return Err(IrError::RecomputedLayers { rule, layers });
    }
    let marked: Vec<bool> =
        graph.nodes.iter().map(|node| is_marked(node, (rule, layers), &crossing)).collect();
    let writers = graph.nodes.iter().zip(&marked).filter(|(_, mark)| **mark);
    let writers = writers
        .flat_map(|(node, _)| node.outputs.iter().map(move |&output| (output, node)))
        .collect();
    let mut second_run = SecondRun { graph, writers, made: HashMap::new() };
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

/// Tensors that a forward node of another layer or the loss reads. The loss node is already
/// replaced by a backward node, whose inputs count too.
fn crossing_layers(graph: &Graph) -> HashSet<TensorId> {
    let mut layer_of: HashMap<TensorId, Option<u32>> = HashMap::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        layer_of.extend(node.outputs.iter().map(|&output| (output, node.layer)));
    }
    let crosses = |reader: &Node, id: &TensorId| match layer_of.get(id) {
        Some(layer) if reader.phase == Phase::Forward => *layer != reader.layer,
        _ => matches!(
            reader.op,
            Op::LinearCrossEntropyGrad(_) | Op::VocabParallelCrossEntropyGrad(_)
        ),
    };
    let mut crossing = HashSet::new();
    for reader in &graph.nodes {
        crossing.extend(reader.inputs.iter().filter(|id| crosses(reader, id)));
    }
    crossing
}

fn is_marked(
    node: &Node,
    (rule, layers): (Recompute, usize),
    crossing: &HashSet<TensorId>,
) -> bool {
    let Some(layer) = node.layer.filter(|_| node.phase == Phase::Forward && !routes(&node.op))
    else {
        // A node outside of layers reads the final norm's output at once: recomputation would save
        // nothing.
        return false;
    };
    let is_norm = matches!(node.op, Op::RmsNorm(_) | Op::LayerNorm(_));
    let is_activation =
        matches!(node.op, Op::SwiGlu(_) | Op::ExpertSwiGlu(_) | Op::Gelu(_) | Op::Relu(_));
    let stays_within = || !node.outputs.iter().any(|output| crossing.contains(output));
    match rule {
        Recompute::None => false,
        Recompute::Norms => is_norm,
        Recompute::Activations => is_activation,
        Recompute::FullOf(full) if is_one_of(full.get() as usize, layer as usize, layers) => {
            stays_within()
        }
        Recompute::Selective | Recompute::FullOf(_) => is_norm || is_activation,
        Recompute::Full => stays_within(),
    }
}

/// Whether `layer` is one of `count` layers that are evenly spread over `layers`, the first among
/// them. The last layer comes last: memory peaks when its backward pass begins, so that its
/// recomputation lowers no peak.
fn is_one_of(count: usize, layer: usize, layers: usize) -> bool {
    let before = |layer: usize| (layer * count).div_ceil(layers.max(1));
    before(layer + 1) > before(layer)
}

/// Whether the op decides which experts tokens visit. Its outputs are small and kept: recomputation
/// from slightly different inputs could choose experts other than those of the forward pass.
fn routes(op: &Op) -> bool {
    matches!(op, Op::RouterLogits(_) | Op::Route(_) | Op::Dispatch(_) | Op::DispatchToRanks(_))
}

struct SecondRun<'a> {
    graph: &'a Graph,
    /// Marked node that writes each tensor.
    writers: HashMap<TensorId, &'a Node>,
    /// Tensors of the first run, each with the recomputed tensor.
    made: HashMap<TensorId, TensorId>,
}

impl SecondRun<'_> {
    /// Returns the tensor that the backward reads instead of `tensor`.
    fn of(&mut self, tensor: TensorId, result: &mut Graph) -> TensorId {
        if let Some(&made) = self.made.get(&tensor) {
            return made;
        }
        let Some(&writer) = self.writers.get(&tensor) else { return tensor };
        let inputs = writer.inputs.iter().map(|&id| self.of(id, result)).collect();
        let outputs = writer
            .outputs
            .iter()
            .map(|&id| {
                let first = self.graph.tensor(id);
                debug_assert!(!matches!(first.kind, TensorKind::Loss));
                let made = result.add_tensor(Tensor {
                    name: format!("{}.recomputed", first.name),
                    link: Some(Link { of: id, derivation: Derivation::Recomputed }),
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
            repeats: true,
            ..writer.clone()
        });
        self.made[&tensor]
    }
}
