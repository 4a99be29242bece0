//! Merges neighbours that read the same memory.

use crate::ops::{QuantizedOutput, WithQuantize};
use crate::{Graph, IrError, Node, Op, Stage, TensorId, ops};

/// A residual add followed at once by the norm of its sum becomes one op: one read of each
/// operand instead of two. Then an op followed by the quantization of its outputs becomes one
/// [`WithQuantize`], where there is such an op and `fuses` says yes to it (see
/// [`crate::KernelCatalog::fuses`]); a high-precision output stays where another node reads it.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn fuse(graph: &Graph, fuses: &dyn Fn(&Op) -> bool) -> Result<Graph, IrError> {
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
    result.nodes = with_quantizations(&result, fuses);
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

/// The nodes with each producer and the quantizations right behind it merged.
fn with_quantizations(graph: &Graph, fuses: &dyn Fn(&Op) -> bool) -> Vec<Node> {
    let mut readers = vec![0usize; graph.tensors.len()];
    for id in graph.nodes.iter().flat_map(|node| &node.inputs) {
        readers[id.index()] += 1;
    }
    let mut merged = Vec::with_capacity(graph.nodes.len());
    let mut rest = graph.nodes.as_slice();
    while let Some((producer, after)) = rest.split_first() {
        let count = after.iter().take_while(|node| quantizes(node, producer)).count();
        let (quantizations, after) = after.split_at(count);
        match with_quantize(producer, quantizations, &readers).filter(|node| fuses(&node.op)) {
            Some(node) => {
                merged.push(node);
                rest = after;
            }
            None => {
                merged.push(producer.clone());
                rest = &rest[1..];
            }
        }
    }
    merged
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
