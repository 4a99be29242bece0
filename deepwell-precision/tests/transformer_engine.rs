//! NVFP4 in the order `te` against the semantics that Transformer Engine writes down, computed
//! here again from bit patterns and without the crate's encoders.

use deepwell_precision::nvfp4::{self, Common, ScaleOrder};
use deepwell_precision::{ElementRounding, Hadamard16, Philox, QuantFormat, packed};
use half::bf16;

/// The non-negative E2M1 values, by code.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Source of test values: a small linear congruence.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// Roughly normal: a sum of twelve uniform numbers.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| f64::from(self.next()) / f64::from(u32::MAX)).sum::<f64>() as f32 - 6.0
    }
}

/// E4M3 of a non-negative number, to nearest even, by search over all codes.
fn e4m3(x: f32) -> u8 {
    let value = |code: u8| {
        let (exponent, fraction) = (i32::from(code >> 3), f64::from(code & 7));
        match exponent {
            0 => fraction / 8.0 * 2f64.powi(-6),
            _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
        }
    };
    let x = f64::from(x);
    let distance = |code: u8| (value(code) - x).abs();
    let nearest = (0..=0x7E).map(distance).fold(f64::INFINITY, f64::min);
    let candidates = (0..=0x7E_u8).filter(|&code| distance(code) == nearest);
    candidates.min_by_key(|code| code & 1).unwrap_or_default()
}

fn e4m3_value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3), f32::from(code & 7));
    match exponent {
        0 => fraction / 8.0 * 2f32.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    }
}

/// E2M1 by the boundaries between the values, ties to the even code.
fn e2m1(x: f32) -> u8 {
    let boundaries = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let magnitude = x.abs();
    let beyond = |(i, &boundary): (usize, &f32)| match i % 2 {
        0 => magnitude > boundary,
        _ => magnitude >= boundary,
    };
    let code = boundaries.iter().enumerate().filter(|&it| beyond(it)).count() as u8;
    code | u8::from(x.is_sign_negative()) << 3
}

/// Bytes of an operand, one element to a byte.
#[derive(Debug, PartialEq)]
struct Bytes {
    data: Vec<u8>,
    scales: Vec<u8>,
    tensor_scale: f32,
}

/// What is quantized: element (outer, k) of an operand.
struct Operand {
    values: Vec<f32>,
    outer: usize,
    k: usize,
}

impl Operand {
    fn rows(src: &[bf16], rows: usize, cols: usize) -> Operand {
        Operand { values: src.iter().map(|x| x.to_f32()).collect(), outer: rows, k: cols }
    }

    fn columns(src: &[bf16], rows: usize, cols: usize) -> Operand {
        let at = |i: usize| src[i % rows * cols + i / rows].to_f32();
        Operand { values: (0..src.len()).map(at).collect(), outer: cols, k: rows }
    }

    /// y = x · diag(signs) · H / 4 for each 16 elements along k, by the matrix H whose entry (i, j)
    /// is -1 to the number of common bits, then BF16. Sums are in f64, which holds them exactly.
    fn transformed(mut self) -> Operand {
        const SIGNS: &[u8; 16] = b"+++-+------+-+--";
        for group in self.values.chunks_exact_mut(16) {
            let x: Vec<f64> = group
                .iter()
                .zip(SIGNS)
                .map(|(&x, sign)| f64::from(x) * if *sign == b'-' { -1.0 } else { 1.0 })
                .collect();
            for (i, y) in group.iter_mut().enumerate() {
                let entry =
                    |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let sum = (0..16).fold(0.0, |sum, j| sum + entry(j) * x[j]);
                *y = bf16::from_f64(sum / 4.0).to_f32();
            }
        }
        self
    }

    fn amax(&self) -> f32 {
        let finite = self.values.iter().filter(|x| x.is_finite());
        finite.fold(0.0, |amax, x| amax.max(x.abs()))
    }

    /// The written semantics; `random` gives a word for each element of gradients. Deliberate
    /// difference: a block with NaN or an infinity becomes NaN as a whole, where Transformer Engine
    /// writes finite codes, and such elements do not count in `amax`.
    fn quantized(&self, square: bool, four_six: bool, random: Option<Philox>) -> Bytes {
        let (Operand { values, outer, k }, amax) = (self, self.amax());
        let bound = if four_six { 256.0 } else { 448.0 };
        let encode = match amax {
            0.0 => 1.0,
            _ => (bound * 6.0 / amax).min(f32::MAX),
        };
        let decode = 1.0 / encode;
        let factor = |scale: u8| (1.0 / (e4m3_value(scale) * decode)).min(f32::MAX);
        let (blocks, height) = (k.div_ceil(16), if square { 16 } else { 1 });
        let mut bytes = Bytes {
            data: vec![0; values.len()],
            scales: vec![0; outer * blocks],
            tensor_scale: decode,
        };
        for place in 0..outer.div_ceil(height) * blocks {
            let (band, block) = (place / blocks * height, place % blocks);
            let places: Vec<usize> = (band..(band + height).min(*outer))
                .flat_map(|row| (block * 16..(block * 16 + 16).min(*k)).map(move |at| row * k + at))
                .collect();
            let largest = places.iter().fold(0.0_f32, |amax, &at| amax.max(values[at].abs()));
            let is_finite = places.iter().all(|&at| values[at].is_finite());
            let mut scale = match four_six {
                false => e4m3((largest * (encode * (1.0 / 6.0))).min(448.0)),
                true => e4m3((largest / 6.0 * encode).min(448.0)),
            };
            if four_six && is_finite {
                let four = e4m3((largest / 6.0 * encode * 1.5).min(448.0));
                let error = |scale: u8| {
                    places.iter().fold(0.0_f32, |sum, &at| {
                        let code = e2m1(values[at] * factor(scale));
                        let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                        let value = sign * E2M1[usize::from(code & 7)] * e4m3_value(scale) * amax;
                        let difference = value / (6.0 * bound) - values[at];
                        sum + difference * difference
                    })
                };
                if error(four) < error(scale) {
                    scale = four;
                }
            }
            for &at in &places {
                let scaled = values[at] * factor(scale);
                bytes.data[at] = match (is_finite, random) {
                    (false, _) => 7,
                    (true, None) => e2m1(scaled),
                    (true, Some(philox)) => stochastic(scaled, philox.word(at as u64)),
                };
            }
            for row in band..(band + height).min(*outer) {
                bytes.scales[row * blocks + block] = if is_finite { scale } else { 0x7F };
            }
        }
        bytes
    }
}

/// The neighbour away from zero if the distance from the other, in units of 2^-32 of the gap,
/// exceeds the word.
fn stochastic(x: f32, word: u32) -> u8 {
    let magnitude = f64::from(x.abs()).min(6.0);
    let below = E2M1.iter().rposition(|&value| f64::from(value) <= magnitude).unwrap_or_default();
    let up = match E2M1.get(below + 1) {
        Some(&above) => {
            let gap = f64::from(above) - f64::from(E2M1[below]);
            let share = (magnitude - f64::from(E2M1[below])) / gap * 2f64.powi(32);
            share.floor() > f64::from(word)
        }
        None => false,
    };
    (below + usize::from(up)) as u8 | u8::from(x.is_sign_negative()) << 3
}

/// Bytes from the crate.
fn crate_bytes(
    src: &[bf16],
    [rows, cols]: [usize; 2],
    by_column: bool,
    format: &QuantFormat,
    philox: Option<Philox>,
) -> Bytes {
    let (outer, k) = if by_column { (cols, rows) } else { (rows, cols) };
    // No test expects these bytes, so that a byte not written is seen.
    let mut bytes = vec![0xEE; packed::fp4_len(outer, k)];
    let mut scales = vec![0xEE; nvfp4::scales_len(outer, k)];
    let amax = match by_column {
        true => nvfp4::amax_of_columns(src, rows, cols, format),
        false => nvfp4::amax_of_rows(src, rows, cols, format),
    };
    let common = Common { amax: amax.unwrap(), philox, words: None };
    let quantize = if by_column { nvfp4::quantize_columns } else { nvfp4::quantize_rows };
    let (tensor_scale, _) =
        quantize(src, rows, cols, format, &common, &mut bytes, &mut scales).unwrap();
    let mut data = vec![0xEE; outer * k];
    packed::unpack_fp4(&bytes, outer, k, &mut data).unwrap();
    Bytes { data, scales, tensor_scale }
}

/// Compares all operands of a matrix.
fn check(name: &str, src: &[bf16], rows: usize, cols: usize) {
    let te = QuantFormat::NVFP4.with_order(ScaleOrder::Te);
    let philox = Some(Philox { seed: 7, stream: 3 });
    let stochastic = te.with_rounding(ElementRounding::Stochastic);
    let rht = Some(Hadamard16::TRAINING);
    for by_column in [false, true] {
        let operand = || match by_column {
            true => Operand::columns(src, rows, cols),
            false => Operand::rows(src, rows, cols),
        };
        let whole_groups = operand().k.is_multiple_of(16);
        for (format, is_transformed, random) in [
            (te, false, None),
            (te.square(), false, None),
            (te.with_four_six(true), false, None),
            (stochastic, false, philox),
            (te.with_hadamard(rht), true, None),
            (stochastic.with_hadamard(rht), true, philox),
        ] {
            if is_transformed && !whole_groups {
                continue;
            }
            let what = format!("{name} {rows}x{cols} {format} columns={by_column}");
            let operand = if is_transformed { operand().transformed() } else { operand() };
            let expected = operand.quantized(format.block.is_square(), format.four_six, random);
            let got = crate_bytes(src, [rows, cols], by_column, &format, random);
            assert_eq!(got.tensor_scale.to_bits(), expected.tensor_scale.to_bits(), "{what}");
            assert_bytes(&got.scales, &expected.scales, &format!("{what}: scales"));
            assert_bytes(&got.data, &expected.data, &format!("{what}: data"));
        }
    }
}

fn assert_bytes(got: &[u8], expected: &[u8], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    if let Some(at) = (0..got.len()).find(|&at| got[at] != expected[at]) {
        panic!("{what} {at}: expected {:#x}, got {:#x}", expected[at], got[at]);
    }
}

fn matrix(count: usize, mut value: impl FnMut(usize) -> f32) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32(value(i))).collect()
}

#[test]
fn every_byte_of_random_matrices() {
    let mut random = Random(1);
    for (rows, cols) in [(16, 16), (16, 256), (48, 272), (32, 40), (17, 33), (1, 300), (300, 16)] {
        // Multiples of 2^-6: sums of 16 are exact in any order.
        let near = matrix(rows * cols, |_| (random.normal() * 64.0).round() / 64.0);
        check("normal", &near, rows, cols);
        let channels = matrix(rows * cols, |i| {
            let size = if i % cols % 61 == 3 { 32.0 } else { 1.0 };
            (random.normal() * 64.0).round() / 64.0 * size
        });
        check("outlier channels", &channels, rows, cols);
    }
}

/// Every tensor scale: 2^-120 to 2^120, and amax with all leading digits.
#[test]
fn every_byte_over_all_magnitudes() {
    let mut random = Random(2);
    for exponent in (-120..=112).step_by(8) {
        let size = 2f32.powi(exponent);
        let src = matrix(32 * 64, |_| (random.normal() * 64.0).round() / 64.0 * size);
        check(&format!("2^{exponent}"), &src, 32, 64);
    }
}

#[test]
fn every_byte_of_adversarial_blocks() {
    let tiny = f32::from_bits(0x0001_0000);
    let largest = bf16::MAX.to_f32() / 16.0;
    let rows: [(&str, &dyn Fn(usize) -> f32); 12] = [
        ("zeros", &|_| 0.0),
        ("both zeros", &|i| if i % 3 == 0 { -0.0 } else { 0.0 }),
        ("one zero block", &|i| if i / 16 % 2 == 0 { 0.0 } else { 1.0 + (i % 7) as f32 }),
        ("subnormal", &|i| tiny * (i % 5) as f32),
        ("least number", &|i| if i == 40 { f32::from_bits(0x0001_0000) } else { 0.0 }),
        ("subnormal among large", &|i| if i % 17 == 0 { 2f32.powi(100) } else { tiny }),
        ("scales that vanish", &|i| if i < 16 { 28672.0 } else { 1.0 / 1024.0 * (i / 16) as f32 }),
        ("saturating", &|i| if i % 2 == 0 { largest } else { -largest }),
        ("ties", &|i| [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0][i % 8]),
        ("NaN", &|i| if i == 100 { f32::NAN } else { (i % 9) as f32 - 4.0 }),
        ("infinite", &|i| if i == 300 { f32::INFINITY } else { (i % 9) as f32 - 4.0 }),
        ("only NaN", &|_| f32::NAN),
    ];
    for (name, value) in rows {
        for (rows, cols) in [(32, 64), (16, 16), (64, 16)] {
            check(name, &matrix(rows * cols, value), rows, cols);
        }
    }
}

/// TE#2487, llm.c#597: operands with the same random numbers. Errors of the rowwise operand, of the
/// columnwise operand and of another step are uncorrelated.
#[test]
fn rounding_errors_of_copies_are_uncorrelated() {
    let mut random = Random(3);
    let (rows, cols) = (256, 256);
    let src = matrix(rows * cols, |_| random.normal());
    let format = QuantFormat::NVFP4.with_rounding(ElementRounding::Stochastic);
    let errors = |by_column: bool, stream: u64| -> Vec<f64> {
        let philox = Some(Philox { seed: 1, stream });
        let got = crate_bytes(&src, [rows, cols], by_column, &format, philox);
        let (outer, k) = if by_column { (cols, rows) } else { (rows, cols) };
        let value = |row: usize, at: usize| {
            let code = got.data[row * k + at];
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            let scale = e4m3_value(got.scales[row * k.div_ceil(16) + at / 16]);
            f64::from(sign * E2M1[usize::from(code & 7)] * scale * got.tensor_scale)
        };
        assert_eq!(outer * k, src.len());
        (0..src.len())
            .map(|i| {
                let (r, c) = (i / cols, i % cols);
                let got = if by_column { value(c, r) } else { value(r, c) };
                got - src[i].to_f64()
            })
            .collect()
    };
    let correlation = |a: &[f64], b: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let row = errors(false, 1);
    assert!(correlation(&row, &row) > 0.999);
    // 65,536 pairs: the standard deviation of a correlation of independent errors is 0.004.
    // Elements that saturate have the same error in both copies, about 2 % of the variance.
    for (name, other) in [("columns", errors(true, 2)), ("another step", errors(false, 3))] {
        let got = correlation(&row, &other);
        assert!(got.abs() < 0.05, "{name}: {got}");
    }
}

/// TE#3281: all zeros from stochastic rounding. The mean of many roundings is the value, to 1e-4
/// of the largest element, and only its two neighbours occur.
#[test]
fn the_mean_of_stochastic_rounding_is_the_value() {
    let (rows, cols) = (1024, 256);
    let format = QuantFormat::NVFP4.with_rounding(ElementRounding::Stochastic);
    for x in [0.3_f32, 0.7, 1.1, 1.9, 2.2, 3.7, 4.5, 5.9] {
        // The first element of a block makes its scale 1, so the others are in units of E2M1.
        let src: Vec<f32> = (0..rows * cols).map(|i| if i % 16 == 0 { 6.0 } else { x }).collect();
        let above = E2M1.iter().position(|&value| value > x).unwrap();
        let (mut sum, mut count) = (0.0_f64, 0_u64);
        for stream in 0..16 {
            let mut bytes = vec![0; packed::fp4_len(rows, cols)];
            let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
            // amax 2688: a tensor scale of 1.
            let philox = Some(Philox { seed: 5, stream });
            let common = Common { amax: 2688.0, philox, words: None };
            nvfp4::quantize_rows(&src, rows, cols, &format, &common, &mut bytes, &mut scales)
                .unwrap();
            assert!(scales.iter().all(|&scale| e4m3_value(scale) == 1.0));
            let mut data = vec![0; rows * cols];
            packed::unpack_fp4(&bytes, rows, cols, &mut data).unwrap();
            for code in data.into_iter().enumerate().filter(|(i, _)| i % 16 != 0).map(|(_, it)| it)
            {
                assert!([above - 1, above].contains(&usize::from(code)), "{x} became {code}");
                sum += f64::from(E2M1[usize::from(code)]);
                count += 1;
            }
        }
        // 3.9 million draws of two values at most 2 apart: a standard deviation of 0.5e-3 at most,
        // 0.85e-4 of the largest element. The draws are fixed, so this passes always or never.
        let mean = sum / count as f64;
        assert!((mean - f64::from(x)).abs() / 6.0 < 1e-4, "{x}: {mean}");
    }
}

/// torchao: a grid of 0 blocks for some sizes, and an amax of 0, silently.
#[test]
fn every_size_has_an_amax_and_bytes() {
    let mut random = Random(4);
    for size in 1..=300 {
        let src = matrix(size, |_| (random.normal() * 64.0).round() / 64.0 + 0.5);
        check("size", &src, size, 1);
        check("size", &src, 1, size);
    }
}

/// compressed-tensors#595: an amax of zero gave an infinite scale. TE: an amax below 8e-36.
#[test]
fn scales_of_extreme_tensors_are_finite() {
    for (amax, encode, tensor_scale) in [
        (0.0, 1.0, 1.0),
        (f32::from_bits(1), f32::MAX, 1.0 / f32::MAX),
        (7.0e-36, f32::MAX, 1.0 / f32::MAX),
        (f32::MAX, 2688.0 / f32::MAX, 1.0 / (2688.0 / f32::MAX)),
        (f32::INFINITY, 1.0, 1.0),
    ] {
        let got = ScaleOrder::Te.encode_scale(amax, nvfp4::ScaleBound::Max448);
        assert_eq!((got, 1.0 / got), (encode, tensor_scale), "{amax:e}");
        assert!((1.0 / got).is_finite() && 1.0 / got > 0.0, "{amax:e}");
    }
}

/// Settings that exclude each other are refused: 4/6 biases an estimate that stochastic rounding
/// keeps unbiased, and a square block has no direction to transform.
#[test]
fn combinations_that_are_refused() {
    let te = QuantFormat::NVFP4.with_order(ScaleOrder::Te);
    let rht = Some(Hadamard16::TRAINING);
    let stochastic = te.with_rounding(ElementRounding::Stochastic);
    let philox = Some(Philox::default());
    for (format, philox, expected) in [
        (te.square().with_four_six(true), None, "expected 4/6 with blocks of 1x16"),
        (te.with_hadamard(rht).with_four_six(true), None, "expected 4/6 with blocks of 1x16"),
        (stochastic.with_four_six(true), philox, "expected 4/6 with blocks of 1x16"),
        (te.square().with_hadamard(rht), None, "expected blocks of one row with a Hadamard"),
    ] {
        let common = Common { philox, ..Common::nearest(1.0) };
        let src = [0.0_f32; 16];
        let error = nvfp4::quantize_rows(&src, 1, 16, &format, &common, &mut [0; 8], &mut [0; 1]);
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(expected), "{format}: {error}");
    }
    let transform = te.with_hadamard(rht);
    let (mut bytes, mut scales) =
        (vec![0; packed::fp4_len(8, 24)], vec![0; nvfp4::scales_len(8, 24)]);
    let common = Common::nearest(1.0);
    let src = [0.0_f32; 24 * 8];
    let error = nvfp4::quantize_columns(&src, 24, 8, &transform, &common, &mut bytes, &mut scales);
    let expected = "expected rows of a multiple of 16 elements, got 24";
    assert_eq!(error.unwrap_err().to_string(), expected);
}
