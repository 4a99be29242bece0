//! What is quantized from finite numbers comes back finite, in every format and by every path.

use deepwell_precision::{
    BlockShape, ElementFormat, ElementRounding, Granularity, Philox, QuantFormat, ScaleRule,
    Source, dequantize_rows, e8m0, nvfp4, nvfp4::ScaleBound, packed, quantize_both,
    quantize_columns, quantize_rows, quantize_rows_stochastic, scales_len, ue4m3,
};
use deepwell_precision::{DequantizedValue, ScaleFormat};
use half::bf16;
use proptest::prelude::*;

const TINY: f32 = f32::from_bits(1);

/// Every format with scales that are powers of two.
fn mx_formats() -> Vec<QuantFormat> {
    let mut formats = Vec::new();
    for &element in ElementFormat::ALL {
        for &rule in ScaleRule::ALL {
            for &granularity in Granularity::ALL {
                for &shape in BlockShape::ALL {
                    let format = QuantFormat::mx(element).with_scale_rule(rule);
                    formats.push(format.with_granularity(granularity).with_shape(shape));
                }
            }
        }
    }
    formats
}

/// The transpose of a [rows, cols] matrix.
fn transposed<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// Asserts that every value is finite, has the sign of its source and is not far from it.
fn close<S: Source, T: DequantizedValue + Into<f32>>(src: &[S], back: &[T], what: &str) {
    for (i, (x, &y)) in src.iter().zip(back).enumerate() {
        let (x, y): (f32, f32) = (x.to_f32(), y.into());
        assert!(y.is_finite(), "{what}: element {i} is {x:e} and comes back as {y:e}");
        assert!(y == 0.0 || (y < 0.0) == (x < 0.0), "{what}: element {i}, {x:e} becomes {y:e}");
        // Rounded at random, four bits lose the most: less than half of the value.
        let is_large = x.abs() >= 2.0_f32.powi(126);
        assert!(!is_large || (y / x) > 0.49, "{what}: element {i}, {x:e} becomes {y:e}");
    }
}

/// One operand back to numbers, of both types, and its codes and scales by their definitions.
fn check_mx<S: Source>(
    src: &[S],
    (rows, cols): (usize, usize),
    format: &QuantFormat,
    (data, scales): (&[u8], &[u8]),
    what: &str,
) {
    let what = format!("{what} {format} {:?}", format.scale);
    let mut wide = vec![0.0_f32; rows * cols];
    dequantize_rows(data, scales, rows, cols, format, &mut wide).unwrap();
    close(src, &wide, &what);
    let mut narrow = vec![bf16::ZERO; rows * cols];
    dequantize_rows(data, scales, rows, cols, format, &mut narrow).unwrap();
    close(src, &narrow, &what);
    for (i, &code) in data.iter().enumerate() {
        let scale = scales[i / cols * cols.div_ceil(32) + i % cols / 32];
        let value = format.element.decode(code) * e8m0::decode(scale);
        assert_eq!(value.to_bits(), wide[i].to_bits(), "{what}: element {i}");
    }
}

fn check_all_mx<S: Source>(src: &[S], rows: usize, cols: usize, what: &str) {
    let empty = |rows, cols| (vec![0xAA; rows * cols], vec![0xAA; scales_len(rows, cols)]);
    let src_t = transposed(src, rows, cols);
    for format in mx_formats() {
        let (mut data, mut scales) = empty(rows, cols);
        let (mut data_t, mut scales_t) = empty(cols, rows);
        quantize_rows(src, rows, cols, &format, &mut data, &mut scales).unwrap();
        check_mx(src, (rows, cols), &format, (&data, &scales), &format!("{what} rows"));
        quantize_columns(src, rows, cols, &format, &mut data_t, &mut scales_t).unwrap();
        let of_columns = format!("{what} columns");
        check_mx(&src_t, (cols, rows), &format, (&data_t, &scales_t), &of_columns);

        let (mut both, mut both_t) = (empty(rows, cols), empty(cols, rows));
        let by_row = (&mut both.0[..], &mut both.1[..]);
        let by_column = (&mut both_t.0[..], &mut both_t.1[..]);
        quantize_both(src, rows, cols, &format, by_row, by_column).unwrap();
        assert_eq!((both, both_t), ((data, scales), (data_t, scales_t)), "{what} {format}");
    }
    for &element in ElementFormat::ALL {
        for rule in [ScaleRule::Rceil, ScaleRule::OcpFloor] {
            let format = QuantFormat::mx(element).with_scale_rule(rule);
            let (mut data, mut scales) = empty(rows, cols);
            for seed in 0..4 {
                let philox = Philox { seed, stream: 1 };
                let (to, scales) = (&mut data, &mut scales);
                quantize_rows_stochastic(src, rows, cols, &format, philox, to, scales).unwrap();
                let what = format!("{what} at random, seed {seed}");
                check_mx(src, (rows, cols), &format, (&data, &*scales), &what);
            }
        }
    }
}

fn check_nvfp4<S: Source>(src: &[S], rows: usize, cols: usize, what: &str) {
    let src_t = transposed(src, rows, cols);
    for &bound in ScaleBound::ALL {
        for &shape in BlockShape::ALL {
            for &rounding in ElementRounding::ALL {
                let scale = ScaleFormat::Ue4m3(bound);
                let format = QuantFormat { scale, ..QuantFormat::NVFP4 };
                let format = format.with_shape(shape).with_rounding(rounding);
                let philox = format.is_stochastic().then_some(Philox { seed: 3, stream: 0 });
                let common = nvfp4::Common { amax: nvfp4::amax(src), philox, words: None };
                let what = format!("{what} {format} {bound}");
                let back = |src: &[S], rows, cols, bytes: &[u8], scales: &[u8], of_tensor| {
                    assert!(scales.iter().all(|&scale| scale != ue4m3::CODE_NAN), "{what}");
                    let mut wide = vec![0.0_f32; rows * cols];
                    nvfp4::dequantize_rows(bytes, scales, of_tensor, rows, cols, &mut wide)
                        .unwrap();
                    close(src, &wide, &what);
                    let mut narrow = vec![bf16::ZERO; rows * cols];
                    nvfp4::dequantize_rows(bytes, scales, of_tensor, rows, cols, &mut narrow)
                        .unwrap();
                    close(src, &narrow, &what);
                };
                let empty = |rows, cols| {
                    (vec![0; packed::fp4_len(rows, cols)], vec![0; nvfp4::scales_len(rows, cols)])
                };
                let (mut bytes, mut scales) = empty(rows, cols);
                let (of_tensor, _) = nvfp4::quantize_rows(
                    src,
                    rows,
                    cols,
                    &format,
                    &common,
                    &mut bytes,
                    &mut scales,
                )
                .unwrap();
                back(src, rows, cols, &bytes, &scales, of_tensor);
                let (mut bytes, mut scales) = empty(cols, rows);
                let (of_tensor, _) = nvfp4::quantize_columns(
                    src,
                    rows,
                    cols,
                    &format,
                    &common,
                    &mut bytes,
                    &mut scales,
                )
                .unwrap();
                back(&src_t, cols, rows, &bytes, &scales, of_tensor);
            }
        }
    }
}

fn check(src: &[f32], rows: usize, cols: usize, what: &str) {
    let narrow: Vec<bf16> = src
        .iter()
        .map(|&x| bf16::from_f32(x))
        .map(|x| if x.is_finite() { x } else { bf16::MAX.copysign(x) })
        .collect();
    check_all_mx(src, rows, cols, what);
    check_nvfp4(src, rows, cols, what);
    let what = format!("bf16 {what}");
    check_all_mx(&narrow, rows, cols, &what);
    check_nvfp4(&narrow, rows, cols, &what);
}

/// RCEIL gave 3.4e38 a scale under which its element rounds to 2^128.
#[test]
fn issue_31_rceil_turned_the_largest_numbers_into_infinity() {
    let halves = |x: f32| f32::from_bits(x.to_bits() - (1 << 23));
    // Repeated over matrices of a ragged and of a whole tile.
    for (what, pattern) in [
        ("largest", &[f32::MAX][..]),
        ("largest of bf16", &[bf16::MAX.to_f32()]),
        ("both signs", &[f32::MAX, -f32::MAX]),
        ("3.4e38", &[3.4e38, -3.4e38, 1.0]),
        ("the last binade", &[2.0e38, 2.6e38, 3.0e38, -3.2e38, 3.3e38]),
        ("beside its half", &[f32::MAX, halves(f32::MAX), -halves(halves(f32::MAX))]),
        ("beside the smallest", &[f32::MAX, TINY, -TINY, 0.0, -0.0]),
        ("smallest", &[TINY, -TINY]),
        ("smallest normal", &[f32::MIN_POSITIVE, -f32::MIN_POSITIVE, TINY]),
        ("zero", &[0.0, -0.0]),
        ("mixed blocks", &[1.0, -1.0, 0.0, 448.0, TINY]),
    ] {
        for (rows, cols) in [(3, 70), (129, 40)] {
            let src: Vec<f32> = (0..rows * cols).map(|i| pattern[i % pattern.len()]).collect();
            check(&src, rows, cols, what);
        }
        // One row of a matrix of ordinary numbers.
        let (rows, cols) = (34, 64);
        let ordinary = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 16.0;
        let src: Vec<f32> = (0..rows * cols)
            .map(|i| if i / cols == 7 { pattern[i % pattern.len()] } else { ordinary(i) })
            .collect();
        check(&src, rows, cols, &format!("a row of {what}"));
    }
}

/// The last step below the change of the rule, by hand: an element, its scale and its value.
#[test]
fn the_last_binade_by_hand() {
    let power = |exponent: i32| 2.0_f64.powi(exponent) as f32;
    for (element, x, scale, expected) in [
        (ElementFormat::E4M3, f32::MAX, 246, 1.75),
        (ElementFormat::E4M3, 1.9 * power(127), 246, 1.75),
        (ElementFormat::E4M3, 1.875 * power(127), 247, 1.875),
        (ElementFormat::E4M3, 1.80 * power(127), 247, 1.75),
        (ElementFormat::E5M2, f32::MAX, 239, 1.75),
        (ElementFormat::E3M2, f32::MAX, 250, 1.75),
        (ElementFormat::E2M3, f32::MAX, 252, 1.875),
        (ElementFormat::E2M1, f32::MAX, 252, 1.5),
    ] {
        let format = QuantFormat::mx(element);
        let (mut data, mut scales, mut back) = ([0; 2], [0; 1], [0.0_f32; 2]);
        quantize_rows(&[-x, 0.0], 1, 2, &format, &mut data, &mut scales).unwrap();
        dequantize_rows(&data, &scales, 1, 2, &format, &mut back).unwrap();
        assert_eq!((scales, back), ([scale], [-expected * power(127), 0.0]), "{element} {x:e}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Any finite bits; by half of the seeds from the last two binades alone.
    #[test]
    fn any_finite_matrix(rows in 1_usize..36, cols in 1_usize..140, seed in any::<u64>()) {
        let mut state = seed | 1;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u32
        };
        let src: Vec<f32> = (0..rows * cols)
            .map(|_| {
                let bits = random();
                match seed % 2 {
                    0 => f32::from_bits((bits % 0x7F80_0000) | (bits & 0x8000_0000)),
                    _ => f32::from_bits((0x7F7F_FFFF - bits % (1 << 24)) | (bits & 0x8000_0000)),
                }
            })
            .collect();
        check(&src, rows, cols, "any");
    }
}
