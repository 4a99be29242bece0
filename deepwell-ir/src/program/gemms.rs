//! The weights of the GEMMs that read each value.

use std::collections::{BTreeSet, HashMap};

use super::{Call, ParameterState, Program, ValueId};
use crate::ops::CollectiveKind;
use crate::{GemmKind, NodeId, Op, TensorId};

impl Program {
    /// For each operand of a GEMM of a linear layer or of experts, the weights of the GEMMs that
    /// read it, as indices into [`Program::parameters`]: as it is, dequantized, or gathered from
    /// the slices of ranks. Fprop, dgrad and wgrad are GEMMs of the weight of their layer.
    pub fn weights_by_operand(&self) -> HashMap<ValueId, BTreeSet<usize>> {
        let weight_of = self.weights_by_source();
        let mut readers: HashMap<ValueId, BTreeSet<usize>> = HashMap::new();
        for call in &self.calls {
            let Some(&weight) = weight_of.get(&call.source) else { continue };
            let operands = gemm_operands(&call.op).map_or(0, |(_, operands)| operands);
            for operand in call.inputs().iter().take(operands) {
                readers.entry(operand.value).or_default().insert(weight);
            }
        }
        // A chain of moves may stand in any order: weights are made for the next step.
        let mut grows = true;
        while grows {
            grows = false;
            for (from, to) in self.calls.iter().rev().flat_map(moves) {
                let Some(of_copy) = readers.get(&to).cloned() else { continue };
                let of_source = readers.entry(from).or_default();
                let before = of_source.len();
                of_source.extend(of_copy);
                grows |= of_source.len() > before;
            }
        }
        readers
    }

    /// The weight of the GEMMs of each node of the captured graph, by the GEMMs that read it.
    fn weights_by_source(&self) -> HashMap<NodeId, usize> {
        let tensor_of = |id: ValueId| {
            let value = self.value(id);
            value.link.map(|link| link.of).or(value.tensor)
        };
        // A rank may have no master of its own in memory, but what is made of it.
        let by_name: HashMap<&str, TensorId> =
            self.unstored.iter().map(|unstored| (&*unstored.name, unstored.tensor)).collect();
        let of_parameter = |(index, state): (usize, &ParameterState)| {
            let tensor = tensor_of(state.master).or_else(|| by_name.get(&*state.name).copied());
            Some((tensor?, index))
        };
        let parameters: HashMap<TensorId, usize> =
            self.parameters.iter().enumerate().filter_map(of_parameter).collect();
        let weight = |call: &Call| -> Option<usize> {
            let (of_weight, _) = gemm_operands(&call.op)?;
            parameters.get(&tensor_of(call.inputs().get(of_weight?)?.value)?).copied()
        };
        self.calls.iter().filter_map(|call| Some((call.source, weight(call)?))).collect()
    }
}

/// Of a GEMM, which input its weight begins at, which is none of wgrad, and how many inputs its two
/// operands are.
fn gemm_operands(op: &Op) -> Option<(Option<usize>, usize)> {
    match op.leading() {
        Op::ScaledGemm(op) => {
            Some(((op.kind != GemmKind::Wgrad).then(|| op.b_input()), op.plane_inputs()))
        }
        Op::ScaledGroupedGemm(op) => {
            Some(((op.kind != GemmKind::Wgrad).then(|| op.b_input()), op.plane_inputs()))
        }
        Op::Linear(_)
        | Op::LinearInputGrad(_)
        | Op::GroupedGemm(_)
        | Op::GroupedGemmInputGrad(_) => Some((Some(1), 2)),
        Op::LinearWeightGrad(_) | Op::GroupedGemmWeightGrad(_) => Some((None, 2)),
        _ => None,
    }
}

/// What a call hands on without computing: each input that an output holds.
fn moves(call: &Call) -> Vec<(ValueId, ValueId)> {
    let pairs = call.inputs().iter().zip(call.outputs());
    match &call.op {
        Op::Dequantize(_) => {
            let Some(made) = call.outputs().first() else { return Vec::new() };
            call.inputs().iter().map(|plane| (plane.value, made.value)).collect()
        }
        Op::JoinParts(_) => pairs.map(|(from, to)| (from.value, to.value)).collect(),
        Op::Collective(op) if op.kind == CollectiveKind::AllGather && op.each => {
            pairs.map(|(from, to)| (from.value, to.value)).collect()
        }
        _ => Vec::new(),
    }
}
