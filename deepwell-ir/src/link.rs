//! What belongs together, by id: a tensor that holds something of another one says of which.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use crate::TensorId;
use crate::ops::Axis;
use crate::storage::Plane;

/// A tensor and what of it another one holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link {
    /// The other tensor, in the graph that the program was lowered from too.
    pub of: TensorId,
    /// What is held of it.
    pub part: Part,
}

/// What one tensor holds of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Its numbers in another storage type.
    Cast,
    /// One plane of a quantization of it.
    Plane {
        /// Which of its quantizations, counted from 0 in the order of use.
        quantization: u32,
        /// Along which axis, [`Axis::Row`] or [`Axis::Column`]; [`Axis::Both`] for the counters of
        /// a quantization along both.
        axis: Axis,
        /// Which plane.
        plane: Plane,
        /// How it is quantized.
        format: QuantFormat,
    },
    /// Its numbers as a quantization holds them, in high precision again.
    Dequantized {
        /// Along which axis it was quantized.
        axis: Axis,
    },
    /// Its numbers, computed once more in the backward.
    Recomputed,
}

impl Link {
    /// The plane of a quantization, for a link to one.
    pub fn plane(&self) -> Option<Plane> {
        match self.part {
            Part::Plane { plane, .. } => Some(plane),
            _ => None,
        }
    }
}
