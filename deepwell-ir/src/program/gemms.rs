//! Weights of the GEMMs that read each value.

use std::collections::{BTreeSet, HashMap};

use super::{Call, ParameterState, Program, ValueId};
use crate::ops::CollectiveKind;
use crate::{GemmKind, NodeId, Op, TensorId};

impl Program {
    /// For each operand of a linear or expert GEMM, the weights of the reading GEMMs, as indices
    /// into [`Program::parameters`]. A GEMM may read the operand directly, dequantized, or
    /// all-gathered. Fprop, dgrad and wgrad count as GEMMs of their layer's weight.
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
        // Moves can be chained in any order, because weights are made for the next step.
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

    /// The weight of each captured linear node, taken from the GEMMs that read the weight.
    fn weights_by_source(&self) -> HashMap<NodeId, usize> {
        let tensor_of = |id: ValueId| {
            let value = self.value(id);
            value.link.map(|link| link.of).or(value.tensor)
        };
        // A rank may store only derived tensors and no master.
        let by_name: HashMap<&str, TensorId> =
            self.unstored.iter().map(|unstored| (&*unstored.name, unstored.tensor)).collect();
        let of_parameter = |(index, state): (usize, &ParameterState)| {
            let tensor =
                tensor_of(state.master.value()).or_else(|| by_name.get(&*state.name).copied());
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

/// For a GEMM, the input index of the weight (`None` for wgrad) and the number of inputs that form
/// the two operands.
fn gemm_operands(op: &Op) -> Option<(Option<usize>, usize)> {
    match op.leading() {
        Op::ScaledGemm(op) => {
            Some(((op.kind != GemmKind::Wgrad).then(|| op.b_input()), op.plane_inputs()))
        }
        Op::ScaledGroupedGemm(op) => {
            Some(((op.kind != GemmKind::Wgrad).then(|| op.b_input()), op.plane_inputs()))
        }
        Op::Linear(_) | Op::LinearDgrad(_) | Op::GroupedGemm(_) | Op::GroupedGemmDgrad(_) => {
            Some((Some(1), 2))
        }
        Op::LinearWgrad(_) | Op::GroupedGemmWgrad(_) => Some((None, 2)),
        _ => None,
    }
}

/// Copies without computation in a call: pairs of input and output.
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
