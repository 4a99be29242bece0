//! Result of a precision policy for each parameter.

use deepwell_precision::{Assignment, Format, GemmKind, GemmPrecision};
use serde::{Deserialize, Serialize};

/// The GEMMs of a linear layer, in the order of [`TensorPrecision::gemms`].
const KINDS: [GemmKind; 3] = [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad];

/// Precision of one parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorPrecision {
    /// Name of the parameter.
    pub tensor: String,
    /// Format of the GEMMs; quantized if any operand is quantized.
    pub format: Format,
    /// Precision of fprop, dgrad and wgrad, unless all three are computed in `format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemms: Option<[GemmPrecision; 3]>,
    /// Requested format, if the target does not support it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Format>,
    /// The deciding rule.
    pub reason: String,
}

impl TensorPrecision {
    pub(super) fn new(tensor: &str, assignment: &Assignment) -> TensorPrecision {
        let gemms = KINDS.map(|kind| assignment.gemm(kind));
        let differs = assignment.format.is_quantized() && gemms != [GemmPrecision::SCALED; 3];
        TensorPrecision {
            tensor: tensor.to_string(),
            format: assignment.format,
            gemms: differs.then_some(gemms),
            asked: None,
            reason: assignment.reason.clone(),
        }
    }

    /// Precision of one of the GEMMs.
    pub fn gemm(&self, kind: GemmKind) -> GemmPrecision {
        match (self.gemms, self.format) {
            (Some(gemms), _) => gemms[kind as usize],
            (None, Format::Quantized(_)) => GemmPrecision::SCALED,
            (None, _) => GemmPrecision::PLAIN,
        }
    }

    /// The reason, followed by the GEMMs not computed in `format`.
    pub fn explanation(&self) -> String {
        let mut parts = vec![self.reason.clone()];
        if let Some(gemms) = self.gemms {
            let by_kind = KINDS.into_iter().zip(gemms);
            let format = self.format.quantized().unwrap_or_default().title();
            parts.extend(by_kind.filter_map(|(kind, gemm)| gemm.describe(kind, &format)));
        }
        parts.join("; ")
    }
}
