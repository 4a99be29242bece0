//! Tables of legal MMAs.

use super::instruction_descriptor::{InstructionDescriptor, has_scales};
use super::shared_descriptor::Swizzle;
use super::tile::Major;
use crate::decode::MmaKind;
use crate::error::Fault;
use crate::number::Format;

/// Checks M and N of a dense MMA for its kind, group and weight-stationary flag.
///
/// # Errors
/// `mma-weight-stationary`, `mma-shape-m`, `mma-shape-n`.
pub fn check_shape(
    kind: MmaKind,
    group: u32,
    weight_stationary: bool,
    m: u32,
    n: u32,
) -> Result<(), Fault> {
    if weight_stationary && (group != 1 || has_scales(kind)) {
        return Err(Fault::new(
            "mma-weight-stationary",
            format!("`.ws` is not for {kind:?} with `.cta_group::{group}`"),
        ));
    }
    let rows: &[u32] = match (group, weight_stationary, has_scales(kind)) {
        (_, true, _) => &[32, 64, 128],
        (1, _, true) => &[128],
        (1, _, false) => &[64, 128],
        _ => &[128, 256],
    };
    if !rows.contains(&m) {
        return Err(Fault::new(
            "mma-shape-m",
            format!("expected M of {kind:?} with `.cta_group::{group}` in {rows:?}, got {m}"),
        ));
    }
    let (legal, expected) = if weight_stationary {
        ([64, 128, 256].contains(&n), "64, 128 or 256")
    } else {
        match (kind, group) {
            (MmaKind::I8, 1) => (
                steps(n, 8, 32, 8) || steps(n, 48, 256, 16),
                "8, 16, 24, 32, then to 256 in steps of 16",
            ),
            (MmaKind::I8, _) => (steps(n, 32, 256, 32), "32 to 256 in steps of 32"),
            (_, 1) => (steps(n, 8, 256, 8), "8 to 256 in steps of 8"),
            _ => (steps(n, 16, 256, 16), "16 to 256 in steps of 16"),
        }
    };
    if !legal {
        return Err(Fault::new(
            "mma-shape-n",
            format!("expected N of {kind:?} with `.cta_group::{group}`: {expected}, got {n}"),
        ));
    }
    Ok(())
}

fn steps(value: u32, from: u32, to: u32, step: u32) -> bool {
    (from..=to).contains(&value) && (value - from).is_multiple_of(step)
}

/// Checks N of a transposed B in 8-bit containers.
///
/// # Errors
/// `mma-transpose-n`.
pub fn check_transposed_n(
    kind: MmaKind,
    group: u32,
    descriptor: &InstructionDescriptor,
) -> Result<(), Fault> {
    let bytes = matches!(kind, MmaKind::F8f6f4 | MmaKind::Mxf8f6f4 | MmaKind::I8);
    let step = 16 * group;
    if bytes && descriptor.major_b == Major::Mn && !descriptor.n.is_multiple_of(step) {
        return Err(Fault::new(
            "mma-transpose-n",
            format!(
                "expected N of a transposed 8-bit B with `.cta_group::{group}` in steps of {step}, \
                 got {}",
                descriptor.n
            ),
        ));
    }
    Ok(())
}

/// Checks the swizzle of a transposed matrix. The 4-bit and 6-bit elements of `f8f6f4` kinds are in
/// 8-bit containers and count as 8-bit elements.
///
/// # Errors
/// `swizzle-major`.
pub fn check_swizzle(
    what: &str,
    format: Format,
    major: Major,
    swizzle: Swizzle,
) -> Result<(), Fault> {
    let atom_32 = swizzle == Swizzle::Bytes128Atom32;
    let legal = match (major, format.bits()) {
        (Major::K, _) => !atom_32,
        (Major::Mn, 32) => atom_32,
        (Major::Mn, _) => !atom_32,
    };
    if legal {
        return Ok(());
    }
    let expected = match (major, format.bits()) {
        (Major::Mn, 32) => "only 128-byte swizzle with 32-byte atoms",
        _ => "any swizzle but that with 32-byte atoms",
    };
    Err(Fault::new(
        "swizzle-major",
        format!("expected {expected} for {what} of `{format}`, {major:?}-major, got {swizzle}"),
    ))
}

/// Returns the number of scales along K of one MMA, for a legal kind, format and block size.
///
/// # Errors
/// `scale-vector`: the combination is illegal.
pub fn scales_along_k(kind: MmaKind, format: Format, block: u32) -> Result<u32, Fault> {
    match (kind, format, block) {
        (MmaKind::Mxf8f6f4, Format::UE8M0, 32) => Ok(1),
        (MmaKind::Mxf4 | MmaKind::Mxf4nvf4, Format::UE8M0, 32) => Ok(2),
        (MmaKind::Mxf4nvf4, Format::UE8M0 | Format::UE4M3, 16) => Ok(4),
        _ => Err(Fault::new(
            "scale-vector",
            format!("{kind:?} has no `{format}` scales of {block} elements"),
        )),
    }
}

/// Checks the byte of a column at which the scales of one row begin.
///
/// # Errors
/// `scale-id`: 1 scale may begin at bytes 0 to 3, 2 scales at 0 or 2, 4 scales at 0.
pub fn check_scale_id(what: &str, count: u32, id: u32) -> Result<(), Fault> {
    if id.is_multiple_of(count) && id + count <= 4 {
        return Ok(());
    }
    Err(Fault::new(
        "scale-id",
        format!("{count} scales of a row of {what} cannot begin at byte {id} of a column"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_by_kind() {
        use MmaKind::*;
        let rows = [
            (F16, 1, false, 64, 8, ""),
            (F16, 1, false, 128, 256, ""),
            (F16, 1, false, 256, 128, "mma-shape-m"),
            (F16, 1, false, 32, 64, "mma-shape-m"),
            (F16, 1, true, 32, 64, ""),
            (F16, 1, true, 64, 72, "mma-shape-n"),
            (F16, 2, true, 128, 64, "mma-weight-stationary"),
            (F16, 2, false, 64, 64, "mma-shape-m"),
            (F16, 2, false, 256, 24, "mma-shape-n"),
            (F16, 2, false, 256, 16, ""),
            (Tf32, 1, false, 128, 0, "mma-shape-n"),
            (F8f6f4, 1, false, 128, 264, "mma-shape-n"),
            (F8f6f4, 1, false, 0, 8, "mma-shape-m"),
            (I8, 1, false, 128, 24, ""),
            (I8, 1, false, 128, 40, "mma-shape-n"),
            (I8, 1, false, 128, 48, ""),
            (I8, 2, false, 256, 48, "mma-shape-n"),
            (I8, 2, false, 256, 64, ""),
            (Mxf8f6f4, 1, false, 64, 64, "mma-shape-m"),
            (Mxf8f6f4, 1, true, 128, 64, "mma-weight-stationary"),
            (Mxf8f6f4, 2, false, 128, 64, ""),
            (Mxf4, 1, false, 128, 8, ""),
            (Mxf4nvf4, 2, false, 256, 256, ""),
        ];
        for (kind, group, stationary, m, n, rule) in rows {
            let result = check_shape(kind, group, stationary, m, n);
            assert_eq!(result.err().map_or("", |fault| fault.rule), rule, "{kind:?} {m} {n}");
        }
    }

    #[test]
    fn scales_by_kind() {
        use Format::{UE4M3, UE8M0};
        use MmaKind::*;
        let rows = [
            (Mxf8f6f4, UE8M0, 32, Some(1)),
            (Mxf8f6f4, UE8M0, 16, None),
            (Mxf4, UE8M0, 32, Some(2)),
            (Mxf4, UE8M0, 16, None),
            (Mxf4nvf4, UE8M0, 32, Some(2)),
            (Mxf4nvf4, UE8M0, 16, Some(4)),
            (Mxf4nvf4, UE4M3, 16, Some(4)),
            (Mxf4nvf4, UE4M3, 32, None),
        ];
        for (kind, format, block, expected) in rows {
            assert_eq!(scales_along_k(kind, format, block).ok(), expected);
        }
        for (count, id, legal) in
            [(1, 3, true), (2, 0, true), (2, 1, false), (2, 2, true), (4, 0, true), (4, 2, false)]
        {
            assert_eq!(check_scale_id("A", count, id).is_ok(), legal, "{count} at {id}");
        }
    }

    #[test]
    fn swizzles_by_direction() {
        use Major::{K, Mn};
        let rows = [
            (Format::TF32, K, Swizzle::Bytes128, true),
            (Format::TF32, K, Swizzle::Bytes128Atom32, false),
            (Format::TF32, Mn, Swizzle::Bytes128Atom32, true),
            (Format::TF32, Mn, Swizzle::Bytes128, false),
            (Format::BF16, Mn, Swizzle::Bytes128, true),
            (Format::BF16, Mn, Swizzle::Bytes128Atom32, false),
            (Format::E4M3, Mn, Swizzle::None, true),
            (Format::E2M1, Mn, Swizzle::Bytes64, true),
        ];
        for (format, major, swizzle, legal) in rows {
            assert_eq!(check_swizzle("A", format, major, swizzle).is_ok(), legal);
        }
    }
}
