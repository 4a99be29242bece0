//! Instruction descriptors of MMAs: 32 bits with element types and shape.
//!
//! ```text
//! bit        31 30 29 28   24 23 22   17 16 15 14 13 12 10 9  7  6 5  4  3  2 1  0
//! no scales  shift  0   M/16   0   N/8   tB tA -B -A   B    A    0   D  sat sp select
//! scales     K96 SFA id M/16 fmt   N/8   tB tA -B -A   B    A    0 SFB id 0 sp   0
//! ```

use super::tile::Major;
use crate::decode::MmaKind;
use crate::error::Fault;
use crate::number::Format;
use crate::numerics::{Accumulate, Kind};

/// The fields of an instruction descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionDescriptor {
    /// Rows of D.
    pub m: u32,
    /// Columns of D.
    pub n: u32,
    /// Element format of A.
    pub a: Format,
    /// Element format of B.
    pub b: Format,
    /// Element format of D.
    pub accumulate: Accumulate,
    /// Whether A is negated.
    pub negate_a: bool,
    /// Whether B is negated.
    pub negate_b: bool,
    /// Major direction of A.
    pub major_a: Major,
    /// Major direction of B.
    pub major_b: Major,
    /// Scale fields, for kinds with block scales.
    pub scales: Option<ScaleFields>,
}

/// Fields for block scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleFields {
    /// Scale format of both operands.
    pub format: Format,
    /// Byte within a column of A's first scale.
    pub id_a: u32,
    /// Byte within a column of B's first scale.
    pub id_b: u32,
}

/// Whether the kind has block scales.
pub fn has_scales(kind: MmaKind) -> bool {
    matches!(kind, MmaKind::Mxf8f6f4 | MmaKind::Mxf4 | MmaKind::Mxf4nvf4)
}

/// Whether the kind packs two 4-bit elements in a byte.
pub fn packs_4_bits(kind: MmaKind) -> bool {
    matches!(kind, MmaKind::Mxf4 | MmaKind::Mxf4nvf4)
}

/// K of one dense MMA.
pub fn k_of(kind: MmaKind) -> u32 {
    match kind {
        MmaKind::Tf32 => 8,
        MmaKind::F16 => 16,
        MmaKind::F8f6f4 | MmaKind::Mxf8f6f4 | MmaKind::I8 => 32,
        MmaKind::Mxf4 | MmaKind::Mxf4nvf4 => 64,
    }
}

/// Returns the arithmetic of a kind.
pub fn mma_kind(kind: MmaKind, a: Format) -> Kind {
    match kind {
        MmaKind::F16 if a == Format::BF16 => Kind::Bf16,
        MmaKind::F16 => Kind::F16,
        MmaKind::Tf32 => Kind::Tf32,
        MmaKind::F8f6f4 => Kind::F8f6f4,
        MmaKind::I8 => Kind::I8,
        MmaKind::Mxf8f6f4 => Kind::Mxf8f6f4,
        MmaKind::Mxf4 | MmaKind::Mxf4nvf4 => Kind::Mxf4nvf4,
    }
}

/// Returns the element format of a type code.
fn element(kind: MmaKind, code: u32) -> Option<Format> {
    match (kind, code) {
        (MmaKind::F16, 0) => Some(Format::F16),
        (MmaKind::F16, 1) => Some(Format::BF16),
        (MmaKind::Tf32, 2) => Some(Format::TF32),
        (MmaKind::I8, 0) => Some(Format::U8),
        (MmaKind::I8, 1) => Some(Format::S8),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 0) => Some(Format::E4M3),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 1) => Some(Format::E5M2),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 3) => Some(Format::E2M3),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 4) => Some(Format::E3M2),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 5) => Some(Format::E2M1),
        (MmaKind::Mxf4 | MmaKind::Mxf4nvf4, 1) => Some(Format::E2M1),
        _ => None,
    }
}

impl InstructionDescriptor {
    /// Decodes the descriptor of an MMA of `kind`. Shapes are checked separately.
    ///
    /// # Errors
    /// `instruction-descriptor-reserved`, `-sparse` (bit 2; sparse MMAs are not supported, and a
    /// dense instruction must not set it), `-saturate` (only for `i8`), `-shift` (only for
    /// weight-stationary MMAs), `-type`, `-negate` (`i8`), `-transpose` (`mxf4`, `mxf4nvf4`),
    /// `-scale-format`, and `-k96` (sm_103a only).
    pub fn decode(
        kind: MmaKind,
        weight_stationary: bool,
        bits: u32,
    ) -> Result<InstructionDescriptor, Fault> {
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        let fault = |rule, why: String| {
            Err(Fault::new(rule, format!("instruction descriptor {bits:#010x} of {kind:?}: {why}")))
        };
        let scaled = has_scales(kind);
        let packed = packs_4_bits(kind);
        if field(2, 1) != 0 {
            return fault(
                "instruction-descriptor-sparse",
                "bit 2 says sparse, and the instruction is a dense one".to_string(),
            );
        }
        let reserved: &[(u32, u32)] = match (scaled, packed) {
            (false, _) => &[(0, 2), (6, 1), (23, 1), (29, 1)],
            (true, false) => &[(0, 2), (3, 1), (6, 1), (24, 3), (31, 1)],
            (true, true) => &[(0, 2), (3, 1), (6, 1), (12, 1), (24, 3)],
        };
        for &(at, width) in reserved {
            if field(at, width) != 0 {
                return fault(
                    "instruction-descriptor-reserved",
                    format!("expected zeros in bits {at} to {}", at + width - 1),
                );
            }
        }
        if packed && field(31, 1) != 0 {
            return fault(
                "instruction-descriptor-k96",
                "K = 96 (bit 31) is for sm_103a only".to_string(),
            );
        }
        if !scaled && field(30, 2) != 0 && !weight_stationary {
            return fault(
                "instruction-descriptor-shift",
                "a maximum shift (bits 30 and 31) is for `.ws` only".to_string(),
            );
        }
        let code_b = if packed { field(10, 2) } else { field(10, 3) };
        let (Some(a), Some(b)) = (element(kind, field(7, 3)), element(kind, code_b)) else {
            return fault(
                "instruction-descriptor-type",
                format!("no element types {} (A) and {code_b} (B)", field(7, 3)),
            );
        };
        let accumulate = match (scaled, kind, field(4, 2), field(3, 1)) {
            (true, ..) => Accumulate::F32,
            (_, MmaKind::I8, 2, 0) => Accumulate::I32,
            (_, MmaKind::I8, 2, 1) => Accumulate::I32Saturating,
            (.., 1) if kind != MmaKind::I8 => {
                return fault(
                    "instruction-descriptor-saturate",
                    "bit 3 (saturate) is for integers only".to_string(),
                );
            }
            (_, MmaKind::F16 | MmaKind::Tf32 | MmaKind::F8f6f4, 1, _) => Accumulate::F32,
            (_, MmaKind::F16 | MmaKind::F8f6f4, 0, _) if a != Format::BF16 && b != Format::BF16 => {
                Accumulate::F16
            }
            (_, _, code, _) => {
                return fault(
                    "instruction-descriptor-type",
                    format!("no accumulator type {code} (bits 4 and 5) with `{a}` and `{b}`"),
                );
            }
        };
        let [negate_a, negate_b, transpose_a, transpose_b] =
            [13, 14, 15, 16].map(|at| field(at, 1) != 0);
        if kind == MmaKind::I8 && (negate_a || negate_b) {
            return fault(
                "instruction-descriptor-negate",
                "bits 13 and 14 (negate) are not for integers".to_string(),
            );
        }
        if packed && (transpose_a || transpose_b) {
            return fault(
                "instruction-descriptor-transpose",
                "bits 15 and 16 (transpose) are not for 4-bit kinds".to_string(),
            );
        }
        let scales = scaled.then(|| ScaleFields {
            format: if field(23, 1) == 1 { Format::UE8M0 } else { Format::UE4M3 },
            id_a: field(29, 2),
            id_b: field(4, 2),
        });
        if scales.is_some_and(|s| s.format == Format::UE4M3 && kind != MmaKind::Mxf4nvf4) {
            return fault(
                "instruction-descriptor-scale-format",
                "expected bit 23 (ue8m0 scales); only mxf4nvf4 has others".to_string(),
            );
        }
        let major = |transpose| if transpose { Major::Mn } else { Major::K };
        Ok(InstructionDescriptor {
            m: field(24, 5) << 4,
            n: field(17, 6) << 3,
            a,
            b,
            accumulate,
            negate_a,
            negate_b,
            major_a: major(transpose_a),
            major_b: major(transpose_b),
            scales,
        })
    }
}
