//! Links between tensors, by id: a tensor derived from another tensor names its source.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use crate::TensorId;
use crate::ops::Axis;
use crate::storage::Plane;

/// The source of a derived tensor, and how the tensor was derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link {
    /// The source tensor. A program also uses ids of the graph that the program was lowered from.
    pub of: TensorId,
    /// How the tensor was derived.
    #[serde(rename = "part")]
    pub derivation: Derivation,
}

/// How a tensor is derived from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Derivation {
    /// Same values in another storage type.
    Cast,
    /// One plane of a quantization.
    Plane {
        /// Index among the quantizations of the source tensor, in order of use.
        quantization: u32,
        /// Quantization axis, [`Axis::Row`] or [`Axis::Column`]; [`Axis::Both`] for the counters of
        /// a quantization along both axes.
        axis: Axis,
        /// Which plane.
        plane: Plane,
        /// Quantization format.
        format: QuantFormat,
    },
    /// Quantized values, dequantized to high precision.
    Dequantized {
        /// Axis along which the tensor was quantized.
        axis: Axis,
    },
    /// Same values, recomputed during backward.
    Recomputed,
}

impl Link {
    /// Plane of the quantization, if the link names one.
    pub fn plane(&self) -> Option<Plane> {
        match self.derivation {
            Derivation::Plane { plane, .. } => Some(plane),
            _ => None,
        }
    }
}
