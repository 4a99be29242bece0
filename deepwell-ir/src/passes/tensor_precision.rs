//! What a precision policy came to for each parameter.

use deepwell_precision::{Assignment, Direction, Format, GemmPrecision};
use serde::{Deserialize, Serialize};

use crate::Product;

/// What one parameter got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorPrecision {
    /// Name of the parameter.
    pub tensor: String,
    /// The format of its GEMMs; [`Format::Mxfp8`] where any operand of them is quantized.
    pub format: Format,
    /// How fprop, dgrad and wgrad are computed, where that is not all in `format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemms: Option<[GemmPrecision; 3]>,
    /// Which rule said so.
    pub reason: String,
}

impl TensorPrecision {
    pub(super) fn new(tensor: &str, assignment: &Assignment) -> TensorPrecision {
        let gemms = Product::ALL.map(|product| assignment.gemm(product.direction()));
        let differs = assignment.format == Format::Mxfp8 && gemms != [GemmPrecision::MXFP8; 3];
        TensorPrecision {
            tensor: tensor.to_string(),
            format: assignment.format,
            gemms: differs.then_some(gemms),
            reason: assignment.reason.clone(),
        }
    }

    /// How one of its GEMMs is computed.
    pub fn gemm(&self, product: Product) -> GemmPrecision {
        match (self.gemms, self.format) {
            (Some(gemms), _) => gemms[product as usize],
            (None, Format::Mxfp8) => GemmPrecision::MXFP8,
            (None, _) => GemmPrecision::PLAIN,
        }
    }

    /// The reason, and after it those GEMMs that are not computed in `format`.
    pub fn explanation(&self) -> String {
        let mut parts = vec![self.reason.clone()];
        if let Some(gemms) = self.gemms {
            let directions = Product::ALL.map(Product::direction);
            let of_each = directions.into_iter().zip(gemms);
            parts.extend(
                of_each.filter_map(|(direction, gemm): (Direction, _)| gemm.describe(direction)),
            );
        }
        parts.join("; ")
    }
}
