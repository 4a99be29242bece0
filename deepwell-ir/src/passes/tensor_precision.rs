//! What a precision policy came to for each parameter.

use deepwell_precision::{Assignment, Direction, Format, GemmPrecision};
use serde::{Deserialize, Serialize};

use crate::GemmKind;

/// What one parameter got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorPrecision {
    /// Name of the parameter.
    pub tensor: String,
    /// The format of its GEMMs; quantized where any operand of them is.
    pub format: Format,
    /// How fprop, dgrad and wgrad are computed, where that is not all in `format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemms: Option<[GemmPrecision; 3]>,
    /// The format that the policy asks for and the target does not serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Format>,
    /// Which rule said so.
    pub reason: String,
}

impl TensorPrecision {
    pub(super) fn new(tensor: &str, assignment: &Assignment) -> TensorPrecision {
        let gemms = GemmKind::ALL.map(|kind| assignment.gemm(kind.direction()));
        let differs = assignment.format.is_quantized() && gemms != [GemmPrecision::SCALED; 3];
        TensorPrecision {
            tensor: tensor.to_string(),
            format: assignment.format,
            gemms: differs.then_some(gemms),
            asked: None,
            reason: assignment.reason.clone(),
        }
    }

    /// How one of its GEMMs is computed.
    pub fn gemm(&self, kind: GemmKind) -> GemmPrecision {
        match (self.gemms, self.format) {
            (Some(gemms), _) => gemms[kind as usize],
            (None, Format::Quantized(_)) => GemmPrecision::SCALED,
            (None, _) => GemmPrecision::PLAIN,
        }
    }

    /// The reason, and after it those GEMMs that are not computed in `format`.
    pub fn explanation(&self) -> String {
        let mut parts = vec![self.reason.clone()];
        if let Some(gemms) = self.gemms {
            let directions = GemmKind::ALL.map(GemmKind::direction);
            let of_each = directions.into_iter().zip(gemms);
            let format = self.format.quantized().unwrap_or_default().title();
            parts.extend(
                of_each.filter_map(|(direction, gemm): (Direction, _)| {
                    gemm.describe(direction, &format)
                }),
            );
        }
        parts.join("; ")
    }
}
