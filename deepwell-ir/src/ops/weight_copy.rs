//! The compute copies of weights that an optimizer writes beside the weights.

use serde::{Deserialize, Serialize};

use super::{Cast, Quantize};
use crate::op::{OpRule, TensorType};
use crate::{Op, OpError, OperandType};

/// How a compute copy is made of a master weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyKind {
    /// Another storage type.
    Cast(Cast),
    /// Data and scales, and the counters of the quantization.
    Quantize(Quantize),
}

impl CopyKind {
    /// What an op makes of a weight, if that is a copy.
    pub fn of(op: &Op) -> Option<CopyKind> {
        match op {
            Op::Cast(cast) => Some(CopyKind::Cast(cast.clone())),
            Op::Quantize(quantize) => Some(CopyKind::Quantize(quantize.clone())),
            _ => None,
        }
    }

    /// The op that makes the copy by itself.
    pub fn to_op(&self) -> Op {
        match self {
            CopyKind::Cast(cast) => cast.clone().into(),
            CopyKind::Quantize(quantize) => quantize.clone().into(),
        }
    }

    /// Tensors that it is made of, see [`Quantize`]; one of a cast.
    pub fn output_count(&self) -> usize {
        match self {
            CopyKind::Cast(_) => 1,
            CopyKind::Quantize(quantize) => quantize.output_count(),
        }
    }

    pub(super) fn rule(&self) -> &dyn OpRule {
        match self {
            CopyKind::Cast(cast) => cast,
            CopyKind::Quantize(quantize) => quantize,
        }
    }
}

/// A compute copy that an update writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightCopy {
    /// Of which parameter, counted from 0 in the order of the update's operands.
    pub parameter: usize,
    /// How.
    pub kind: CopyKind,
}

impl WeightCopy {
    /// What the copy of a weight is stored as.
    ///
    /// # Errors
    /// A weight that cannot be copied so.
    pub fn outputs_of(&self, weight: &OperandType) -> Result<Vec<OperandType>, OpError> {
        self.kind.to_op().outputs_of(std::slice::from_ref(weight))
    }

    pub(super) fn infer(&self, weight: &TensorType) -> Result<Vec<crate::op::OutputType>, OpError> {
        self.kind.rule().infer(std::slice::from_ref(weight))
    }
}
