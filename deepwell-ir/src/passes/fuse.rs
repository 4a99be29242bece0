//! Merges neighbouring ops that read the same memory.

use super::predict::Predict;
use super::quantize_operands::merge_quantizations;
use super::stored_inputs::read_stored_inputs;
use crate::ops::{Epilogue, Fused};
use crate::{Graph, IrError, Node, Op, Stage, TensorId, ops};

/// Maximum number of epilogue steps. A GEMM's bias, activation, residual and quantization along two
/// axes are fewer steps.
const MAX_STEPS: usize = 6;

/// Relative rounding tolerance between sums of the same times in different order.
const ROUNDING: f64 = 1e-12;

/// Fuses neighbouring nodes:
/// 1. Quantizations of a tensor along rows and along columns, in two formats, become one
///    [`ops::QuantizeOperands`] if `predict` returns a shorter time.
/// 2. Dequantizations of stored activations become part of the activation functions that read them,
///    if `predict` returns a shorter time.
/// 3. A residual add directly followed by a norm of the sum becomes one op, which reads each
///    operand once instead of twice, unless fusing the add into the node before it is faster.
/// 4. An add of two gradients of permuted rows, directly followed by an unpermute, becomes one op
///    if no other node reads the sum and a kernel exists.
/// 5. An op and the activations, sums and quantizations of its results directly after it become one
///    [`Fused`] op if `predict` returns a shorter time. Results that other nodes read remain
///    outputs.
///
/// Step 5 finds a grouping of minimal total time, in time linear in the number of nodes.
///
/// # Errors
/// A graph that is not at [`Stage::Quantized`].
pub fn fuse(graph: &Graph, predict: Predict<'_>) -> Result<Graph, IrError> {
    if graph.stage != Stage::Quantized {
        return Err(IrError::Stage { pass: "fuse", wants: Stage::Quantized, got: graph.stage });
    }
    let graph = &read_stored_inputs(&merge_quantizations(graph, predict), predict);
    let mut result = Graph { stage: Stage::Fused, nodes: Vec::new(), ..graph.clone() };
    let cuts = Cuts::new(graph, predict);
    let mut at = 0;
    while at < graph.nodes.len() {
        let fused = match &graph.nodes[at..] {
            [node, next, ..] => add_and_norm(node, next)
                .filter(|fused| !cuts.is_better_with_what_is_before(at, fused))
                .or_else(|| cuts.add_and_unpermute(node, next)),
            _ => None,
        };
        at += if fused.is_some() { 2 } else { 1 };
        result.nodes.push(fused.unwrap_or_else(|| graph.nodes[at - 1].clone()));
    }
    result.nodes = Cuts::new(&result, predict).nodes();
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

/// Search for the fastest grouping of a list of nodes.
struct Cuts<'a> {
    graph: &'a Graph,
    predict: Predict<'a>,
    /// Number of operands that refer to each tensor.
    readers: Vec<usize>,
}

impl<'a> Cuts<'a> {
    fn new(graph: &'a Graph, predict: Predict<'a>) -> Cuts<'a> {
        let mut readers = vec![0usize; graph.tensors.len()];
        for id in graph.nodes.iter().flat_map(|node| &node.inputs) {
            readers[id.index()] += 1;
        }
        Cuts { graph, predict, readers }
    }

    /// Whether fusing the add at node `at` into the node before it, with the norm and its
    /// quantizations separate, is faster than `fused`, which combines add and norm.
    fn is_better_with_what_is_before(&self, at: usize, fused: &Node) -> bool {
        let Some(first) = at.checked_sub(1) else { return false };
        let nodes = &self.graph.nodes;
        if steps_behind(&nodes[first..at + 1]) == 0 {
            return false;
        }
        let behind = &nodes[at + 2..];
        let mut count = 0;
        while behind.get(count).is_some_and(|node| matches!(node.op, Op::Quantize(_))) {
            count += 1;
        }
        let apart = &nodes[first..at + 2 + count];
        let together: Vec<Node> =
            [&nodes[first], fused].into_iter().chain(&behind[..count]).cloned().collect();
        self.least_time(apart) < self.least_time(&together) * (1.0 - ROUNDING)
    }

    /// Minimal time over all groupings of a few nodes.
    fn least_time(&self, nodes: &[Node]) -> f64 {
        let mut time_from = vec![0.0; nodes.len() + 1];
        for core in (0..nodes.len()).rev() {
            let steps = steps_behind(&nodes[core..]);
            let times = (0..=steps).map(|count| {
                let time = match count {
                    0 => self.time(&nodes[core]),
                    _ => self.time(&self.merge(&nodes[core..core + 1 + count])),
                };
                time + time_from[core + 1 + count]
            });
            time_from[core] = times.fold(f64::INFINITY, f64::min);
        }
        time_from[0]
    }

    /// Fuses an add and an unpermute if only the unpermute reads the sum.
    fn add_and_unpermute(&self, add: &Node, unpermute: &Node) -> Option<Node> {
        let (Op::Add(_), Op::Unpermute(_)) = (&add.op, &unpermute.op) else { return None };
        let sum = add.outputs[0];
        let (maps, is_read_here) = (&unpermute.inputs[1..], unpermute.inputs[0] == sum);
        if !is_read_here || self.readers[sum.index()] != 1 || unpermute.phase != add.phase {
            return None;
        }
        let node = Node {
            op: ops::AddUnpermute {}.into(),
            inputs: add.inputs.iter().chain(maps).copied().collect(),
            ..unpermute.clone()
        };
        self.time(&node).is_finite().then_some(node)
    }

    /// Fastest grouping by dynamic programming, from the last node to the first.
    fn nodes(&self) -> Vec<Node> {
        let nodes = &self.graph.nodes;
        let reach: Vec<usize> = (0..nodes.len()).map(|core| steps_behind(&nodes[core..])).collect();
        // Predict times only for nodes that could be fused.
        let mut touched = vec![false; nodes.len()];
        for (core, &steps) in reach.iter().enumerate().filter(|(_, steps)| **steps > 0) {
            touched[core..=core + steps].fill(true);
        }
        let mut time_from = vec![0.0; nodes.len() + 1];
        let mut chosen: Vec<Option<Node>> = vec![None; nodes.len()];
        let mut length = vec![1; nodes.len()];
        for core in (0..nodes.len()).rev() {
            if !touched[core] {
                time_from[core] = time_from[core + 1];
                continue;
            }
            time_from[core] = self.time(&nodes[core]) + time_from[core + 1];
            // Among equally fast groupings, prefer fewer fusions.
            for count in 1..=reach[core] {
                let fused = self.merge(&nodes[core..core + 1 + count]);
                let time = self.time(&fused) + time_from[core + 1 + count];
                if time < time_from[core] * (1.0 - ROUNDING) {
                    (time_from[core], chosen[core], length[core]) = (time, Some(fused), 1 + count);
                }
            }
        }
        let mut merged = Vec::with_capacity(nodes.len());
        let mut next = 0;
        while next < nodes.len() {
            merged.push(chosen[next].take().unwrap_or_else(|| nodes[next].clone()));
            next += length[next];
        }
        merged
    }

    /// Predicted time; infinite without a kernel or if the fusion is invalid.
    fn time(&self, node: &Node) -> f64 {
        let types = |ids: &[TensorId]| crate::op::input_types(self.graph, ids);
        let (inputs, outputs) = (types(&node.inputs), types(&node.outputs));
        let is_op = node.op.epilogue().is_empty() || node.op.rule().infer(&inputs).is_ok();
        let time = is_op.then(|| (self.predict)(&node.op, &inputs, &outputs)).flatten();
        time.unwrap_or(f64::INFINITY)
    }

    /// Fuses a core and the steps after it into one node.
    fn merge(&self, nodes: &[Node]) -> Node {
        let (core, steps) = nodes.split_first().expect("a core");
        let mut results = core.outputs.clone();
        let mut inputs = core.inputs.clone();
        let mut epilogue = Vec::with_capacity(steps.len());
        let mut read_here: Vec<TensorId> = Vec::new();
        for node in steps {
            let Some((step, step_inputs)) = step_of(node, &results) else { continue };
            read_here.extend(&results[step.reads()]);
            inputs.extend(step_inputs);
            results.extend(&node.outputs);
            epilogue.push(step);
        }
        let is_skipped = |id: &TensorId| {
            let here = read_here.iter().filter(|read| *read == id).count();
            here > 0 && self.readers[id.index()] == here
        };
        let skipped: Vec<usize> =
            (0..results.len()).filter(|&result| is_skipped(&results[result])).collect();
        let outputs = results.iter().filter(|id| !is_skipped(id)).copied().collect();
        let op = Fused { core: Box::new(core.op.clone()), epilogue, skipped };
        Node { op: op.into(), inputs, outputs, ..core.clone() }
    }
}

/// Number of nodes after the first that can be steps of its epilogue.
fn steps_behind(nodes: &[Node]) -> usize {
    let Some((first, behind)) = nodes.split_first() else { return 0 };
    // Collectives are not kernels with an epilogue.
    let is_exchange = matches!(first.op, Op::Collective(_));
    if is_exchange || first.outputs.len() != first.op.rule().result_count() {
        return 0;
    }
    let mut results = first.outputs.clone();
    let of_phase = behind.iter().take(MAX_STEPS).take_while(|node| node.phase == first.phase);
    let mut count = 0;
    for node in of_phase {
        if step_of(node, &results).is_none() {
            break;
        }
        results.extend(&node.outputs);
        count += 1;
    }
    count
}

/// The epilogue step equivalent to a node after an op with these results, and the step's additional
/// inputs. The results read must be the first inputs (for a sum also the second), and no other
/// inputs may be results.
fn step_of(node: &Node, results: &[TensorId]) -> Option<(Epilogue, Vec<TensorId>)> {
    let mut inputs = node.inputs.clone();
    if matches!(node.op, Op::Add(_)) && !results.contains(inputs.first()?) {
        inputs.reverse();
    }
    let of = results.iter().position(|id| Some(id) == inputs.first())?;
    let step = Epilogue::of_op(&node.op, of)?;
    let own = inputs.split_off(step.reads().len().min(inputs.len()));
    let reads_them = results.get(step.reads()) == Some(&inputs[..]);
    (reads_them && !own.iter().any(|id| results.contains(id))).then_some((step, own))
}
