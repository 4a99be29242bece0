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
    DType, KernelRequest, Node, Op, OperandType, Phase, ProcessGroup, Rejected, TensorId,
};

use super::Lowering;

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
    /// The copies of a parameter written with the update.
    pub(super) fn of(&self, parameter: usize) -> &[(CopyKind, Vec<TensorId>)] {
        self.of_parameter.get(&parameter).map_or(&[], Vec::as_slice)
    }
}

impl Lowering<'_> {
    /// Finds the copies to be written by the optimizer.
    pub(super) fn plan_update_copies(&mut self) {
        let graph = self.graph;
        let places: HashMap<TensorId, usize> =
            graph.parameters().enumerate().map(|(index, (id, _))| (id, index)).collect();
        let nodes = || graph.nodes.iter().filter(|node| node.phase == Phase::Weights);
        let readers: HashMap<TensorId, &str> =
            nodes().flat_map(|node| node.inputs.iter().map(|&id| (id, &*node.name))).collect();
        for node in nodes() {
            let Some(kind) = CopyKind::of(&node.op) else { continue };
            let Some(&parameter) = node.inputs.first().and_then(|id| places.get(id)) else {
                continue;
            };
            let reader = node.outputs.iter().find_map(|id| readers.get(id).copied());
            match self.why_apart(node, &kind, parameter, reader) {
                Ok(()) => {
                    let copies = self.update_copies.of_parameter.entry(parameter).or_default();
                    copies.push((kind, node.outputs.clone()));
                }
                Err(rejected) => {
                    let first = node.outputs.first().map(|&id| (id, rejected));
                    self.update_copies.apart.extend(first);
                }
            }
        }
    }

    /// Returns why the update of a parameter does not write this copy in addition to the copies
    /// chosen so far. The list is empty if the fused update would take as long.
    fn why_apart(
        &self,
        node: &Node,
        kind: &CopyKind,
        parameter: usize,
        reader: Option<&str>,
    ) -> Result<(), Vec<Rejected>> {
        let known = self.update_copies.of(parameter).iter().map(|(kind, _)| kind);
        let known: Vec<CopyKind> = known.cloned().collect();
        let before_s = self.update_s(node, &known);
        let together_s = self.update_s(node, &[known, vec![kind.clone()]].concat());
        if let (Ok(before_s), Ok(together_s)) = (before_s, &together_s) {
            let operands = self.types_of(node.inputs.iter().chain(&node.outputs));
            let request = KernelRequest { op: &node.op, operands: &operands, input_count: 1 };
            let copy_s = self.catalog.predicted_s(&request, self.target);
            let apart_s = copy_s.map_or(f64::INFINITY, |copy_s| before_s + copy_s);
            if *together_s >= apart_s * (1.0 - ROUNDING) {
                return Err(Vec::new());
            }
        }
        let groups = &self.target.ranks.groups;
        let is_split = groups.iter().any(|group| group.name != ProcessGroup::DATA);
        let state = self.parameters.get(parameter);
        let reason = if self.sharing().is_some() {
            "ranks have slices of the weights".to_string()
        } else if self.pipeline.is_some() || is_split {
            "ranks have parts of the model".to_string()
        } else if state.is_none_or(|it| it.gradient.is_none() || it.first_moment.is_none()) {
            "it does not update the weight".to_string()
        } else if let Some(reader) = reader {
            format!("`{reader}` reads the copy at once")
        } else {
            return together_s.map(|_| ());
        };
        Err(vec![Rejected { kernel: "adamw".to_string(), reason }])
    }

    fn types_of<'t>(&self, ids: impl Iterator<Item = &'t TensorId>) -> Vec<OperandType> {
        let tensors = ids.map(|&id| self.graph.tensor(id));
        tensors
            .map(|it| OperandType { dtype: it.dtype, shape: it.shape.bind(&self.binding) })
            .collect()
    }

    /// Predicts the time of an update of a node's parameter with copies, or returns why no kernel
    /// supports the copies.
    fn update_s(&self, node: &Node, kinds: &[CopyKind]) -> Result<f64, Vec<Rejected>> {
        let Some(weight) = self.types_of(node.inputs.iter()).into_iter().next() else {
            return Err(Vec::new());
        };
        let copies: Vec<WeightCopy> =
            kinds.iter().map(|kind| WeightCopy { parameter: 0, kind: kind.clone() }).collect();
        let coefficients = OperandType { dtype: DType::F32, shape: vec![AdamWCoefficients::COUNT] };
        let mut operands = vec![coefficients];
        operands.extend(vec![weight.clone(); AdamW::OPERANDS_PER_PARAMETER]);
        let input_count = operands.len();
        for copy in &copies {
            // Copies without a valid request have no kernel.
            operands.extend(copy.outputs_of(&weight).map_err(|_| Vec::new())?);
        }
        let op = Op::from(AdamW { parameters: 0..1, weight_decay: vec![0.0], copies });
        let request = KernelRequest { op: &op, operands: &operands, input_count };
        match self.catalog.predicted_s(&request, self.target) {
            Some(predicted_s) => Ok(predicted_s),
            None => Err(match self.catalog.select(&request, self.target) {
                Err(missing) => missing.rejected,
                Ok(_) => Vec::new(),
            }),
        }
    }

    /// Marks the weight-copy calls skipped by a step, and adds to the remaining calls why the
    /// optimizer does not write their outputs.
    pub(super) fn leave_out_copies(&mut self) {
        let made = self.update_copies.of_parameter.values().flatten();
        let made: HashSet<TensorId> =
            made.filter_map(|(_, outputs)| outputs.first().copied()).collect();
        for call in self.calls.iter_mut().filter(|call| call.phase == Phase::Weights) {
            let Some(output) = call.outputs().first() else { continue };
            let Some(tensor) = self.values[output.value.index()].tensor else { continue };
            call.alone_only = made.contains(&tensor);
            call.rejected.extend(self.update_copies.apart.remove(&tensor).unwrap_or_default());
        }
    }
}
