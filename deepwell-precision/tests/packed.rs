//! Dense storage of four- and six-bit elements, and the block formats that use it.

use deepwell_precision::packed::{
    self, fp4_len, fp6_len, pack_fp4, pack_fp6, unpack_fp4, unpack_fp6,
};
use deepwell_precision::{
    ElementFormat, QuantFormat, ScaleRule, dequantize_rows, e8m0, quantize_rows, scales_len,
};
use proptest::prelude::*;

#[test]
fn lengths() {
    for (rows, cols, fp4, fp6) in [
        (0, 5, 0, 0),
        (5, 0, 0, 0),
        (1, 1, 1, 1),
        (1, 2, 1, 2),
        (1, 3, 2, 3),
        (2, 4, 4, 6),
        (3, 5, 9, 12),
        (2, 32, 32, 48),
    ] {
        assert_eq!((fp4_len(rows, cols), fp6_len(rows, cols)), (fp4, fp6), "{rows} x {cols}");
    }
    let error = pack_fp4(&[0; 3], 1, 3, &mut [0; 1]).unwrap_err();
    assert_eq!(error.to_string(), "`bytes` of a 1 x 3 matrix: expected 2 elements, got 1");
    let error = unpack_fp6(&[0; 3], 1, 4, &mut [0; 3]).unwrap_err();
    assert_eq!(error.to_string(), "`data` of a 1 x 4 matrix: expected 4 elements, got 3");
    assert!(pack_fp6(&[], usize::MAX, 2, &mut []).is_err());
    assert!(pack_fp6(&[], usize::MAX, 0, &mut []).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_code_lies_where_it_is_said_to(
        rows in 0_usize..5,
        cols in 0_usize..71,
        seed in any::<u64>(),
    ) {
        let data: Vec<u8> =
            (0..rows * cols).map(|i| (seed.rotate_left(i as u32 * 7) >> 13) as u8).collect();
        let row_bits = |bytes: &[u8], width: usize, len: usize, row: usize, col: usize| {
            let row = &bytes[row * len / rows..][..len / rows];
            (0..width).map(|i| col * width + i).enumerate().fold(0, |code, (i, bit)| {
                code | (row[bit / 8] >> (bit % 8) & 1) << i
            })
        };
        for (width, mask, len) in [(4, 0xF, fp4_len(rows, cols)), (6, 0x3F, fp6_len(rows, cols))] {
            let (mut bytes, mut back) = (vec![0xEE; len], vec![0xEE; data.len()]);
            if width == 4 {
                pack_fp4(&data, rows, cols, &mut bytes).unwrap();
                unpack_fp4(&bytes, rows, cols, &mut back).unwrap();
            } else {
                pack_fp6(&data, rows, cols, &mut bytes).unwrap();
                unpack_fp6(&bytes, rows, cols, &mut back).unwrap();
            }
            for (i, (&code, &back)) in data.iter().zip(&back).enumerate() {
                prop_assert_eq!(back, code & mask);
                let stored = row_bits(&bytes, width, len, i / cols, i % cols);
                prop_assert_eq!(stored, code & mask);
            }
            let ones = |bytes: &[u8]| bytes.iter().map(|b| b.count_ones()).sum::<u32>();
            prop_assert_eq!(ones(&bytes), ones(&back), "padding is zero");
        }
    }

    /// Quantizing what was quantized changes no value, and under the floor rule no byte. The error
    /// of an element is at most half the spacing of its binade at the scaled value.
    #[test]
    fn block_formats(
        seed in any::<u32>(),
        exponent in -60_i32..60,
        spread in 0_u32..12,
        cols in 1_usize..100,
    ) {
        let mut state = seed | 1;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let source: Vec<f32> = (0..2 * cols)
            .map(|_| {
                let unit = (random() >> 8) as f32 / (1 << 23) as f32 - 1.0;
                let down = if spread == 0 { 0 } else { random() % spread };
                unit * 2.0_f32.powi(exponent - down as i32)
            })
            .collect();
        for &element in ElementFormat::ALL {
            let (mantissa_bits, exponent_min) = match element {
                ElementFormat::E4M3 => (3, -6),
                ElementFormat::E5M2 => (2, -14),
                ElementFormat::E3M2 => (2, -2),
                ElementFormat::E2M3 => (3, 0),
                _ => (1, 0),
            };
            for &scale_rule in ScaleRule::ALL {
                let spec = QuantFormat::mx(element).with_scale_rule(scale_rule);
                let quantize = |source: &[f32]| {
                    let mut data = vec![0; 2 * cols];
                    let mut scales = vec![0; scales_len(2, cols)];
                    quantize_rows(source, 2, cols, &spec, &mut data, &mut scales).unwrap();
                    let mut out = vec![0.0_f32; 2 * cols];
                    dequantize_rows(&data, &scales, 2, cols, &spec, &mut out).unwrap();
                    (data, scales, out)
                };
                let (data, scales, once) = quantize(&source);
                let (data_again, scales_again, twice) = quantize(&once);
                let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&once), bits(&twice), "{} {}", element, scale_rule);
                if scale_rule == ScaleRule::OcpFloor {
                    prop_assert_eq!(&data, &data_again);
                    prop_assert_eq!(&scales, &scales_again);
                }
                for (i, (&x, &y)) in source.iter().zip(&once).enumerate() {
                    let scale = scales[i / cols * cols.div_ceil(32) + i % cols / 32];
                    let scaled = f64::from(x) / f64::from(e8m0::decode(scale));
                    let got = f64::from(y) / f64::from(e8m0::decode(scale));
                    if scaled.abs() > f64::from(element.max()) {
                        prop_assert_ne!(scale_rule, ScaleRule::Rceil);
                        prop_assert_eq!(got, f64::from(element.max()).copysign(scaled));
                        continue;
                    }
                    let binade = scaled.abs().log2().floor().max(f64::from(exponent_min));
                    let half_ulp = 2.0_f64.powf(binade - f64::from(mantissa_bits) - 1.0);
                    prop_assert!((scaled - got).abs() <= half_ulp, "{x:e} {element}");
                }
            }
        }
    }
}

/// Each element of a packed row is found alone, in every width, and rows start at whole bytes.
#[test]
fn elements_of_packed_rows() {
    for &element in ElementFormat::ALL {
        let mask = ((1_u32 << element.bits()) - 1) as u8;
        for cols in [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33] {
            let rows = 3;
            let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 37 + 5) as u8 & mask).collect();
            let mut bytes = vec![0; packed::len(element, rows, cols)];
            packed::pack(element, &codes, rows, cols, &mut bytes).unwrap();
            let mut back = vec![0; codes.len()];
            packed::unpack(element, &bytes, rows, cols, &mut back).unwrap();
            assert_eq!(back, codes, "{element} {cols}");
            for (index, &code) in codes.iter().enumerate() {
                let row = &bytes[packed::len(element, index / cols, cols)..];
                let row = &row[..packed::len(element, 1, cols)];
                assert_eq!(packed::code(element, row, index % cols), code, "{element} {cols}");
            }
            let error = packed::pack(element, &codes, rows, cols + 1, &mut bytes).unwrap_err();
            assert!(error.to_string().contains("data"), "{error}");
        }
    }
}
