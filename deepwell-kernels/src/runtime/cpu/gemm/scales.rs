//! Checks whether the scales of MXFP8 operands keep every decoded value and product in the normal
//! range of BF16 and FP32. The BF16 instructions need this, because they flush subnormals to zero.
//!
//! A nonzero E4M3 value lies in `2^-9 ..= 1.75 * 2^8`. With a scale code `c` (`2^(c - 127)`) the
//! decoded value has an exponent in `c - 136 ..= c - 119`. BF16's normal exponents are
//! `-126 ..= 127`, so `c` must be in `10 ..= 246`; the least exponent of a product of two such
//! values is `ca + cb - 272`, at least -126 when `ca + cb >= 146`.

use deepwell_precision::scale_tiles::tiled_len;

use super::operand::{Operand, OperandData};

const SCALE_MIN: u8 = 10;
const SCALE_MAX: u8 = 246;
const SCALE_SUM_MIN: u16 = 146;
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
    if range_fits(by_bytes(a, m), by_bytes(b, n)) {
        return true;
    }
    // A block of zeros may have any scale: check again with the scales of nonzero blocks only.
    range_fits(range_of_nonzero_blocks(a, m, k), range_of_nonzero_blocks(b, n, k))
}

/// Returns the least and greatest scale code, NaN excluded.
fn scale_range(scales: impl Iterator<Item = u8>) -> (u8, u8) {
    // NaN must not count as large: 0xFF is the identity of the minimum and becomes 0 for the
    // maximum.
    scales.fold((u8::MAX, u8::MIN), |(least, greatest), scale| {
        (least.min(scale), greatest.max(if scale == SCALE_NAN { 0 } else { scale }))
    })
}

fn range_fits(a: Option<(u8, u8)>, b: Option<(u8, u8)>) -> bool {
    let alone =
        |range: Option<(u8, u8)>| range.is_none_or(|(lo, hi)| lo >= SCALE_MIN && hi <= SCALE_MAX);
    let both = match (a, b) {
        (Some((a, _)), Some((b, _))) => u16::from(a) + u16::from(b) >= SCALE_SUM_MIN,
        // BF16 operands are used as they are; their own tiny products are flushed (see the module's
        // documentation).
        _ => true,
    };
    alone(a) && alone(b) && both
}

fn range_of_nonzero_blocks(operand: &Operand<'_>, outer: usize, k: usize) -> Option<(u8, u8)> {
    let OperandData::Mx { data, scales } = operand.data else { return None };
    // The last row of a part may be shorter than the stride.
    let rows = data.chunks(operand.outer_stride).take(outer).enumerate();
    Some(scale_range(rows.flat_map(|(row, data)| {
        let blocks = data[..k].chunks(32).enumerate();
        blocks
            .filter(|(_, data)| data.iter().any(|code| code & 0x7f != 0))
            .map(move |(block, _)| scales[operand.scale_offset(row, block, k)])
    })))
}

#[cfg(test)]
mod tests {
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
            let a = Operand::rows_mx(&data_a, &scales_a, 40);
            let b = Operand::rows_mx(&data_b, &scales_b, 40);
            assert_eq!(
                fit_bf16(&a, 1, &b, 1, 40),
                expected,
                "scales {scale_a} and {scale_b}, code {code:#04x}"
            );
            assert_eq!(fit_bf16(&b, 1, &a, 1, 40), expected, "exchanged");
        }
    }
}
