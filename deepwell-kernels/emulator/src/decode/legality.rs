//! ISA tables of legal matrix shapes and types.

use super::types::Type;
use super::{MatrixElement, MatrixShape, MmaKind, MmaShape};

/// Checks a form of `ldmatrix`, or of `stmatrix` if `stores`.
pub(super) fn matrix(
    stores: bool,
    shape: MatrixShape,
    count: u32,
    transpose: bool,
    element: MatrixElement,
) -> Result<(), String> {
    use MatrixElement as E;
    use MatrixShape as S;
    let known = match (shape, stores) {
        (S::M8n8, _) => element == E::B16,
        (S::M16n8, true) => element == E::B8 && transpose,
        (S::M8n16, false) => matches!(element, E::B8FromB6 | E::B8FromB4) && !transpose,
        (S::M16n16, false) => {
            matches!(element, E::B8 | E::B8FromB6 | E::B8FromB4) && transpose && count <= 2
        }
        _ => false,
    };
    if known {
        return Ok(());
    }
    Err(format!("{shape:?} x{count} of {element:?} with transpose {transpose} is not known"))
}

/// Types and shape of an `mma.sync`.
pub(super) struct WarpForm {
    pub(super) shape: MmaShape,
    pub(super) d_type: Type,
    pub(super) a_type: Type,
    pub(super) b_type: Type,
    pub(super) c_type: Type,
    pub(super) kind: Option<MmaKind>,
}

const SMALL: &[Type] = &[Type::E4m3, Type::E5m2, Type::E3m2, Type::E2m3, Type::E2m1];

/// Checks a form of `mma.sync`. Returns the number of registers of D, A, B and C.
pub(super) fn warp_mma(
    form: &WarpForm,
    a_is_row: bool,
    b_is_row: bool,
    saturate: bool,
) -> Result<[u32; 4], String> {
    let WarpForm { shape, d_type, a_type, b_type, c_type, kind } = *form;
    let describe = || {
        format!(
            "m{}n{}k{} of `.{a_type}` and `.{b_type}` into `.{d_type}` is not known",
            shape.m, shape.n, shape.k
        )
    };
    if !a_is_row || b_is_row {
        return Err("only A by rows and B by columns is known".to_string());
    }
    let floats = matches!(d_type, Type::F16 | Type::F32) && matches!(c_type, Type::F16 | Type::F32);
    let singles = d_type == Type::F32 && c_type == Type::F32;
    let integers = d_type == Type::S32 && c_type == Type::S32;
    if saturate && !integers {
        return Err("`.satfinite` is only there for integers".to_string());
    }
    let bytes = |one: Type| matches!(one, Type::U8 | Type::S8);
    let nibbles = |one: Type| matches!(one, Type::U4 | Type::S4);
    let k_of: &[u32] = match (a_type, b_type) {
        (Type::F16, Type::F16) if floats && kind.is_none() => &[8, 16],
        (Type::Bf16, Type::Bf16) if singles && kind.is_none() => &[8, 16],
        (Type::Tf32, Type::Tf32) if singles && kind.is_none() => &[4, 8],
        (Type::E4m3 | Type::E5m2, Type::E4m3 | Type::E5m2) if floats && kind.is_none() => &[16, 32],
        _ if SMALL.contains(&a_type) && SMALL.contains(&b_type) => match kind {
            Some(MmaKind::F8f6f4) if floats => &[32],
            Some(MmaKind::Mxf8f6f4) if singles => &[32],
            Some(MmaKind::Mxf4 | MmaKind::Mxf4nvf4)
                if singles && a_type == Type::E2m1 && b_type == Type::E2m1 =>
            {
                &[64]
            }
            _ => return Err(describe()),
        },
        (Type::F64, Type::F64) if d_type == Type::F64 && c_type == Type::F64 => &[4, 8, 16],
        _ if bytes(a_type) && bytes(b_type) && integers => &[16, 32],
        _ if nibbles(a_type) && nibbles(b_type) && integers => &[32, 64],
        _ => return Err(describe()),
    };
    if (shape.m, shape.n) != (16, 8) || !k_of.contains(&shape.k) {
        return Err(describe());
    }
    // With a `.kind`, elements of at most 8 bits are in bytes, except in the FP4 kinds.
    let packed = matches!(kind, Some(MmaKind::Mxf4 | MmaKind::Mxf4nvf4));
    let bits = match a_type {
        Type::E2m1 if packed => 4,
        Type::Tf32 | Type::F64 | Type::F16 | Type::Bf16 => a_type.bits(),
        Type::U4 | Type::S4 => 4,
        _ => 8,
    };
    let register = if a_type == Type::F64 { 64 } else { 32 };
    let registers = |rows: u32| rows * shape.k * bits / 32 / register;
    let outputs = |element: Type| if element == Type::F16 { 2 } else { 4 };
    Ok([outputs(d_type), registers(16), registers(8), outputs(c_type)])
}

/// Returns the scales along K of an `mma.sync` with block scales.
pub(super) fn warp_scales(
    kind: Option<MmaKind>,
    vector: Option<u32>,
    scale_type: Type,
) -> Result<u32, String> {
    match (kind, vector, scale_type) {
        (Some(MmaKind::Mxf8f6f4), None | Some(1), Type::Ue8m0) => Ok(1),
        (Some(MmaKind::Mxf4), None | Some(2), Type::Ue8m0) => Ok(2),
        (Some(MmaKind::Mxf4nvf4), Some(2), Type::Ue8m0) => Ok(2),
        (Some(MmaKind::Mxf4nvf4), Some(4), Type::Ue4m3 | Type::Ue8m0) => Ok(4),
        _ => Err(format!("scales of `.{scale_type}` in this number are not there for the kind")),
    }
}

/// Checks a form of `wgmma.mma_async`. Returns the number of registers of D.
pub(super) fn warp_group(
    shape: MmaShape,
    d_type: Type,
    a_type: Type,
    b_type: Type,
    saturate: bool,
) -> Result<u32, String> {
    let MmaShape { m, n, k } = shape;
    let describe = || format!("m{m}n{n}k{k} of `.{a_type}` and `.{b_type}` into `.{d_type}`");
    let eights = |one: Type| matches!(one, Type::E4m3 | Type::E5m2);
    let bytes = |one: Type| matches!(one, Type::U8 | Type::S8);
    let depth = match (d_type, a_type, b_type) {
        (Type::F16 | Type::F32, Type::F16, Type::F16) => 16,
        (Type::F32, Type::Bf16, Type::Bf16) => 16,
        (Type::F32, Type::Tf32, Type::Tf32) => 8,
        (Type::F16 | Type::F32, a, b) if eights(a) && eights(b) => 32,
        (Type::S32, a, b) if bytes(a) && bytes(b) => 32,
        _ => return Err(format!("{} is not known", describe())),
    };
    let integer = d_type == Type::S32;
    if saturate && !integer {
        return Err("`.satfinite` is only there for integers".to_string());
    }
    let n_known = n % 8 == 0 && (8..=256).contains(&n);
    let n_known = n_known && (!integer || n == 8 || n == 24 || n % 16 == 0);
    if m != 64 || k != depth || !n_known {
        return Err(format!("{}: M is 64, K is {depth}, N is 8 to 256 in steps", describe()));
    }
    Ok(if d_type == Type::F16 { n / 4 } else { n / 2 })
}

/// Notations of the scale size of `tcgen05.mma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleVector {
    /// `.scale_vec::nX`.
    Count(u32),
    /// `.block16`, `.block32`.
    Block(u32),
}

/// Returns the scales along K of one `tcgen05.mma`, and the elements per scale.
pub(super) fn tensor_scales(
    kind: MmaKind,
    vector: Option<ScaleVector>,
) -> Result<(u32, u32), String> {
    use ScaleVector::{Block, Count};
    match (kind, vector) {
        (MmaKind::Mxf8f6f4, None | Some(Count(1) | Block(32))) => Ok((1, 32)),
        (MmaKind::Mxf4, None | Some(Count(2) | Block(32))) => Ok((2, 32)),
        (MmaKind::Mxf4nvf4, Some(Count(2) | Block(32))) => Ok((2, 32)),
        (MmaKind::Mxf4nvf4, Some(Count(4) | Block(16))) => Ok((4, 16)),
        _ => Err("this size of scales is not there for the kind".to_string()),
    }
}
