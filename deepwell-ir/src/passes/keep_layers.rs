//! Removes layers from a model: program sizes grow linearly with the number of layers of a kind, so
//! a few layers determine the size of many.

use std::collections::HashMap;

use super::pipeline::part_of;
use crate::{Graph, IrError, Node, NodeId, TensorId, TensorKind};

/// Kind of each layer: layers of one kind have the same ops on parameters of the same shapes. Kinds
/// are numbered from 0 in order of their first layers.
pub fn layer_kinds(graph: &Graph) -> Vec<usize> {
    let mut layers: Vec<Vec<(String, Vec<String>)>> = vec![Vec::new(); graph.layer_count()];
    for node in &graph.nodes {
        let Some(of_layer) = node.layer.and_then(|layer| layers.get_mut(layer as usize)) else {
            continue;
        };
        let tensors = node.inputs.iter().map(|&input| graph.tensor(input));
        let parameters = tensors.filter(|it| matches!(it.kind, TensorKind::Parameter { .. }));
        let shapes = parameters.map(|it| format!("{} {}", it.shape, it.dtype)).collect();
        of_layer.push((node.op.name().to_string(), shapes));
    }
    let mut known: Vec<&Vec<(String, Vec<String>)>> = Vec::new();
    let kind = |layer| match known.iter().position(|other| *other == layer) {
        Some(kind) => kind,
        None => {
            known.push(layer);
            known.len() - 1
        }
    };
    layers.iter().map(kind).collect()
}

/// Keeps only the layers `kept` and renumbers them. Later layers read the inputs of a removed layer
/// instead of its outputs.
///
/// # Errors
/// [`IrError::Invalid`] if `kept` is not an ascending list of layers of the graph, if the nodes are
/// not in layer order, or if the outputs of removed layers differ in type from the inputs.
pub fn keep_layers(graph: &Graph, kept: &[usize]) -> Result<Graph, IrError> {
    let invalid =
        |what: String| IrError::Invalid { graph: graph.name.clone(), stage: graph.stage, what };
    let count = graph.layer_count();
    let is_rising = kept.windows(2).all(|pair| pair[0] < pair[1]);
    if !is_rising || kept.last().is_none_or(|&last| last >= count) {
        let what = format!("expected some of the {count} layers in rising order, got {kept:?}");
        return Err(invalid(what));
    }
    let bounds = bounds(graph, count).map_err(invalid)?;
    let lives = lives(graph);
    let crossing = |bound: usize| crossing(&lives, bounds[bound]);
    let mut read_instead: HashMap<TensorId, TensorId> = HashMap::new();
    let mut nodes: Vec<Node> = Vec::new();
    let mut take = |nodes_of: std::ops::Range<usize>,
                    layer: Option<u32>,
                    read_instead: &HashMap<TensorId, TensorId>| {
        for node in &graph.nodes[nodes_of] {
            let mut node = node.clone();
            for input in &mut node.inputs {
                *input = *read_instead.get(input).unwrap_or(input);
            }
            node.layer = node.layer.and(layer);
            node.source = NodeId(nodes.len() as u32);
            nodes.push(node);
        }
    };
    take(0..bounds[0], None, &read_instead);
    let mut next = 0;
    for (new_layer, &layer) in kept.iter().chain([&count]).enumerate() {
        if layer > next {
            let before = crossing(next);
            let behind = crossing(layer);
            let got = difference(&before, &behind);
            let made = difference(&behind, &before);
            let alike = |(a, b): (&TensorId, &TensorId)| {
                let (a, b) = (graph.tensor(*a), graph.tensor(*b));
                (&a.shape, a.dtype) == (&b.shape, b.dtype)
            };
            if got.len() != made.len() || !got.iter().zip(&made).all(alike) {
                let names = |ids: &[TensorId]| -> Vec<String> {
                    ids.iter().map(|&id| graph.tensor(id).name.clone()).collect()
                };
                return Err(invalid(format!(
                    "expected layers {next} to {} to make what they read, got {:?} and {:?}",
                    layer - 1,
                    names(&made),
                    names(&got)
                )));
            }
            for (made, got) in made.into_iter().zip(got) {
                let got = *read_instead.get(&got).unwrap_or(&got);
                read_instead.insert(made, got);
            }
        }
        let end = bounds.get(layer + 1).copied().unwrap_or(graph.nodes.len());
        take(bounds[layer]..end, Some(new_layer as u32), &read_instead);
        next = layer + 1;
    }
    let part = part_of(graph, nodes, std::iter::empty());
    crate::verify(&part)?;
    Ok(part)
}

/// The tensors of `these` that `others` lacks.
fn difference(these: &[TensorId], others: &[TensorId]) -> Vec<TensorId> {
    these.iter().filter(|id| !others.contains(id)).copied().collect()
}

fn layer_of(node: &Node) -> Option<usize> {
    node.layer.map(|layer| layer as usize)
}

/// Index of the first node of each layer, and of the first node after the last layer.
fn bounds(graph: &Graph, count: usize) -> Result<Vec<usize>, String> {
    let mut bounds = Vec::with_capacity(count + 1);
    for layer in 0..count {
        let is_later = |node: &Node| layer_of(node).is_some_and(|it| it >= layer);
        let bound = graph.nodes.iter().position(is_later).unwrap_or(graph.nodes.len());
        let is_earlier = |node: &&Node| layer_of(node).is_some_and(|it| it < layer);
        if let Some(node) = graph.nodes[bound..].iter().find(is_earlier) {
            let name = &node.name;
            return Err(format!(
                "expected layers one behind the other, got `{name}` behind layer {layer}"
            ));
        }
        bounds.push(bound);
    }
    let last = graph.nodes.iter().rposition(|node| node.layer.is_some());
    bounds.push(last.map_or(graph.nodes.len(), |last| last + 1));
    Ok(bounds)
}

/// All node outputs in node order, each with its producer and last reader.
fn lives(graph: &Graph) -> Vec<(TensorId, usize, usize)> {
    let mut last_reader = vec![0; graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|id| last_reader[id.index()] = index);
    }
    let made = graph.nodes.iter().enumerate();
    let made = made.flat_map(|(index, node)| node.outputs.iter().map(move |&id| (id, index)));
    made.map(|(id, index)| (id, index, last_reader[id.index()])).collect()
}

/// Tensors made before a bound and read after the bound, in order of production.
fn crossing(lives: &[(TensorId, usize, usize)], bound: usize) -> Vec<TensorId> {
    let crosses = |(_, made, read): &&(TensorId, usize, usize)| *made < bound && *read >= bound;
    lives.iter().filter(crosses).map(|(id, ..)| *id).collect()
}
