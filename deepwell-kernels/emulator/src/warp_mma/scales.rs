//! Block scales of `mma.sync`.

use super::Row;
use crate::decode::Type;
use crate::error::Fault;
use crate::number::Format;

/// Selects the lanes and bytes of a warp's scale registers: `{byte-id, thread-id}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleSelector {
    /// First byte of the register.
    pub byte: u32,
    /// For A, the pair of lanes within four (0, 1). For B, the lane within four.
    pub thread: u32,
}

/// Scale qualifiers of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmaScales {
    /// Scales along K: 1, 2 or 4 (`.scale_vec`).
    pub vector: u32,
    /// [`Type::Ue8m0`] or [`Type::Ue4m3`].
    pub scale_type: Type,
}

/// Scale registers of a warp, and the selected bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpScales {
    /// Scales of A.
    pub a: Row,
    /// Selector of A.
    pub a_selector: ScaleSelector,
    /// Scales of B.
    pub b: Row,
    /// Selector of B.
    pub b_selector: ScaleSelector,
}

impl MmaScales {
    /// Format of the scales.
    pub(super) fn format(self) -> Format {
        if self.scale_type == Type::Ue4m3 { Format::UE4M3 } else { Format::UE8M0 }
    }

    /// Returns the scales of A as `[16, vector]`. The even lane of the pair holds those of row
    /// `group`, the odd lane those of row `group + 8`.
    pub(super) fn of_a(self, scales: &WarpScales) -> Result<Vec<u8>, Fault> {
        self.check("a", scales.a_selector, 2)?;
        let lane = |row: usize| 4 * (row % 8) + 2 * scales.a_selector.thread as usize + row / 8;
        Ok((0..16).flat_map(|row| self.bytes(scales.a[lane(row)], scales.a_selector)).collect())
    }

    /// Returns the scales of B as `[8, vector]`.
    pub(super) fn of_b(self, scales: &WarpScales) -> Result<Vec<u8>, Fault> {
        self.check("b", scales.b_selector, 4)?;
        let lane = |column: usize| 4 * column + scales.b_selector.thread as usize;
        Ok((0..8)
            .flat_map(|column| self.bytes(scales.b[lane(column)], scales.b_selector))
            .collect())
    }

    fn bytes(self, word: u32, selector: ScaleSelector) -> impl Iterator<Item = u8> {
        (0..self.vector).map(move |i| (word >> (8 * (selector.byte + i))) as u8)
    }

    /// Checks a selector.
    fn check(self, name: &str, selector: ScaleSelector, threads: u32) -> Result<(), Fault> {
        let step = self.vector;
        if selector.byte >= 4 || !selector.byte.is_multiple_of(step) {
            return Err(Fault::new(
                "mma-scale-byte-id",
                format!(
                    "`byte-id-{name}` with {step} scales along K must be a multiple of {step} \
                     below 4, got {}",
                    selector.byte
                ),
            ));
        }
        if selector.thread >= threads {
            return Err(Fault::new(
                "mma-scale-thread-id",
                format!("`thread-id-{name}` must be below {threads}, got {}", selector.thread),
            ));
        }
        Ok(())
    }
}
