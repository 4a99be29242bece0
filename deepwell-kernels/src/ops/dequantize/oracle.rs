//! Dequantizes operands of MX formats by definition.
//!
//! Source: OCP Microscaling Formats specification 1.0: elements of eight, six or four bits, and one
//! E8M0 scale per block of 32 along the contraction. Independent of the numbers of
//! `deepwell-precision`, so that a mistake in that crate is not repeated here.

use deepwell_precision::ElementFormat;

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// Decodes an E4M3 element: sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities; NaN
/// is S.1111.111.
pub fn decode_e4m3(bits: u8) -> f64 {
    let sign = if bits & 0x80 != 0 { -1.0 } else { 1.0 };
    let exponent = i32::from((bits >> 3) & 0xf);
    let mantissa = f64::from(bits & 0x7);
    match (exponent, bits & 0x7) {
        (0xf, 0x7) => f64::NAN,
        (0, _) => sign * mantissa * 2f64.powi(-9),
        _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// Decodes an element: sign, exponent and mantissa bits, with a bias of half the exponent's range.
/// Only E5M2 has infinities, E4M3 one NaN of each sign, and the formats of six and four bits
/// neither.
pub fn decode(element: ElementFormat, bits: u8) -> f64 {
    let (exponent_bits, mantissa_bits) = match element {
        ElementFormat::E4M3 => return decode_e4m3(bits),
        ElementFormat::E5M2 => (5, 2),
        ElementFormat::E3M2 => (3, 2),
        ElementFormat::E2M3 => (2, 3),
        _ => (2, 1),
    };
    let sign = if bits >> (exponent_bits + mantissa_bits) & 1 == 1 { -1.0 } else { 1.0 };
    let exponent = i32::from(bits >> mantissa_bits & ((1 << exponent_bits) - 1));
    let bias = (1 << (exponent_bits - 1)) - 1;
    let fraction = bits & ((1 << mantissa_bits) - 1);
    let share = f64::from(fraction) / f64::from(1 << mantissa_bits);
    match (exponent, fraction) {
        (31, 0) => sign * f64::INFINITY,
        (31, _) => f64::NAN,
        (0, _) => sign * share * 2f64.powi(1 - bias),
        _ => sign * (1.0 + share) * 2f64.powi(exponent - bias),
    }
}

/// Decodes an E8M0 scale: `2^(bits - 127)`, NaN for 255.
pub fn decode_e8m0(bits: u8) -> f64 {
    if bits == 0xff { f64::NAN } else { 2f64.powi(i32::from(bits) - 127) }
}

/// Dequantizes a rowwise operand: `data` `[rows, columns]`, `scales` `[rows, ceil(columns / 32)]`
/// row-major. Returns `[rows, columns]`.
pub fn dequantize_rows(data: &[u8], scales: &[u8], rows: usize, columns: usize) -> Vec<f64> {
    dequantize_elements(ElementFormat::E4M3, data, scales, rows, columns)
}

/// [`dequantize_rows`] of any elements, one per byte.
pub fn dequantize_elements(
    element: ElementFormat,
    codes: &[u8],
    scales: &[u8],
    rows: usize,
    columns: usize,
) -> Vec<f64> {
    let blocks = columns.div_ceil(BLOCK);
    assert_eq!(codes.len(), rows * columns, "`codes` is not [rows, columns]");
    assert_eq!(scales.len(), rows * blocks, "`scales` is not [rows, ceil(columns / 32)]");
    let mut values = Vec::with_capacity(codes.len());
    for row in 0..rows {
        for column in 0..columns {
            let scale = scales[row * blocks + column / BLOCK];
            values.push(decode(element, codes[row * columns + column]) * decode_e8m0(scale));
        }
    }
    values
}

/// Dequantizes the transposed operand of a `[rows, columns]` matrix, quantized along the matrix's
/// columns: `data` `[columns, rows]`, `scales` `[columns, ceil(rows / 32)]`. Returns the matrix
/// itself, `[rows, columns]`.
pub fn dequantize_transposed(data: &[u8], scales: &[u8], rows: usize, columns: usize) -> Vec<f64> {
    transpose(&dequantize_rows(data, scales, columns, rows), rows, columns)
}

/// The matrix `[rows, columns]` of a transposed operand `[columns, rows]`.
pub fn transpose(turned: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let mut values = Vec::with_capacity(turned.len());
    for row in 0..rows {
        for column in 0..columns {
            values.push(turned[column * rows + row]);
        }
    }
    values
}

/// Dequantizes a weight with one scale per 32 x 32 square: `data` `[rows, columns]`, `scales`
/// `[ceil(rows / 32), ceil(columns / 32)]`. Returns `[rows, columns]`.
pub fn dequantize_squares(data: &[u8], scales: &[u8], rows: usize, columns: usize) -> Vec<f64> {
    let blocks = columns.div_ceil(BLOCK);
    assert_eq!(data.len(), rows * columns, "`data` is not [rows, columns]");
    assert_eq!(
        scales.len(),
        rows.div_ceil(BLOCK) * blocks,
        "`scales` is not [ceil(rows / 32), ceil(columns / 32)]"
    );
    let mut values = Vec::with_capacity(data.len());
    for row in 0..rows {
        for column in 0..columns {
            let scale = scales[row / BLOCK * blocks + column / BLOCK];
            values.push(decode_e4m3(data[row * columns + column]) * decode_e8m0(scale));
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_by_hand() {
        // From the specification's table: largest, smallest normal, largest and smallest subnormal.
        for (bits, expected) in [
            (0x00, 0.0),
            (0x01, 2f64.powi(-9)),
            (0x07, 0.875 * 2f64.powi(-6)),
            (0x08, 2f64.powi(-6)),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(decode_e4m3(bits), expected, "{bits:#04x}");
        }
        assert!(decode_e4m3(0x80).is_sign_negative());
        assert!(decode_e4m3(0x7f).is_nan() && decode_e4m3(0xff).is_nan());
        assert_eq!((0..=255).filter(|&bits| decode_e4m3(bits).is_nan()).count(), 2);
        // Positive elements are ordered by value.
        for bits in 0..0x7e {
            assert!(decode_e4m3(bits) < decode_e4m3(bits + 1));
        }
        for (bits, expected) in
            [(0, 2f64.powi(-127)), (127, 1.0), (130, 8.0), (254, 2f64.powi(127))]
        {
            assert_eq!(decode_e8m0(bits), expected, "{bits}");
        }
        assert!(decode_e8m0(255).is_nan());
    }

    /// The specification's tables: smallest, largest subnormal, smallest normal and largest.
    #[test]
    fn elements_of_every_format() {
        for (element, rows) in [
            (
                ElementFormat::E5M2,
                [(0x01, 2f64.powi(-16)), (0x04, 2f64.powi(-14)), (0x7B, 57344.0)],
            ),
            (ElementFormat::E3M2, [(0x01, 0.0625), (0x04, 0.25), (0x1F, 28.0)]),
            (ElementFormat::E2M3, [(0x01, 0.125), (0x08, 1.0), (0x1F, 7.5)]),
            (ElementFormat::E2M1, [(0x01, 0.5), (0x02, 1.0), (0x07, 6.0)]),
            (ElementFormat::E4M3, [(0x01, 2f64.powi(-9)), (0x08, 2f64.powi(-6)), (0x7E, 448.0)]),
        ] {
            let sign = 1 << (element.bits() - 1);
            for (bits, expected) in rows {
                assert_eq!(decode(element, bits), expected, "{element} {bits:#04x}");
                assert_eq!(decode(element, bits | sign), -expected, "{element} {bits:#04x}");
            }
        }
        assert_eq!(decode(ElementFormat::E5M2, 0xFC), f64::NEG_INFINITY);
        assert!(decode(ElementFormat::E5M2, 0x7D).is_nan());
    }

    #[test]
    fn scales_belong_to_their_blocks() {
        // Every element is one, so that the values are the scales: 2 rows of 33, the last block
        // short.
        let (rows, columns) = (2, 33);
        let data = vec![0x38; rows * columns];
        let by_rows = dequantize_rows(&data, &[127, 128, 129, 130], rows, columns);
        assert_eq!([by_rows[0], by_rows[31], by_rows[32]], [1.0, 1.0, 2.0]);
        assert_eq!([by_rows[33], by_rows[64], by_rows[65]], [4.0, 4.0, 8.0]);

        // A [33, 2] matrix from its transposed operand [2, 33]: the same scales, transposed.
        let turned = dequantize_transposed(&data, &[127, 128, 129, 130], columns, rows);
        assert_eq!(turned[..2], [1.0, 4.0]);
        assert_eq!(turned[64..], [2.0, 8.0]);

        let squares = dequantize_squares(&[0x38; 33 * 33], &[127, 128, 129, 130], 33, 33);
        assert_eq!([squares[0], squares[32]], [1.0, 2.0]);
        assert_eq!([squares[32 * 33], squares[33 * 33 - 1]], [4.0, 8.0]);
    }
}
