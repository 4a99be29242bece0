//! Merges neighbours that read the same memory.

use crate::op::input_types;
use crate::ops::{QuantizedOutput, WithActivation, WithQuantize};
use crate::{Graph, IrError, Node, Op, Stage, TensorId, TensorType, ops};

/// A residual add followed at once by the norm of its sum becomes one op: one read of each
/// operand instead of two. Then a product followed by a function of its elements becomes one
/// [`WithActivation`], and an op, that one too, followed by the quantization of its outputs one
/// [`WithQuantize`], where there is such an op and `fuses` says yes to it and its inputs (see
/// [`crate::KernelCatalog::fuses`]); a high-precision output stays where another node reads it.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn fuse(graph: &Graph, fuses: &dyn Fn(&Op, &[TensorType]) -> bool) -> Result<Graph, IrError> {
    if graph.stage != Stage::Quantized {
        return Err(IrError::Stage { pass: "fuse", wants: Stage::Quantized, got: graph.stage });
    }
    let mut result = Graph { stage: Stage::Fused, nodes: Vec::new(), ..graph.clone() };
    let mut nodes = graph.nodes.iter().peekable();
    while let Some(node) = nodes.next() {
        let fused = nodes.peek().and_then(|next| add_and_norm(node, next));
        if fused.is_some() {
            nodes.next();
        }
        result.nodes.push(fused.unwrap_or_else(|| node.clone()));
    }
    result.nodes = with_what_follows(&result, fuses);
    crate::verify(&result)?;
    Ok(result)
}

fn add_and_norm(add: &Node, norm: &Node) -> Option<Node> {
    let op: Op = match (&add.op, &norm.op) {
        (Op::Add(_), Op::RmsNorm(norm)) => ops::AddRmsNorm { eps: norm.eps }.into(),
        (Op::Add(_), Op::LayerNorm(norm)) => ops::AddLayerNorm { eps: norm.eps }.into(),
        _ => return None,
    };
    if norm.inputs[0] != add.outputs[0] || norm.phase != add.phase {
        return None;
    }
    let of_norm = norm.inputs.iter().skip(1);
    Some(Node {
        name: norm.name.clone(),
        op,
        inputs: add.inputs.iter().chain(of_norm).copied().collect(),
        outputs: add.outputs.iter().chain(&norm.outputs).copied().collect(),
        ..norm.clone()
    })
}

/// The nodes with each producer and the activation and quantizations right behind it merged.
fn with_what_follows(graph: &Graph, fuses: &dyn Fn(&Op, &[TensorType]) -> bool) -> Vec<Node> {
    let mut readers = vec![0usize; graph.tensors.len()];
    for id in graph.nodes.iter().flat_map(|node| &node.inputs) {
        readers[id.index()] += 1;
    }
    let fuses = |node: &Node| fuses(&node.op, &input_types(graph, &node.inputs));
    let mut merged = Vec::with_capacity(graph.nodes.len());
    let mut rest = graph.nodes.as_slice();
    while let Some((producer, after)) = rest.split_first() {
        let product = after.split_first().and_then(|(activation, after)| {
            let both = with_activation(producer, activation, &readers)?;
            with_all_quantizations(&both, after, &readers, &fuses)
        });
        let found = match product {
            Some(found) => Some(found),
            None => with_all_quantizations(producer, after, &readers, &fuses),
        };
        let (node, after) = found.unwrap_or_else(|| (producer.clone(), after));
        merged.push(node);
        rest = after;
    }
    merged
}

/// A node with all quantizations right behind it, and what comes after them; a fused one without
/// any stays as it is. None where the catalog does not want it.
fn with_all_quantizations<'a>(
    producer: &Node,
    after: &'a [Node],
    readers: &[usize],
    fuses: &dyn Fn(&Node) -> bool,
) -> Option<(Node, &'a [Node])> {
    let count = after.iter().take_while(|node| quantizes(node, producer)).count();
    let (quantizations, after) = after.split_at(count);
    let node = match (quantizations, &producer.op) {
        ([], Op::WithActivation(_)) => producer.clone(),
        _ => with_quantize(producer, quantizations, readers)?,
    };
    fuses(&node).then_some((node, after))
}

/// A product and the function of its elements that follows. `readers` says of each tensor how many
/// operands of nodes it is.
fn with_activation(product: &Node, activation: &Node, readers: &[usize]) -> Option<Node> {
    let result = *product.outputs.first()?;
    let (first, others) = activation.inputs.split_first()?;
    let is_next =
        *first == result && !others.contains(&result) && activation.phase == product.phase;
    if !is_next || !WithActivation::is_pair(&product.op, &activation.op) {
        return None;
    }
    let keep = readers[result.index()] > 1;
    let op = WithActivation {
        product: Box::new(product.op.clone()),
        activation: Box::new(activation.op.clone()),
        keep,
    };
    Some(Node {
        op: op.into(),
        inputs: product.inputs.iter().chain(others).copied().collect(),
        outputs: keep.then_some(result).into_iter().chain(activation.outputs.clone()).collect(),
        ..product.clone()
    })
}

fn quantizes(node: &Node, producer: &Node) -> bool {
    matches!(node.op, Op::Quantize(_))
        && node.phase == producer.phase
        && producer.outputs.contains(&node.inputs[0])
}

/// `readers` says of each tensor how many operands of nodes it is.
fn with_quantize(producer: &Node, quantizations: &[Node], readers: &[usize]) -> Option<Node> {
    if quantizations.is_empty() || !WithQuantize::is_producer(&producer.op) {
        return None;
    }
    let source = |node: &Node| node.inputs[0];
    let is_kept = |id: TensorId| {
        let here = quantizations.iter().filter(|node| source(node) == id).count();
        readers[id.index()] > here
    };
    let quantized: Vec<QuantizedOutput> = quantizations
        .iter()
        .filter_map(|node| {
            let Op::Quantize(quantize) = &node.op else { return None };
            let output = producer.outputs.iter().position(|&id| id == source(node))?;
            let keep = is_kept(source(node));
            Some(QuantizedOutput { output, quantize: quantize.clone(), keep })
        })
        .collect();
    let op = WithQuantize { producer: Box::new(producer.op.clone()), quantized };
    let outputs = producer
        .outputs
        .iter()
        .enumerate()
        .filter(|&(output, _)| op.keeps(output))
        .map(|(_, &id)| id)
        .chain(quantizations.iter().flat_map(|node| node.outputs.iter().copied()))
        .collect();
    Some(Node { op: op.into(), outputs, ..producer.clone() })
}
