//! Cuts a model into the stages of a pipeline.
//!
//! The graph stays whole through the passes behind the cut, so that each of them sees what it sees
//! of a model on one rank: which linear layer is the last, which gradients meet. Where a stage
//! ends, what the next one reads is sent, and received in its place; differentiation makes the way
//! back of that. [`PipelineCut::part`] then takes the nodes of a rank's stages out.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::ops::{Collective, CollectiveKind};
use crate::{Graph, GroupId, IrError, Link, Node, NodeId, Op, Phase, TensorId, TensorKind};

/// Where a graph was cut, and which stages have which parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineCut {
    /// The first node of each stage but the first one, among the forward nodes.
    begins: Vec<u32>,
    /// The stages that read each parameter, in order; the first one counts it.
    readers: BTreeMap<String, Vec<u32>>,
}

/// Cuts a forward graph into stages of so many `layers` each, as they follow each other. What
/// stands before the first layer is of the first stage, what stands behind the last one of the
/// last. `group` has as many `ranks`, each with one stage after the other in turn: stage `s` is at
/// place `s mod ranks`.
///
/// Of each tensor that crosses a cut there is one send and one receive; one that several later
/// stages read goes from stage to stage. Nodes are numbered anew, their `source` says where they
/// stand.
///
/// # Errors
/// [`IrError::Invalid`] for layers that are not those of the graph, that do not stand in order, or
/// share a parameter across stages other than the first and the last; for a graph that is cut
/// already, for a tensor at a cut that is no activation, and for stages that are no multiple of the
/// ranks, or several of one rank alone.
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
    // What later nodes read in place of what a stage before theirs made.
    let mut received: HashMap<TensorId, TensorId> = HashMap::new();
    let mut begins = Vec::with_capacity(bounds.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        for (&bound, from) in bounds.iter().zip(0u32..) {
            if bound != index {
                continue;
            }
            let tensors = crossing.next().unwrap_or_default();
            // Both ends stand in no layer: nothing of them is computed again.
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

/// The first node of each stage but the first.
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

/// What nodes before each bound make and nodes behind it read, in the order in which it is made.
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
    // What nobody reads is kept where the model begins.
    for stages in readers.values_mut().filter(|stages| stages.is_empty()) {
        stages.push(0);
    }
    readers
}

fn stage_of(begins: &[u32], node: &Node) -> u32 {
    begins.partition_point(|&begin| begin <= node.source.0) as u32
}

impl PipelineCut {
    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.begins.len() + 1
    }

    /// The stage of a node of the graph, whatever passes have made of that.
    pub fn stage_of(&self, node: &Node) -> u32 {
        stage_of(&self.begins, node)
    }

    /// The stages that have a parameter, in order.
    pub fn stages_with(&self, parameter: &str) -> &[u32] {
        self.readers.get(parameter).map_or(&[], Vec::as_slice)
    }

    /// The stage that counts a parameter in what is summed over all.
    pub fn owner(&self, parameter: &str) -> Option<u32> {
        self.stages_with(parameter).first().copied()
    }

    /// Parameters that are counted by the stage that counts most.
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

    /// The nodes of some stages with their tensors, as a graph of its own. `graph` is what passes
    /// have made of the one that was cut.
    ///
    /// # Errors
    /// [`IrError::Invalid`] for a stage that reads what it does not have.
    pub fn part(&self, graph: &Graph, stages: &[u32]) -> Result<Graph, IrError> {
        let mut kept = vec![false; graph.nodes.len()];
        let mut read = vec![false; graph.tensors.len()];
        // Copies of weights stand before what reads them, wherever that is.
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

/// Some nodes of a graph with the tensors that they and `others` name, numbered anew.
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
    // All that are named have one.
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
