//! Structural rules of a graph, checked after each pass.

use std::collections::{HashMap, HashSet};

use crate::op::{OutputKind, input_types};
use crate::{Graph, IrError, Op, Phase, Stage, TensorKind};

/// Checks that
/// - names of tensors and of nodes are unique, and ids are in range;
/// - a tensor is written before it is read, and by one node unless it is an accumulator; inputs and
///   parameters are not written;
/// - every node's inputs and outputs have the types inferred by the op;
/// - a GEMM of quantized matrices states the format of each operand correctly;
/// - phases are in order, and only forward nodes have recompute marks;
/// - the loss tensor has kind loss; a gradient belongs to a parameter and has its shape;
/// - after differentiation, every parameter that a node reads has a gradient, if the graph has any
///   backward node.
///
/// # Errors
/// [`IrError::Invalid`] or [`IrError::Operands`] naming the first offender.
pub fn verify(graph: &Graph) -> Result<(), IrError> {
    let invalid =
        |what: String| IrError::Invalid { graph: graph.name.clone(), stage: graph.stage, what };
    let mut names = HashSet::with_capacity(graph.tensors.len());
    for tensor in &graph.tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(invalid(format!("two tensors are named `{}`", tensor.name)));
        }
        if let TensorKind::ParameterGradient { parameter } = tensor.kind {
            let of = graph
                .tensors
                .get(parameter.index())
                .ok_or_else(|| invalid(format!("`{}` is a gradient of nothing", tensor.name)))?;
            if !matches!(of.kind, TensorKind::Parameter { .. }) {
                return Err(invalid(format!(
                    "`{}` is a gradient of `{}`, which is no parameter",
                    tensor.name, of.name
                )));
            }
            if of.shape != tensor.shape {
                return Err(invalid(format!(
                    "gradient `{}` is {}, its parameter {}",
                    tensor.name, tensor.shape, of.shape
                )));
            }
        }
    }
    if let Some(id) = graph.loss {
        let Some(loss) = graph.tensors.get(id.index()) else {
            return Err(invalid(format!("the loss is tensor {}, which is not there", id.0)));
        };
        if loss.kind != TensorKind::Loss {
            return Err(invalid(format!("the loss is `{}`, which is no loss", loss.name)));
        }
    }
    let mut node_names = HashSet::with_capacity(graph.nodes.len());
    let mut written = vec![false; graph.tensors.len()];
    let mut phase = Phase::Weights;
    for node in &graph.nodes {
        if !node_names.insert(node.name.as_str()) {
            return Err(invalid(format!("two nodes are named `{}`", node.name)));
        }
        if node.phase < phase {
            return Err(invalid(format!(
                "node `{}` of phase {} stands after phase {phase}",
                node.name, node.phase
            )));
        }
        phase = node.phase;
        if node.recompute && node.phase != Phase::Forward {
            return Err(invalid(format!("node `{}` is recomputed, not forward", node.name)));
        }
        for id in node.inputs.iter().chain(&node.outputs) {
            if id.index() >= graph.tensors.len() {
                return Err(invalid(format!("node `{}` names tensor {}", node.name, id.0)));
            }
        }
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            let given =
                matches!(tensor.kind, TensorKind::Input { .. } | TensorKind::Parameter { .. });
            if !given && !written[id.index()] {
                return Err(invalid(format!(
                    "node `{}` reads `{}` before it is written",
                    node.name, tensor.name
                )));
            }
        }
        verify_outputs(graph, node, &mut written)?;
    }
    verify_specs(graph).map_err(&invalid)?;
    verify_gradients(graph).map_err(invalid)
}

/// Checks the operand formats of quantized GEMMs. A kernel may use one scale for 128 elements where
/// the format says that four stored scales are equal, so a wrong format would give wrong scales.
fn verify_specs(graph: &Graph) -> Result<(), String> {
    let mut specs = HashMap::new();
    for node in &graph.nodes {
        match &node.op {
            Op::Quantize(quantize) => {
                specs.extend(node.outputs.iter().map(|&id| (id, quantize.format)));
            }
            Op::QuantizeOperands(op) => {
                let outputs = node.outputs.chunks(op.outputs_of_operand());
                for (outputs, quantize) in outputs.zip(op.operands()) {
                    specs.extend(outputs.iter().map(|&id| (id, quantize.format)));
                }
            }
            Op::Fused(fused) => {
                for step in fused.quantizations() {
                    let outputs = &node.outputs[step.positions];
                    specs.extend(outputs.iter().map(|&id| (id, step.quantize.format)));
                }
            }
            _ => {}
        }
        if let Op::StochasticRound(op) = &node.op {
            specs.extend(node.outputs.iter().map(|&id| (id, op.format)));
        }
        let said = match node.op.leading() {
            Op::ScaledGemm(gemm) => [(0, gemm.a), (gemm.b_input(), gemm.b)],
            Op::ScaledGroupedGemm(gemm) => [(0, gemm.a), (gemm.b_input(), gemm.b)],
            _ => continue,
        };
        for (index, said) in said {
            let id = node.inputs[index];
            if let Some(spec) = specs.get(&id).filter(|&&spec| spec != said) {
                return Err(format!(
                    "node `{}` reads `{}` as {said}, it was quantized as {spec}",
                    node.name,
                    graph.tensor(id).name
                ));
            }
        }
    }
    Ok(())
}

fn verify_outputs(graph: &Graph, node: &crate::Node, written: &mut [bool]) -> Result<(), IrError> {
    let invalid =
        |what: String| IrError::Invalid { graph: graph.name.clone(), stage: graph.stage, what };
    let types = node
        .op
        .rule()
        .infer(&input_types(graph, &node.inputs))
        .map_err(|source| IrError::Operands { node: node.name.clone(), source })?;
    if types.len() != node.outputs.len() {
        return Err(invalid(format!(
            "node `{}` has {} outputs, its op gives {}",
            node.name,
            node.outputs.len(),
            types.len()
        )));
    }
    for (&id, output) in node.outputs.iter().zip(&types) {
        let tensor = graph.tensor(id);
        if matches!(tensor.kind, TensorKind::Input { .. } | TensorKind::Parameter { .. }) {
            return Err(invalid(format!(
                "node `{}` writes `{}`, which is given",
                node.name, tensor.name
            )));
        }
        if tensor.shape != output.shape || tensor.dtype != output.dtype {
            return Err(invalid(format!(
                "node `{}` gives {} {}, but `{}` is {} {}",
                node.name, output.shape, output.dtype, tensor.name, tensor.shape, tensor.dtype
            )));
        }
        if tensor.kind.is_accumulator() != (output.kind == OutputKind::Accumulator) {
            return Err(invalid(format!(
                "node `{}`: `{}` must{} be an accumulator",
                node.name,
                tensor.name,
                if tensor.kind.is_accumulator() { " not" } else { "" }
            )));
        }
        if written[id.index()] && !tensor.kind.is_accumulator() {
            return Err(invalid(format!("tensor `{}` is written twice", tensor.name)));
        }
        written[id.index()] = true;
    }
    Ok(())
}

fn verify_gradients(graph: &Graph) -> Result<(), String> {
    if graph.stage < Stage::Differentiated
        || !graph.nodes.iter().any(|node| node.phase == Phase::Backward)
    {
        return Ok(());
    }
    let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
    let [mut written, mut read] = [(); 2].map(|()| vec![false; graph.tensors.len()]);
    for node in &graph.nodes {
        node.outputs.iter().for_each(|id| written[id.index()] = true);
        node.inputs.iter().for_each(|id| read[id.index()] = true);
    }
    for (id, parameter) in graph.parameters().filter(|(id, _)| read[id.index()]) {
        match gradients.get(&id) {
            Some(gradient) if written[gradient.index()] => {}
            _ => return Err(format!("parameter `{}` has no gradient", parameter.name)),
        }
    }
    Ok(())
}
