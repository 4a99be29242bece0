//! Cuts a model into pipeline stages.
//!
//! The graph stays whole during the passes after the cut, so that each pass sees the same structure
//! as on one rank: which linear layer is the last, which gradients are summed. At a stage boundary,
//! a send and a receive replace each tensor that the next stage reads; differentiation adds the
//! reverse transfers. [`PipelineCut::part`] then extracts the nodes of a rank's stages.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::ops::{Collective, CollectiveKind};
use crate::{Graph, GroupId, IrError, Link, Node, NodeId, Op, Phase, TensorId, TensorKind};

/// Cut positions of a graph, and the stages of each parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineCut {
    /// First forward node of each stage except the first stage.
    begins: Vec<u32>,
    /// Stages that read each parameter, in order; the first of them owns the parameter.
    readers: BTreeMap<String, Vec<u32>>,
}

/// Cuts a forward graph into consecutive stages of `layers` layers each. Nodes before the first
/// layer belong to the first stage, nodes after the last layer to the last stage. `group` has
/// `ranks` ranks, to which stages are assigned cyclically: stage `s` is at place `s mod ranks`.
///
/// Each tensor across a cut has a send and a receive; a tensor that several later stages
/// read is passed from stage to stage. Nodes are renumbered: `source` is the index in the cut
/// graph.
///
/// # Errors
/// [`IrError::Invalid`] if the layer counts do not add up to the layers of the graph, if layers are
/// not in order or share a parameter across stages other than the first and the last, if the graph
/// is already cut, if a tensor at a cut is not an activation, and if the number of stages is not a
/// multiple of the number of ranks or one rank has several stages.
pub fn cut_pipeline(
    graph: &Graph,
    layers: &[usize],
    (group, ranks): (GroupId, usize),
) -> Result<(Graph, PipelineCut), IrError> {
    let invalid =
        |what: String| IrError::Invalid { graph: graph.name.clone(), stage: graph.stage, what };
    let bounds = bounds(graph, layers).map_err(invalid)?;
    if ranks == 0 || !layers.len().is_multiple_of(ranks) || (ranks == 1 && layers.len() > 1) {
        return Err(invalid(format!(
            "expected a multiple of {ranks} ranks of at least 2 as stages, got {}",
            layers.len()
        )));
    }
    let ranks = ranks as u32;
    let mut crossing = crossing(graph, &bounds).map_err(invalid)?.into_iter();
    let mut result = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    // Tensors of earlier stages, each with the received tensor that later nodes read instead.
    let mut received: HashMap<TensorId, TensorId> = HashMap::new();
    let mut begins = Vec::with_capacity(bounds.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        for (&bound, from) in bounds.iter().zip(0u32..) {
            if bound != index {
                continue;
            }
            let tensors = crossing.next().unwrap_or_default();
            // Transfers belong to no layer, so neither end is recomputed.
            let beside = Node { layer: None, ..node.clone() };
            let of = |id: &TensorId| *received.get(id).unwrap_or(id);
            let sent: Vec<TensorId> = tensors.iter().map(of).collect();
            for &tensor in &sent {
                let op =
                    Collective::new(CollectiveKind::Send { to: (from + 1) % ranks }, group, ranks);
                let name = format!("{}.send", result.tensor(tensor).name);
                let node = result.node_beside(&beside, &name, op, &[tensor], None)?;
                result.nodes.push(node);
            }
            begins.push(result.nodes.len() as u32);
            for (tensor, sent) in tensors.into_iter().zip(sent) {
                let source = result.tensor(sent);
                let (shape, dtype) = (source.shape.clone(), source.dtype);
                let name = format!("{}.recv", source.name);
                let kind = CollectiveKind::Recv { from: from % ranks, shape, dtype };
                let op = Collective::new(kind, group, ranks);
                let node = result.node_beside(&beside, &name, op, &[], None)?;
                received.insert(tensor, node.outputs[0]);
                result.nodes.push(node);
            }
        }
        let mut node = node.clone();
        for input in &mut node.inputs {
            *input = *received.get(input).unwrap_or(input);
        }
        result.nodes.push(node);
    }
    for (index, node) in result.nodes.iter_mut().enumerate() {
        node.source = NodeId(index as u32);
    }
    crate::verify(&result)?;
    let cut = PipelineCut { readers: readers(&result, &begins), begins };
    cut.check_shared().map_err(invalid)?;
    Ok((result, cut))
}

/// Index of the first node of each stage except the first stage.
fn bounds(graph: &Graph, layers: &[usize]) -> Result<Vec<usize>, String> {
    let is_transfer = |node: &&Node| match &node.op {
        Op::Collective(op) => {
            matches!(op.kind, CollectiveKind::Send { .. } | CollectiveKind::Recv { .. })
        }
        _ => false,
    };
    if let Some(node) = graph.nodes.iter().find(is_transfer) {
        return Err(format!("expected a graph that is not cut yet, got one with `{}`", node.name));
    }
    let (count, total) = (graph.layer_count(), layers.iter().sum::<usize>());
    if total != count || layers.contains(&0) {
        return Err(format!(
            "expected stages of at least 1 layer each, {count} together, got {layers:?}"
        ));
    }
    let mut first = 0;
    let mut bounds = Vec::new();
    for &layers in &layers[..layers.len().saturating_sub(1)] {
        first += layers as u32;
        let is_later = |node: &Node| node.layer.is_some_and(|layer| layer >= first);
        let bound = graph.nodes.iter().position(is_later).unwrap_or(graph.nodes.len());
        let earlier =
            graph.nodes[bound..].iter().find(|node| node.layer.is_some_and(|l| l < first));
        if let Some(node) = earlier {
            return Err(format!(
                "expected layers one behind the other, got `{}` behind layer {first}",
                node.name
            ));
        }
        bounds.push(bound);
    }
    Ok(bounds)
}

/// For each bound, tensors made before and read after the bound, in order of production.
fn crossing(graph: &Graph, bounds: &[usize]) -> Result<Vec<Vec<TensorId>>, String> {
    let at_bound = |&bound: &usize| {
        let (before, behind) = graph.nodes.split_at(bound);
        let read: HashSet<TensorId> =
            behind.iter().flat_map(|node| &node.inputs).copied().collect();
        let made = before.iter().flat_map(|node| &node.outputs).copied();
        let tensors: Vec<TensorId> = made.filter(|id| read.contains(id)).collect();
        let other = tensors.iter().find(|id| {
            let tensor = graph.tensor(**id);
            tensor.kind != TensorKind::Activation || !tensor.dtype.is_high_precision()
        });
        match other {
            Some(&id) => {
                let tensor = graph.tensor(id);
                let (name, kind, dtype) = (&tensor.name, &tensor.kind, tensor.dtype);
                Err(format!(
                    "expected activations where stages meet, got `{name}`, {kind:?} in {dtype}\n\
                     hint: put both of its ends into one stage"
                ))
            }
            None => Ok(tensors),
        }
    };
    bounds.iter().map(at_bound).collect()
}

fn readers(graph: &Graph, begins: &[u32]) -> BTreeMap<String, Vec<u32>> {
    let mut readers: BTreeMap<String, Vec<u32>> =
        graph.parameters().map(|(_, tensor)| (tensor.name.clone(), Vec::new())).collect();
    for node in &graph.nodes {
        let stage = stage_of(begins, node);
        for &input in &node.inputs {
            let tensor = graph.tensor(input);
            let Some(stages) = readers.get_mut(&tensor.name) else { continue };
            let is_parameter = matches!(tensor.kind, TensorKind::Parameter { .. });
            if is_parameter && stages.last() != Some(&stage) {
                stages.push(stage);
            }
        }
    }
    // Unused parameters belong to the first stage.
    for stages in readers.values_mut().filter(|stages| stages.is_empty()) {
        stages.push(0);
    }
    readers
}

fn stage_of(begins: &[u32], node: &Node) -> u32 {
    begins.partition_point(|&begin| begin <= node.source.0) as u32
}

impl PipelineCut {
    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.begins.len() + 1
    }

    /// Stage of a node of the graph, also after further passes.
    pub fn stage_of(&self, node: &Node) -> u32 {
        stage_of(&self.begins, node)
    }

    /// Stages that have a parameter, in order.
    pub fn stages_with(&self, parameter: &str) -> &[u32] {
        self.readers.get(parameter).map_or(&[], Vec::as_slice)
    }

    /// Stage that counts the parameter in sums over all stages.
    pub fn owner(&self, parameter: &str) -> Option<u32> {
        self.stages_with(parameter).first().copied()
    }

    /// Largest number of parameters owned by one stage.
    pub fn parameters_of_largest_stage(&self) -> usize {
        let mut counts = vec![0; self.stages()];
        for stages in self.readers.values() {
            counts[stages[0] as usize] += 1;
        }
        counts.into_iter().max().unwrap_or(0)
    }

    fn check_shared(&self) -> Result<(), String> {
        let last = self.begins.len() as u32;
        let other = self
            .readers
            .iter()
            .find(|(_, stages)| stages.len() > 1 && stages.as_slice() != [0, last]);
        match other {
            None => Ok(()),
            Some((name, stages)) => Err(format!(
                "expected parameters of one stage, or of the first and the last, got `{name}` of \
                 stages {stages:?}\nhint: cut into fewer stages"
            )),
        }
    }

    /// Extracts the nodes of some stages with their tensors as a separate graph. `graph` is the cut
    /// graph after further passes.
    ///
    /// # Errors
    /// [`IrError::Invalid`] if a stage reads a tensor of another stage.
    pub fn part(&self, graph: &Graph, stages: &[u32]) -> Result<Graph, IrError> {
        let mut kept = vec![false; graph.nodes.len()];
        let mut read = vec![false; graph.tensors.len()];
        // Weight copies come before their readers, in any stage.
        for (index, node) in graph.nodes.iter().enumerate().rev() {
            kept[index] = match node.phase {
                Phase::Weights => node.outputs.iter().any(|output| read[output.index()]),
                _ => stages.contains(&self.stage_of(node)),
            };
            if kept[index] {
                node.inputs.iter().for_each(|input| read[input.index()] = true);
            }
        }
        let nodes = graph.nodes.iter().zip(kept).filter(|(_, kept)| *kept);
        let nodes: Vec<Node> = nodes.map(|(node, _)| node.clone()).collect();
        let parameters = graph
            .parameters()
            .filter(|(_, tensor)| {
                self.stages_with(&tensor.name).iter().any(|stage| stages.contains(stage))
            })
            .map(|(id, _)| id);
        let part = part_of(graph, nodes, parameters);
        crate::verify(&part)?;
        Ok(part)
    }
}

/// A graph of some nodes with the tensors that nodes and `others` refer to, renumbered.
pub(super) fn part_of(
    graph: &Graph,
    mut nodes: Vec<Node>,
    others: impl Iterator<Item = TensorId>,
) -> Graph {
    let mut named = vec![false; graph.tensors.len()];
    let mut open: Vec<TensorId> = others.collect();
    open.extend(nodes.iter().flat_map(|node| node.inputs.iter().chain(&node.outputs)));
    while let Some(id) = open.pop() {
        if std::mem::replace(&mut named[id.index()], true) {
            continue;
        }
        let tensor = graph.tensor(id);
        let parameter = match tensor.kind {
            TensorKind::ParameterGradient { parameter } => Some(parameter),
            _ => None,
        };
        let of = tensor.link.map(|link| link.of);
        open.extend(parameter.into_iter().chain(of));
    }
    let mut new_ids: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
    let mut tensors = Vec::new();
    for (id, tensor) in graph.tensors_with_ids().filter(|(id, _)| named[id.index()]) {
        new_ids[id.index()] = Some(TensorId(tensors.len() as u32));
        tensors.push(tensor.clone());
    }
    // All referenced tensors have a new id.
    let new_id = |id: TensorId| new_ids[id.index()].unwrap_or(id);
    for tensor in &mut tensors {
        if let TensorKind::ParameterGradient { parameter } = &mut tensor.kind {
            *parameter = new_id(*parameter);
        }
        tensor.link = tensor.link.map(|link| Link { of: new_id(link.of), ..link });
    }
    for id in nodes.iter_mut().flat_map(|node| node.inputs.iter_mut().chain(&mut node.outputs)) {
        *id = new_id(*id);
    }
    let loss = graph.loss.and_then(|loss| new_ids[loss.index()]);
    Graph { name: graph.name.clone(), stage: graph.stage, tensors, nodes, loss }
}
