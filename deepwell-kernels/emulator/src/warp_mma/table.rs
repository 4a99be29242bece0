//! Table of legal `mma.sync` forms.

use crate::decode::{MmaKind, MmaShape, Type};
use crate::number::Format;
use crate::numerics::Kind;

/// Forms of one kind.
pub(super) struct Form {
    /// Legal values of K; the shapes are m16n8kK.
    k: &'static [u32],
    a: &'static [Type],
    b: &'static [Type],
    /// Whether A and B must have the same type.
    is_same: bool,
    d: &'static [Type],
    kind: Option<MmaKind>,
    /// Legal scales of kinds with block scales: number along K, and type.
    scales: &'static [(u32, Type)],
    /// Number in the name of the first target, such as 80.
    pub(super) target_min: u32,
}

const FLOATS_8_BITS: &[Type] = &[Type::E4m3, Type::E5m2];
const FLOATS_SMALL: &[Type] = &[Type::E4m3, Type::E5m2, Type::E3m2, Type::E2m3, Type::E2m1];
const INTEGERS: &[Type] = &[Type::S8, Type::U8];
const FORM: Form = Form {
    k: &[],
    a: &[],
    b: &[],
    is_same: false,
    d: &[],
    kind: None,
    scales: &[],
    target_min: 80,
};

const FORMS: &[Form] = &[
    Form {
        k: &[8, 16],
        a: &[Type::F16],
        b: &[Type::F16],
        is_same: true,
        d: &[Type::F16, Type::F32],
        ..FORM
    },
    Form { k: &[8, 16], a: &[Type::Bf16], b: &[Type::Bf16], d: &[Type::F32], ..FORM },
    Form { k: &[4, 8], a: &[Type::Tf32], b: &[Type::Tf32], d: &[Type::F32], ..FORM },
    Form { k: &[16, 32], a: INTEGERS, b: INTEGERS, d: &[Type::S32], ..FORM },
    Form {
        k: &[16, 32],
        a: FLOATS_8_BITS,
        b: FLOATS_8_BITS,
        d: &[Type::F16, Type::F32],
        target_min: 89,
        ..FORM
    },
    Form {
        k: &[32],
        a: FLOATS_SMALL,
        b: FLOATS_SMALL,
        d: &[Type::F16, Type::F32],
        kind: Some(MmaKind::F8f6f4),
        target_min: 120,
        ..FORM
    },
    Form {
        k: &[32],
        a: FLOATS_SMALL,
        b: FLOATS_SMALL,
        d: &[Type::F32],
        kind: Some(MmaKind::Mxf8f6f4),
        scales: &[(1, Type::Ue8m0)],
        target_min: 120,
        ..FORM
    },
    Form {
        k: &[64],
        a: &[Type::E2m1],
        b: &[Type::E2m1],
        d: &[Type::F32],
        kind: Some(MmaKind::Mxf4),
        scales: &[(2, Type::Ue8m0)],
        target_min: 120,
        ..FORM
    },
    Form {
        k: &[64],
        a: &[Type::E2m1],
        b: &[Type::E2m1],
        d: &[Type::F32],
        kind: Some(MmaKind::Mxf4nvf4),
        scales: &[(2, Type::Ue8m0), (4, Type::Ue8m0), (4, Type::Ue4m3)],
        target_min: 120,
        ..FORM
    },
];

/// Returns the table row of an MMA.
pub(super) fn find(
    shape: MmaShape,
    (a, b, d): (Type, Type, Type),
    kind: Option<MmaKind>,
    scales: Option<(u32, Type)>,
) -> Option<&'static Form> {
    FORMS.iter().find(|form| {
        shape.m == 16
            && shape.n == 8
            && form.k.contains(&shape.k)
            && form.a.contains(&a)
            && form.b.contains(&b)
            && (!form.is_same || a == b)
            && form.d.contains(&d)
            && form.kind == kind
            && match scales {
                Some(scales) => form.scales.contains(&scales),
                None => form.scales.is_empty(),
            }
    })
}

/// Returns the format of an element, and the register bits per element.
pub(crate) fn format_of(element: Type) -> Option<(Format, u32)> {
    Some(match element {
        Type::F16 => (Format::F16, 16),
        Type::Bf16 => (Format::BF16, 16),
        Type::Tf32 => (Format::TF32, 32),
        Type::E4m3 => (Format::E4M3, 8),
        Type::E5m2 => (Format::E5M2, 8),
        Type::E3m2 => (Format::E3M2, 8),
        Type::E2m3 => (Format::E2M3, 8),
        Type::E2m1 => (Format::E2M1, 8),
        Type::S8 => (Format::S8, 8),
        Type::U8 => (Format::U8, 8),
        _ => return None,
    })
}

/// Returns the arithmetic of an MMA without scales.
pub(crate) fn mma_kind(element: Format) -> Kind {
    match element {
        Format::F16 => Kind::F16,
        Format::BF16 => Kind::Bf16,
        Format::TF32 | Format::F32 => Kind::Tf32,
        Format::S8 | Format::U8 => Kind::I8,
        _ => Kind::F8f6f4,
    }
}
