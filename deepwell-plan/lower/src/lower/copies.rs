//! Compute copies of weights written by AdamW: a pass over the weight copies, run before the
//! optimizer's calls are made.
//!
//! A separate copy reads the master weight again, four bytes per parameter, although AdamW has the
//! weight in registers. So AdamW writes a copy if a kernel supports the copy and is predicted to
//! take less time than both calls. The separate calls stay in the program for weights loaded from a
//! checkpoint; a step skips them. Bits are the same.

use std::collections::{HashMap, HashSet};

use deepwell_ir::ops::{AdamW, AdamWCoefficients, CopyKind, WeightCopy};
use deepwell_ir::{
    DType, KernelRequest, Node, Op, OperandType, ParameterState, Phase, ProcessGroup, Rejected,
    TensorId,
};

use super::builder::ProgramBuilder;
use super::parameters::Parameters;
use super::rank::RankContext;

/// Relative difference of predicted times that may be due to the order of summation.
const ROUNDING: f64 = 1e-12;

/// The weight copies written by the optimizer.
#[derive(Default)]
pub(super) struct UpdateCopies {
    /// For each parameter, by index: the kinds of copies, and the tensors of each copy.
    of_parameter: HashMap<usize, Vec<(CopyKind, Vec<TensorId>)>>,
    /// Why the remaining copies have separate calls, by the first tensor of each copy.
    apart: HashMap<TensorId, Vec<Rejected>>,
}

impl UpdateCopies {
    /// Finds the copies to be written by the optimizer.
    pub(super) fn plan(rank: &RankContext<'_>, parameters: &Parameters) -> UpdateCopies {
        let graph = rank.graph;
        let places: HashMap<TensorId, usize> =
            graph.parameters().enumerate().map(|(index, (id, _))| (id, index)).collect();
        let nodes = || graph.nodes.iter().filter(|node| node.phase == Phase::Weights);
        let readers: HashMap<TensorId, &str> =
            nodes().flat_map(|node| node.inputs.iter().map(|&id| (id, &*node.name))).collect();
        let mut planned = UpdateCopies::default();
        for node in nodes() {
            let Some(kind) = CopyKind::of(&node.op) else { continue };
            let Some(&parameter) = node.inputs.first().and_then(|id| places.get(id)) else {
                continue;
            };
            let reader = node.outputs.iter().find_map(|id| readers.get(id).copied());
            let copy = Copy { node, kind, reader, state: parameters.states.get(parameter) };
            let known = planned.of(parameter).iter().map(|(kind, _)| kind.clone()).collect();
            match copy.why_apart(rank, known) {
                Ok(()) => {
                    let copies = planned.of_parameter.entry(parameter).or_default();
                    copies.push((copy.kind, node.outputs.clone()));
                }
                Err(rejected) => {
                    planned.apart.extend(node.outputs.first().map(|&id| (id, rejected)));
                }
            }
        }
        planned
    }

    /// The copies of a parameter written with the update.
    pub(super) fn of(&self, parameter: usize) -> &[(CopyKind, Vec<TensorId>)] {
        self.of_parameter.get(&parameter).map_or(&[], Vec::as_slice)
    }

    /// Marks the weight-copy calls skipped by a step, and adds to the remaining calls why the
    /// optimizer does not write their outputs.
    pub(super) fn leave_out(mut self, build: &mut ProgramBuilder<'_>) {
        let made = self.of_parameter.values().flatten();
        let made: HashSet<TensorId> =
            made.filter_map(|(_, outputs)| outputs.first().copied()).collect();
        for call in build.calls.iter_mut().filter(|call| call.phase == Phase::Weights) {
            let Some(output) = call.outputs().first() else { continue };
            let Some(tensor) = build.values[output.value.index()].tensor else { continue };
            call.alone_only = made.contains(&tensor);
            call.rejected.extend(self.apart.remove(&tensor).unwrap_or_default());
        }
    }
}

/// A copy of a parameter.
struct Copy<'a> {
    /// The node that makes the copy.
    node: &'a Node,
    kind: CopyKind,
    /// A node of the weights' body that reads the copy.
    reader: Option<&'a str>,
    state: Option<&'a ParameterState>,
}

impl Copy<'_> {
    /// Returns why the update of the parameter does not write this copy in addition to the `known`
    /// copies. The list is empty if the fused update would take as long.
    fn why_apart(&self, rank: &RankContext<'_>, known: Vec<CopyKind>) -> Result<(), Vec<Rejected>> {
        let node = self.node;
        let before_s = update_s(rank, node, &known);
        let together_s = update_s(rank, node, &[known, vec![self.kind.clone()]].concat());
        // A separate copy would fetch the master from the host once more.
        let compares = !rank.plan.optimizer.on_host;
        if let (true, Ok(before_s), Ok(together_s)) = (compares, before_s, &together_s) {
            let operands = rank.types_of(node.inputs.iter().chain(&node.outputs));
            let request = KernelRequest { op: &node.op, operands: &operands, input_count: 1 };
            let copy_s = rank.catalog.predicted_s(&request, rank.target);
            let apart_s = copy_s.map_or(f64::INFINITY, |copy_s| before_s + copy_s);
            if *together_s >= apart_s * (1.0 - ROUNDING) {
                return Err(Vec::new());
            }
        }
        let groups = &rank.target.ranks.groups;
        let is_split = groups.iter().any(|group| group.name != ProcessGroup::DATA);
        let has_no_update =
            |it: &ParameterState| it.gradient.is_none() || it.first_moment.is_none();
        let reason = if rank.zero_group().is_some() {
            "ranks have slices of the weights".to_string()
        } else if rank.pipeline.is_some() || is_split {
            "ranks have parts of the model".to_string()
        } else if self.state.is_none_or(has_no_update) {
            "it does not update the weight".to_string()
        } else if let Some(reader) = self.reader {
            format!("`{reader}` reads the copy at once")
        } else {
            return together_s.map(|_| ());
        };
        Err(vec![Rejected { kernel: "adamw".to_string(), reason }])
    }
}

/// Predicts the time of an update of a node's parameter with copies, or returns why no kernel
/// supports the copies.
fn update_s(rank: &RankContext<'_>, node: &Node, kinds: &[CopyKind]) -> Result<f64, Vec<Rejected>> {
    let Some(weight) = rank.types_of(node.inputs.iter()).into_iter().next() else {
        return Err(Vec::new());
    };
    let copies: Vec<WeightCopy> =
        kinds.iter().map(|kind| WeightCopy { parameter: 0, kind: kind.clone() }).collect();
    let coefficients = OperandType { dtype: DType::F32, shape: vec![AdamWCoefficients::COUNT] };
    let moments = rank.plan.optimizer.moments;
    let (dtype, shape) = moments.stored(&weight.shape);
    let moment = OperandType { dtype, shape };
    let gradient = OperandType { dtype: DType::F32, shape: weight.shape.clone() };
    let mut operands = vec![coefficients, gradient, weight.clone(), moment.clone(), moment];
    let input_count = operands.len();
    for copy in &copies {
        // Copies without a valid request have no kernel.
        operands.extend(copy.outputs_of(&weight).map_err(|_| Vec::new())?);
    }
    let op = Op::from(AdamW { parameters: 0..1, weight_decay: vec![0.0], copies, moments });
    let request = KernelRequest { op: &op, operands: &operands, input_count };
    match rank.catalog.predicted_s(&request, rank.target) {
        Some(predicted_s) => Ok(predicted_s),
        None => Err(match rank.catalog.select(&request, rank.target) {
            Err(missing) => missing.rejected,
            Ok(_) => Vec::new(),
        }),
    }
}
