//! Scale tiles against the published formula, and dequantization.

use deepwell_precision::scale_tiles::{from_tiles, offset, tiled_len, to_tiles};
use deepwell_precision::{
    ElementFormat, QuantFormat, dequantize_rows, e2m1, e2m3, e3m2, e4m3, e5m2, e8m0, nvfp4, packed,
    quantize_rows, scales_len,
};
use half::bf16;
use proptest::prelude::*;

#[test]
fn tile_sizes() {
    for (rows, blocks, expected) in [
        (0, 0, 0),
        (0, 4, 0),
        (4, 0, 0),
        (1, 1, 512),
        (128, 4, 512),
        (129, 4, 1024),
        (128, 5, 1024),
        (129, 5, 2048),
        (4096, 128, 4096 * 128),
    ] {
        assert_eq!(tiled_len(rows, blocks), expected, "{rows} x {blocks}");
    }
}

/// The inverse as it is published: from a place in a tile back to row and scale.
#[test]
fn places_in_a_tile() {
    for place in 0..512 {
        let (row, block) = (place % 16 / 4 * 32 + place / 16, place % 4);
        assert_eq!(offset(row, block, 4), place);
        // Tiles follow each other along the blocks first.
        assert_eq!(offset(row + 128, block + 8, 12), (3 + 2) * 512 + place);
    }
}

#[test]
fn wrong_lengths() {
    let mut tiles = [0; 512];
    let error = to_tiles(&[0; 5], 2, 3, &mut tiles).unwrap_err();
    assert_eq!(error.to_string(), "`plain` of a 2 x 3 matrix: expected 6 elements, got 5");
    let error = to_tiles(&[0; 6], 2, 3, &mut tiles[1..]).unwrap_err();
    assert_eq!(error.to_string(), "`tiles` of a 2 x 3 matrix: expected 512 elements, got 511");
    let error = from_tiles(&tiles, 200, 3, &mut [0; 600]).unwrap_err();
    assert_eq!(error.to_string(), "`tiles` of a 200 x 3 matrix: expected 1024 elements, got 512");
    assert!(to_tiles(&[], usize::MAX, 3, &mut []).is_err());
    assert!(to_tiles(&[], usize::MAX, 0, &mut []).is_ok());
}

/// Tiles of the scales of both vector sizes, from quantization to the place where a tensor core
/// looks for the scale of an element.
#[test]
fn tiles_of_both_vector_sizes() {
    let (rows, cols) = (150, 200);
    let src: Vec<f32> = (0..rows * cols).map(|i| (i as f32).sin() * (i % 90 + 1) as f32).collect();
    let mut data = vec![0; rows * cols];
    let mut by_32 = vec![0; scales_len(rows, cols)];
    quantize_rows(&src, rows, cols, &QuantFormat::MXFP8, &mut data, &mut by_32).unwrap();
    let mut bytes = vec![0; packed::fp4_len(rows, cols)];
    let mut by_16 = vec![0; nvfp4::scales_len(rows, cols)];
    let (format, common) = (QuantFormat::NVFP4, nvfp4::Common::nearest(nvfp4::amax(&src)));
    nvfp4::quantize_rows(&src, rows, cols, &format, &common, &mut bytes, &mut by_16).unwrap();
    for (plain, vector) in [(by_32, 32), (by_16, 16)] {
        let blocks = cols.div_ceil(vector);
        let mut tiles = vec![0xEE; tiled_len(rows, blocks)];
        to_tiles(&plain, rows, blocks, &mut tiles).unwrap();
        for (row, col) in [(0, 0), (31, 33), (32, 199), (127, 64), (128, 130), (149, 199)] {
            let expected = plain[row * blocks + col / vector];
            assert_eq!(tiles[offset(row, col / vector, blocks)], expected);
            // As published: a tile covers 128 rows and 4 vectors.
            let tile = row / 128 * blocks.div_ceil(4) + col / (4 * vector);
            let place = row % 32 * 16 + row % 128 / 32 * 4 + col / vector % 4;
            assert_eq!(tiles[tile * 512 + place], expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tiles_round_trip(rows in 0_usize..300, blocks in 0_usize..14, seed in any::<u8>()) {
        // Never zero, so that padding can be told from scales.
        let plain: Vec<u8> =
            (0..rows * blocks).map(|i| (i.wrapping_mul(37) as u8 ^ seed).max(1)).collect();
        let mut tiles = vec![0xEE; tiled_len(rows, blocks)];
        to_tiles(&plain, rows, blocks, &mut tiles).unwrap();
        for row in 0..rows {
            for block in 0..blocks {
                prop_assert_eq!(tiles[offset(row, block, blocks)], plain[row * blocks + block]);
            }
        }
        let padding = tiles.iter().filter(|&&scale| scale == 0).count();
        prop_assert_eq!(padding, tiles.len() - plain.len());
        let mut back = vec![0xEE; plain.len()];
        from_tiles(&tiles, rows, blocks, &mut back).unwrap();
        prop_assert_eq!(back, plain);
    }
}

/// Every code under every scale, in f64.
#[test]
fn dequantization_is_the_product() {
    let data: Vec<u8> = (0..=u8::MAX).collect();
    let decoders = [
        (ElementFormat::E4M3, e4m3::decode as fn(u8) -> f32, 3),
        (ElementFormat::E5M2, e5m2::decode as fn(u8) -> f32, 10),
        (ElementFormat::E3M2, e3m2::decode as fn(u8) -> f32, 0),
        (ElementFormat::E2M3, e2m3::decode as fn(u8) -> f32, 0),
        (ElementFormat::E2M1, e2m1::decode as fn(u8) -> f32, 0),
    ];
    for (element, decode, exact_from) in decoders {
        let format = QuantFormat::mx(element);
        for scale in 0..=u8::MAX {
            let scales = [scale; 8];
            let (mut wide, mut narrow) = ([0.0_f32; 256], [bf16::ZERO; 256]);
            dequantize_rows(&data, &scales, 1, 256, &format, &mut wide).unwrap();
            dequantize_rows(&data, &scales, 1, 256, &format, &mut narrow).unwrap();
            for (&code, (&wide, &narrow)) in data.iter().zip(wide.iter().zip(&narrow)) {
                let product = f64::from(decode(code)) * f64::from(e8m0::decode(scale));
                let what = format!("{element} {code:#04x} * 2^({scale} - 127)");
                assert_eq!(wide.is_nan(), product.is_nan(), "{what}");
                assert_eq!(narrow.is_nan(), product.is_nan(), "{what}");
                if product.is_nan() {
                    continue;
                }
                assert_eq!(wide.to_bits(), (product as f32).to_bits(), "{what}");
                if wide.is_finite() {
                    assert_eq!(f64::from(wide), product, "{what}: exact");
                }
                assert_eq!(narrow, bf16::from_f32(wide), "{what}");
                if scale >= exact_from {
                    assert_eq!(narrow.to_f32(), wide, "{what}: exact");
                }
            }
        }
    }
}

#[test]
fn ragged_rows_dequantize() {
    // 70 = 32 + 32 + 6 columns; scales 2^0, 2^1, 2^2 in the first row, 2^3.. in the second.
    let data = [e4m3::encode(1.5, Default::default(), Default::default()); 140];
    let scales = [127, 128, 129, 130, 131, 132];
    let mut out = [0.0_f32; 140];
    dequantize_rows(&data, &scales, 2, 70, &QuantFormat::MXFP8, &mut out).unwrap();
    for (i, &value) in out.iter().enumerate() {
        let block = i / 70 * 3 + i % 70 / 32;
        assert_eq!(value, 1.5 * 2.0_f32.powi(block as i32), "{i}");
    }
    let error = dequantize_rows(&data, &scales, 2, 70, &QuantFormat::MXFP8, &mut out[1..]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`out` of a 2 x 70 matrix: expected 140 elements, got 139"
    );
    let empty: &mut [f32] = &mut [];
    dequantize_rows(&[], &[], 0, 70, &QuantFormat::MXFP8, empty).unwrap();
    dequantize_rows(&[], &[], 3, 0, &QuantFormat::MXFP8, empty).unwrap();
}
