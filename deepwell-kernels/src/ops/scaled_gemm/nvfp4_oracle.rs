//! Dequantizes NVFP4 operands by definition.
//!
//! Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149: E2M1 elements, two per
//! byte with the first in the low bits, an unsigned E4M3 scale per 16 elements along the
//! contraction, and an FP32 scale per tensor. Independent of `deepwell-precision`, so that a
//! mistake in that crate is not repeated here.

use crate::ops::dequantize::oracle::decode_e4m3;

/// Elements that share a scale.
pub const BLOCK: usize = 16;

/// Decodes an E2M1 element: sign, 2 exponent bits with bias 1, 1 mantissa bit; no infinities, no
/// NaN.
pub fn decode_e2m1(bits: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(bits & 7)];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// Decodes a block scale; NaN for a byte whose top bit is set.
pub fn decode_ue4m3(bits: u8) -> f64 {
    if bits & 0x80 == 0 { decode_e4m3(bits) } else { f64::NAN }
}

/// Dequantizes a rowwise operand: `data` `[rows, ceil(columns / 2)]` bytes, `scales`
/// `[rows, ceil(columns / 16)]` row-major. Returns `[rows, columns]`.
pub fn dequantize_rows(
    data: &[u8],
    scales: &[u8],
    tensor_scale: f64,
    rows: usize,
    columns: usize,
) -> Vec<f64> {
    let (row_bytes, blocks) = (columns.div_ceil(2), columns.div_ceil(BLOCK));
    assert_eq!(data.len(), rows * row_bytes, "`data` is not [rows, ceil(columns / 2)]");
    assert_eq!(scales.len(), rows * blocks, "`scales` is not [rows, ceil(columns / 16)]");
    let mut values = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let byte = data[row * row_bytes + column / 2];
            let bits = if column % 2 == 0 { byte & 0xF } else { byte >> 4 };
            let scale = decode_ue4m3(scales[row * blocks + column / BLOCK]);
            values.push(decode_e2m1(bits) * scale * tensor_scale);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_by_hand() {
        let values: Vec<f64> = (0..8).map(decode_e2m1).collect();
        assert_eq!(values, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(decode_e2m1(0xF), -6.0);
        assert_eq!(decode_ue4m3(0x7E), 448.0);
        assert!(decode_ue4m3(0x7F).is_nan() && decode_ue4m3(0xB8).is_nan());
    }

    #[test]
    fn scales_and_halves_of_bytes_belong_to_their_elements() {
        // Two rows of 17 ones and twos; the second block of a row is short.
        let mut row = [0x42; 9];
        row[8] = 0x02;
        let data = [row, row].concat();
        let values = dequantize_rows(&data, &[0x38, 0x40, 0x48, 0x50], 0.5, 2, 17);
        assert_eq!(values[..3], [0.5, 1.0, 0.5]);
        assert_eq!([values[16], values[17], values[33]], [1.0, 2.0, 4.0]);
    }
}
