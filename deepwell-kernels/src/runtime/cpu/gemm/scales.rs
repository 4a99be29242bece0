//! Checks whether the scales of MX operands keep every decoded value and product in the normal
//! range of BF16 and FP32. The BF16 instructions need this, because they flush subnormals to zero.
//!
//! A nonzero value of an element format has an exponent in `lo ..= hi`, for E4M3 in `-9 ..= 8`.
//! With a scale code `c` (`2^(c - 127)`) the decoded value has an exponent in
//! `c - 127 + lo ..= c - 127 + hi`. BF16's normal exponents are `-126 ..= 127`, so `c` must be in
//! `1 - lo ..= 254 - hi`; the least exponent of a product of two such values is
//! `ca + cb - 254 + la + lb`, at least -126 when `ca + cb >= 128 - la - lb`.

use deepwell_precision::scale_tiles::tiled_len;

use super::elements::{exponents, unpack_block};
use super::operand::{Operand, OperandData};

/// E8M0's NaN: decodes to NaN for any data.
const SCALE_NAN: u8 = 0xff;

/// Whether the BF16 tiers multiply these operands without flushing any value that the formats can
/// represent.
pub(super) fn fit_bf16(a: &Operand<'_>, m: usize, b: &Operand<'_>, n: usize, k: usize) -> bool {
    let by_bytes = |operand: &Operand<'_>, outer: usize| match operand.data {
        OperandData::Mx { scales, .. } => {
            let blocks = k.div_ceil(32);
            let is_padded = outer * blocks != tiled_len(outer, blocks) || operand.part.is_some();
            Some(if is_padded {
                let rows = 0..outer;
                let at = |row, block| scales[operand.scale_offset(row, block, k)];
                let row = |row| (0..blocks).map(move |block| at(row, block));
                scale_range(rows.flat_map(row))
            } else {
                scale_range(scales[..tiled_len(outer, blocks)].iter().copied())
            })
        }
        _ => None,
    };
    let limits = [a, b].map(limits);
    if range_fits([by_bytes(a, m), by_bytes(b, n)], limits) {
        return true;
    }
    // A block of zeros may have any scale: check again with the scales of nonzero blocks only.
    let of_nonzero = [range_of_nonzero_blocks(a, m, k), range_of_nonzero_blocks(b, n, k)];
    range_fits(of_nonzero, limits)
}

/// Exponents of the elements of an operand.
fn limits(operand: &Operand<'_>) -> [i16; 2] {
    match operand.data {
        OperandData::Mx { element, .. } => exponents(element),
        _ => [0, 0],
    }
}

/// Returns the least and greatest scale code, NaN excluded.
fn scale_range(scales: impl Iterator<Item = u8>) -> (u8, u8) {
    // NaN must not count as large: 0xFF is the identity of the minimum and becomes 0 for the
    // maximum.
    scales.fold((u8::MAX, u8::MIN), |(least, greatest), scale| {
        (least.min(scale), greatest.max(if scale == SCALE_NAN { 0 } else { scale }))
    })
}

fn range_fits([a, b]: [Option<(u8, u8)>; 2], [of_a, of_b]: [[i16; 2]; 2]) -> bool {
    let alone = |range: Option<(u8, u8)>, [least, greatest]: [i16; 2]| {
        range.is_none_or(|(lo, hi)| i16::from(lo) >= 1 - least && i16::from(hi) <= 254 - greatest)
    };
    let both = match (a, b) {
        (Some((a, _)), Some((b, _))) => i16::from(a) + i16::from(b) >= 128 - of_a[0] - of_b[0],
        // BF16 operands are used as they are; their own tiny products are flushed (see the module's
        // documentation).
        _ => true,
    };
    alone(a, of_a) && alone(b, of_b) && both
}

fn range_of_nonzero_blocks(operand: &Operand<'_>, outer: usize, k: usize) -> Option<(u8, u8)> {
    let OperandData::Mx { element, data, scales } = operand.data else { return None };
    let magnitude = ((1u32 << (element.bits() - 1)) - 1) as u8;
    let is_nonzero = |row: usize, block: usize| {
        let mut codes = [0; 32];
        let data = &data[operand.mx_from(row, block * 32)..];
        let codes = unpack_block(element, data, &mut codes[..(k - block * 32).min(32)]);
        codes.iter().any(|code| code & magnitude != 0)
    };
    Some(scale_range((0..outer).flat_map(|row| {
        let blocks = (0..k.div_ceil(32)).filter(move |&block| is_nonzero(row, block));
        blocks.map(move |block| scales[operand.scale_offset(row, block, k)])
    })))
}

#[cfg(test)]
mod tests {
    use deepwell_precision::ElementFormat;
    use deepwell_precision::scale_tiles::to_tiles;

    use super::*;

    #[test]
    fn ranges() {
        // (scale of A's block, scale of B's block, code of A, fits)
        let rows = [
            (127, 127, 0x38, true),
            (10, 136, 0x38, true),
            (10, 135, 0x38, false),
            (9, 200, 0x38, false),
            (246, 127, 0x38, true),
            (247, 127, 0x38, false),
            (0xff, 127, 0x38, true),
            (0, 127, 0x00, true),
            (0, 127, 0x80, true),
            (0, 127, 0x01, false),
            (254, 127, 0x00, true),
        ];
        for (scale_a, scale_b, code, expected) in rows {
            // Two blocks per row, the second short; the first holds ones.
            let data_a: Vec<u8> = [vec![0x38; 32], vec![code; 8]].concat();
            let data_b = vec![0x38; 40];
            let tiled = |plain: [u8; 2]| {
                let mut tiles = vec![0; tiled_len(1, 2)];
                to_tiles(&plain, 1, 2, &mut tiles).unwrap();
                tiles
            };
            let scales_a = tiled([127, scale_a]);
            let scales_b = tiled([scale_b; 2]);
            let a = Operand::rows_mx(ElementFormat::E4M3, &data_a, &scales_a, 40);
            let b = Operand::rows_mx(ElementFormat::E4M3, &data_b, &scales_b, 40);
            assert_eq!(
                fit_bf16(&a, 1, &b, 1, 40),
                expected,
                "scales {scale_a} and {scale_b}, code {code:#04x}"
            );
            assert_eq!(fit_bf16(&b, 1, &a, 1, 40), expected, "exchanged");
        }
    }
}
