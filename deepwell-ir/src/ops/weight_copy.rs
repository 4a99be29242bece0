//! Compute copies that an optimizer writes in addition to the weights.

use serde::{Deserialize, Serialize};

use super::{Cast, Quantize};
use crate::op::{OpRule, TensorType};
use crate::{Op, OpError, OperandType};

/// Conversion of a master weight to a compute copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyKind {
    /// Another storage type.
    Cast(Cast),
    /// Data and scales, and the counters of the quantization.
    Quantize(Quantize),
}

impl CopyKind {
    /// The conversion that an op performs, if any.
    pub fn of(op: &Op) -> Option<CopyKind> {
        match op {
            Op::Cast(cast) => Some(CopyKind::Cast(cast.clone())),
            Op::Quantize(quantize) => Some(CopyKind::Quantize(quantize.clone())),
            _ => None,
        }
    }

    /// The op that performs the conversion.
    pub fn to_op(&self) -> Op {
        match self {
            CopyKind::Cast(cast) => cast.clone().into(),
            CopyKind::Quantize(quantize) => quantize.clone().into(),
        }
    }

    /// Number of tensors of a copy: one for a cast, see [`Quantize`] otherwise.
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

/// A compute copy written by an optimizer update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightCopy {
    /// Index of the parameter in the order of the update's operands, from 0.
    pub parameter: usize,
    /// The conversion.
    pub kind: CopyKind,
}

impl WeightCopy {
    /// Types of the copy's tensors for a weight.
    ///
    /// # Errors
    /// A weight that cannot be converted.
    pub fn outputs_of(&self, weight: &OperandType) -> Result<Vec<OperandType>, OpError> {
        self.kind.to_op().outputs_of(std::slice::from_ref(weight))
    }

    pub(super) fn infer(&self, weight: &TensorType) -> Result<Vec<crate::op::OutputType>, OpError> {
        self.kind.rule().infer(std::slice::from_ref(weight))
    }
}
