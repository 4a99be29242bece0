//! Scale tiles against the published formula, and dequantization.

use deepwell_precision::scale_tiles::{from_tiles, offset, tiled_len, to_tiles};
use deepwell_precision::{ElementFormat, dequantize_rows, e4m3, e5m2, e8m0};
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
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    let decoders = [
        (ElementFormat::E4M3, e4m3::decode as fn(u8) -> f32, 3),
        (ElementFormat::E5M2, e5m2::decode as fn(u8) -> f32, 10),
    ];
    for (element, decode, exact_from) in decoders {
        for scale in 0..=u8::MAX {
            let scales = [scale; 8];
            let (mut wide, mut narrow) = ([0.0_f32; 256], [bf16::ZERO; 256]);
            dequantize_rows(&codes, &scales, 1, 256, element, &mut wide).unwrap();
            dequantize_rows(&codes, &scales, 1, 256, element, &mut narrow).unwrap();
            for (&code, (&wide, &narrow)) in codes.iter().zip(wide.iter().zip(&narrow)) {
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
    dequantize_rows(&data, &scales, 2, 70, ElementFormat::E4M3, &mut out).unwrap();
    for (i, &value) in out.iter().enumerate() {
        let block = i / 70 * 3 + i % 70 / 32;
        assert_eq!(value, 1.5 * 2.0_f32.powi(block as i32), "{i}");
    }
    let error = dequantize_rows(&data, &scales, 2, 70, ElementFormat::E4M3, &mut out[1..]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`out` of a 2 x 70 matrix: expected 140 elements, got 139"
    );
    let empty: &mut [f32] = &mut [];
    dequantize_rows(&[], &[], 0, 70, ElementFormat::E4M3, empty).unwrap();
    dequantize_rows(&[], &[], 3, 0, ElementFormat::E4M3, empty).unwrap();
}
