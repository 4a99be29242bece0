//! The vector kernels against the definition, bit for bit, and what the format promises.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::packed::unpack_fp4;
use crate::{ElementFormat, Overflow, Rounding};

/// Data (one to a byte), scales and statistics of one operand.
#[derive(Debug, PartialEq)]
struct Quantized {
    data: Vec<u8>,
    scales: Vec<u8>,
    stats: QuantStats,
}

/// The definition, one element at a time, of the matrix whose element (o, k) is `at(o, k)`.
fn reference(
    at: impl Fn(usize, usize) -> f32,
    outer: usize,
    contraction: usize,
    amax: f32,
    spec: &Nvfp4Spec,
) -> Quantized {
    let mut data = vec![0; outer * contraction];
    let mut scales = vec![0; scales_len(outer, contraction)];
    let mut stats = QuantStats { elements: data.len() as u64, ..QuantStats::default() };
    let global = encode_scale(amax, spec.bound);
    let height = if spec.block == BlockShape::Square { 16 } else { 1 };
    let blocks = contraction.div_ceil(16);
    for outer_start in (0..outer).step_by(height) {
        let outer_end = (outer_start + height).min(outer);
        for block in 0..blocks {
            let (start, end) = (block * 16, (block * 16 + 16).min(contraction));
            let places =
                || (outer_start..outer_end).flat_map(move |o| (start..end).map(move |k| (o, k)));
            let finite = places().all(|(o, k)| at(o, k).is_finite());
            let block_amax = places().map(|(o, k)| at(o, k).abs()).fold(0.0, f32::max);
            let wanted = match spec.order {
                ScaleOrder::Deepwell => block_amax / 6.0 * global,
                ScaleOrder::Te => block_amax * (global * (1.0 / 6.0)),
            };
            let wanted = wanted.min(448.0);
            let scale = if finite {
                ue4m3::encode(wanted, Rounding::NearestEven, Overflow::Saturate)
            } else {
                ue4m3::CODE_NAN
            };
            stats.scale_clamps += u64::from(scale == 0 && block_amax != 0.0);
            let factor = match scale {
                ue4m3::CODE_NAN => f32::NAN,
                _ if spec.order == ScaleOrder::Te => {
                    (1.0 / (ue4m3::decode(scale) * (1.0 / global))).min(f32::MAX)
                }
                0 => 0.0,
                _ => (global / ue4m3::decode(scale)).min(f32::MAX),
            };
            for (o, k) in places() {
                let (x, i) = (at(o, k), o * contraction + k);
                scales[o * blocks + block] = scale;
                data[i] = match spec.stochastic {
                    Some(philox) => {
                        ElementFormat::E2M1.encode_stochastic(x * factor, philox.word(i as u64))
                    }
                    None => e2m1::encode(x * factor, Rounding::NearestEven, Overflow::Saturate),
                };
                if x.is_finite() {
                    stats.amax = stats.amax.max(x.abs());
                } else {
                    stats.nonfinite += 1;
                }
                stats.underflows += u64::from(x != 0.0 && data[i] & 7 == 0);
                stats.saturations += u64::from(x.is_finite() && (x * factor).abs() > 6.0);
            }
        }
    }
    Quantized { data, scales, stats }
}

/// Runs a kernel into buffers full of what no test expects.
fn run(
    outer: usize,
    contraction: usize,
    kernel: impl FnOnce(&mut [u8], &mut [u8]) -> QuantStats,
) -> Quantized {
    let mut bytes = vec![0xEE; fp4_len(outer, contraction)];
    let mut scales = vec![0xEE; scales_len(outer, contraction)];
    let stats = kernel(&mut bytes, &mut scales);
    let mut data = vec![0xEE; outer * contraction];
    unpack_fp4(&bytes, outer, contraction, &mut data).unwrap();
    if contraction % 2 == 1 {
        let odd = bytes.chunks_exact(contraction.div_ceil(2)).all(|row| row.last() < Some(&16));
        assert!(odd, "the last nibble of an odd row is zero");
    }
    Quantized { data, scales, stats }
}

fn check<S: Source>(level: Level, src: &[S], rows: usize, cols: usize, amax: f32, what: &str) {
    for spec in all_specs() {
        let what = format!("{what} {rows} x {cols} {spec:?} {level:?}");
        let spec = Nvfp4Spec { words: (0, cols as u64), amax, ..spec };
        let global = encode_scale(amax, spec.bound);
        let expected = reference(|r, c| src[r * cols + c].to_f32(), rows, cols, amax, &spec);
        let got = run(rows, cols, |bytes, scales| {
            rows_at(level, S::values(src), cols, global, spec, bytes, scales)
        });
        assert_same(&got, &expected, &format!("rows {what}"));
        let spec = Nvfp4Spec { words: (0, rows as u64), ..spec };
        let expected = reference(|c, r| src[r * cols + c].to_f32(), cols, rows, amax, &spec);
        let got = run(cols, rows, |bytes, scales| {
            columns_at(level, S::values(src), cols, (0, rows), global, spec, bytes, scales)
        });
        assert_same(&got, &expected, &format!("columns {what}"));
    }
}

fn assert_same(got: &Quantized, expected: &Quantized, what: &str) {
    assert_eq!(got.scales, expected.scales, "{what}");
    let first = got.data.iter().zip(&expected.data).position(|(got, expected)| got != expected);
    if let Some(i) = first {
        panic!("{what}: element {i} is {:#x}, expected {:#x}", got.data[i], expected.data[i]);
    }
    assert_eq!(got.stats, expected.stats, "{what}");
}

fn all_specs() -> Vec<Nvfp4Spec> {
    let mut specs = Vec::new();
    for &block in BlockShape::ALL {
        for &bound in ScaleBound::ALL {
            for stochastic in [None, Some(Philox { seed: 5, stream: 6 })] {
                for &order in ScaleOrder::ALL {
                    let spec = Nvfp4Spec { block, bound, stochastic, order, ..Default::default() };
                    specs.push(spec);
                }
            }
        }
    }
    specs
}

/// Smooth, spread over many binades, or broken in one of 500 elements.
fn matrix(elements: usize, kind: usize) -> Vec<f32> {
    (0..elements)
        .map(|i| {
            let x = (i as f32 * 0.7213).sin();
            let mixed = (i as u32).wrapping_mul(0x9E37_79B9) >> 8;
            match kind {
                0 => x,
                1 => x * f32::from_bits((mixed % 200 + 20) << 23),
                2 => x * f32::from_bits(mixed % 0x0040_0000),
                _ => match mixed % 1500 {
                    0 => f32::NAN,
                    1 => f32::INFINITY,
                    2 => f32::NEG_INFINITY,
                    3..400 => 0.0,
                    _ => x,
                },
            }
        })
        .collect()
}

#[test]
fn kernels_follow_the_definition() {
    let shapes = [
        (0, 4),
        (4, 0),
        (1, 1),
        (1, 17),
        (16, 16),
        (17, 33),
        (40, 255),
        (33, 300),
        (300, 31),
        (5, 1031),
        (130, 560),
    ];
    for (rows, cols) in shapes {
        for kind in 0..4 {
            let src = matrix(rows * cols, kind);
            let narrow: Vec<bf16> = src.iter().map(|&x| bf16::from_f32(x)).collect();
            let what = format!("kind {kind}");
            check(Level::Native, &src, rows, cols, amax(&src), &what);
            check(Level::Native, &narrow, rows, cols, amax(&narrow), &what);
            check(Level::Baseline, &src, rows, cols, amax(&src), &what);
            check(Level::Baseline, &narrow, rows, cols, amax(&narrow), &what);
            // A caller whose amax is that of something smaller.
            check(Level::Native, &src, rows, cols, amax(&src) / 16.0, &what);
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn no_bit_depends_on_the_number_of_threads() {
    let (rows, cols) = (301, 700);
    let src = matrix(rows * cols, 3);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            assert_eq!(
                amax(&src),
                src.iter().filter(|x| x.is_finite()).fold(0.0_f32, |a, x| a.max(x.abs()))
            );
            check(Level::Native, &src, rows, cols, amax(&src), &format!("{threads} threads"));
        });
    }
}

/// Amax, bound, factor into the format.
#[test]
fn tensor_scales() {
    for (amax, bound, expected) in [
        (2688.0, ScaleBound::Max448, 1.0),
        (-2688.0, ScaleBound::Max448, 1.0),
        (1536.0, ScaleBound::Max256, 1.0),
        (1.0, ScaleBound::Max256, 1536.0),
        (0.0, ScaleBound::Max448, 1.0),
        (f32::from_bits(1), ScaleBound::Max448, f32::MAX),
        (f32::MAX, ScaleBound::Max448, 2688.0 / f32::MAX),
        (f32::INFINITY, ScaleBound::Max448, 2688.0 / f32::MAX),
        (f32::NAN, ScaleBound::Max448, 2688.0 / f32::MAX),
    ] {
        assert_eq!(encode_scale(amax, bound), expected, "{amax:e} {bound}");
    }
}

#[test]
fn what_is_not_finite_comes_back_as_nan() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut src = [1.0_f32; 48];
        src[20] = bad;
        let (mut bytes, mut scales, mut back) = ([0; 24], [0; 3], [0.0_f32; 48]);
        let (format, common) = (QuantFormat::NVFP4, Common::nearest(1.0));
        let (scale, stats) =
            quantize_rows(&src, 1, 48, &format, &common, &mut bytes, &mut scales).unwrap();
        dequantize_rows(&bytes, &scales, scale, 1, 48, &mut back).unwrap();
        assert_eq!(stats.nonfinite, 1);
        for (i, y) in back.iter().enumerate() {
            assert_eq!(y.is_nan(), (16..32).contains(&i), "{i}");
        }
    }
}

/// Every code under every scale byte.
#[test]
fn dequantization_is_the_product() {
    let bytes: Vec<u8> = (0..8).map(|i| (2 * i) | (2 * i + 1) << 4).collect();
    for scale in 0..=u8::MAX {
        for tensor_scale in [1.0, 0.3_f32, 1e-30] {
            let (mut wide, mut narrow) = ([0.0_f32; 16], [bf16::ZERO; 16]);
            dequantize_rows(&bytes, &[scale], tensor_scale, 1, 16, &mut wide).unwrap();
            dequantize_rows(&bytes, &[scale], tensor_scale, 1, 16, &mut narrow).unwrap();
            for code in 0..16_u8 {
                let inner = f64::from(e2m1::decode(code)) * f64::from(ue4m3::decode(scale));
                let expected = (inner * f64::from(tensor_scale)) as f32;
                let (wide, narrow) = (wide[usize::from(code)], narrow[usize::from(code)]);
                if inner.is_nan() {
                    assert!(wide.is_nan() && narrow.is_nan());
                    continue;
                }
                assert_eq!(wide.to_bits(), expected.to_bits(), "{code:#x} {scale:#x}");
                assert_eq!(narrow, bf16::from_f32(wide), "{code:#x} {scale:#x}");
            }
        }
    }
}

#[test]
fn wrong_lengths() {
    let (format, common) = (QuantFormat::NVFP4, Common::nearest(1.0));
    let error = quantize_rows(&[0.0_f32; 40], 2, 20, &format, &common, &mut [0; 19], &mut [0; 4]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`bytes` of a 2 x 20 matrix: expected 20 elements, got 19"
    );
    let error =
        quantize_columns(&[0.0_f32; 40], 2, 20, &format, &common, &mut [0; 20], &mut [0; 4]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`scales_t` of a 2 x 20 matrix: expected 20 elements, got 4"
    );
    assert!(quantize_rows::<f32>(&[], usize::MAX, 2, &format, &common, &mut [], &mut []).is_err());
}

#[test]
fn other_formats_are_refused() {
    let stochastic = QuantFormat::NVFP4.with_rounding(crate::ElementRounding::Stochastic);
    let words = Common { philox: Some(Philox::default()), ..Common::default() };
    for (format, common, expected) in [
        (QuantFormat::MXFP8, Common::default(), "expected NVFP4, got `mxfp8 1x32`"),
        (
            QuantFormat { block: crate::Block::row(32), ..QuantFormat::NVFP4 },
            Common::default(),
            "expected NVFP4 with blocks of 1x16 or 16x16, got `nvfp4 1x32`",
        ),
        (
            stochastic,
            Common::default(),
            "expected rounding to nearest where no words are given, got `nvfp4 1x16 stochastic`",
        ),
        (
            QuantFormat::NVFP4,
            words,
            "expected stochastic rounding where words are given, got `nvfp4 1x16`",
        ),
    ] {
        let error = quantize_rows(&[0.0_f32; 2], 1, 2, &format, &common, &mut [0], &mut [0]);
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Quantizing again with the same amax changes no byte where block scales are normal numbers,
    /// and an error is at most half the spacing at the scaled value unless it saturated.
    #[test]
    fn values_come_back(
        rows in 1_usize..20,
        cols in 1_usize..70,
        seed in any::<u32>(),
        exponent in -30_i32..30,
        spec_index in 0_usize..4,
    ) {
        // The rows of `all_specs` without chance, in the first order.
        let spec = all_specs()[spec_index * 4];
        let src: Vec<f32> = (0..rows * cols)
            .map(|i| {
                let mixed = (i as u32).wrapping_add(seed).wrapping_mul(0x9E37_79B9) >> 8;
                (mixed as f32 / (1 << 23) as f32 - 1.0) * 2.0_f32.powi(exponent)
            })
            .collect();
        let amax = amax(&src);
        let quantize = |src: &[f32]| {
            let mut bytes = vec![0; fp4_len(rows, cols)];
            let mut scales = vec![0; scales_len(rows, cols)];
            let common = Common::nearest(amax);
            let scale = ScaleFormat::Ue4m3(spec.bound);
            let format = QuantFormat { scale, ..QuantFormat::NVFP4 };
            let format = format.with_shape(spec.block);
            let (scale, _) =
                quantize_rows(src, rows, cols, &format, &common, &mut bytes, &mut scales).unwrap();
            let mut back = vec![0.0_f32; rows * cols];
            dequantize_rows(&bytes, &scales, scale, rows, cols, &mut back).unwrap();
            (bytes, scales, scale, back)
        };
        let (bytes, scales, scale, once) = quantize(&src);
        let (bytes_again, scales_again, _, twice) = quantize(&once);
        if scales.iter().all(|&scale| scale >= 8) {
            prop_assert_eq!(bytes, bytes_again);
            prop_assert_eq!(&scales, &scales_again);
            prop_assert_eq!(&once, &twice);
        }
        for (i, (&x, &y)) in src.iter().zip(&once).enumerate() {
            let code = scales[i / cols * cols.div_ceil(16) + i % cols / 16];
            let unit = f64::from(ue4m3::decode(code)) * f64::from(scale);
            let (x, y) = (f64::from(x) / unit, f64::from(y) / unit);
            if unit == 0.0 {
                continue;
            }
            if x.abs() > 6.0 {
                prop_assert!((y - 6.0_f64.copysign(x)).abs() < 1e-6, "{x} became {y}");
                continue;
            }
            let half_spacing = match x.abs() {
                0.0..2.0 => 0.25,
                2.0..4.0 => 0.5,
                _ => 1.0,
            };
            // The factor and the two products are each rounded to f32.
            let tolerance = half_spacing + x.abs() * 4.0 * f64::from(f32::EPSILON);
            prop_assert!((x - y).abs() <= tolerance, "{x} became {y}");
        }
    }
}
