//! The vector kernels against the definition, bit for bit: every entry point, shape, format and
//! instruction set, on values from the ordinary to the malicious.

use half::bf16;
use proptest::prelude::*;

use super::lanes::{Counters, E2m1, E2m3, E3m2, E4m3, E5m2, Element, LANES, encode_lanes};
use super::*;
use crate::{ElementFormat, Granularity, ScaleRule};

const LEVELS: &[Level] = &[Level::Native, Level::Baseline];

/// xorshift64*: enough randomness for tests, the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// What a matrix is filled with.
#[derive(Clone, Copy, Debug)]
enum Fill {
    /// Sums of uniform numbers, as activations are.
    Smooth,
    /// Finite, any exponent.
    Wild,
    /// Subnormal, tiny and zero, where scales are clamped.
    Tiny,
    /// Powers of two times what lies next to 448, 464, 57344 and to ties: every comparison's edge.
    Edges,
    /// In the last three binades of f32, where elements would round beyond it, and zeros.
    Huge,
    /// Smooth with one NaN or infinity in about 300 elements.
    Broken,
}

const FILLS: &[Fill] =
    &[Fill::Smooth, Fill::Wild, Fill::Tiny, Fill::Edges, Fill::Huge, Fill::Broken];

fn value(fill: Fill, random: &mut Random) -> f32 {
    match fill {
        Fill::Smooth => (0..4).map(|_| random.unit()).sum(),
        Fill::Wild => {
            let x = f32::from_bits(random.next());
            if x.is_finite() { x } else { 0.0 }
        }
        Fill::Tiny => match random.next() % 4 {
            0 => 0.0,
            1 => -0.0,
            2 => random.unit() * f32::from_bits(1 << 23),
            _ => random.unit() * f32::from_bits((random.next() % 20 + 1) << 23),
        },
        Fill::Edges => {
            let edges = [
                6.0,
                7.5,
                28.0,
                448.0,
                464.0,
                480.0,
                256.0,
                511.0,
                57344.0,
                61440.0,
                0.0146484375,
                1.0625,
            ];
            let edge: f32 = edges[random.next() as usize % edges.len()];
            let nudged = edge.to_bits().wrapping_add(random.next() % 3).wrapping_sub(1);
            let power = f32::from_bits((random.next() % 12 + 121) << 23);
            f32::from_bits(nudged | (random.next() & 0x8000_0000)) * power
        }
        Fill::Huge => match random.next() % 3 {
            0 => 0.0,
            _ => {
                let bits = random.next();
                f32::from_bits((0x7F7F_FFFF - bits % (3 << 23)) | (bits & 0x8000_0000))
            }
        },
        Fill::Broken => match random.next() % 900 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            _ => random.unit(),
        },
    }
}

fn matrix(fill: Fill, elements: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed + 1);
    (0..elements).map(|_| value(fill, &mut random)).collect()
}

fn all_specs() -> Vec<MxSpec> {
    let mut specs = Vec::new();
    for &element in ElementFormat::ALL {
        for &scale_rule in ScaleRule::ALL {
            for &granularity in Granularity::ALL {
                for &block in BlockShape::ALL {
                    specs.push(MxSpec { element, scale_rule, granularity, block });
                }
            }
        }
    }
    specs
}

/// Data, scales and statistics of one operand.
#[derive(Debug, PartialEq)]
struct Quantized {
    data: Vec<u8>,
    scales: Vec<u8>,
    stats: QuantStats,
}

impl Quantized {
    /// Filled with what no test expects.
    fn empty(outer: usize, contraction: usize) -> Self {
        Self {
            data: vec![0xAA; outer * contraction],
            scales: vec![0xAA; scales_len(outer, contraction)],
            stats: QuantStats::default(),
        }
    }
}

/// Compares all three entry points with the definition.
fn check<S: Source>(level: Level, src: &[S], rows: usize, cols: usize, spec: MxSpec, what: &str) {
    let mut by_row = Quantized::empty(rows, cols);
    let mut by_column = Quantized::empty(cols, rows);
    let (row, column) = (&mut by_row, &mut by_column);
    let at = |o: usize, k: usize| src[o * cols + k].to_f32();
    row.stats = reference::quantize(at, (rows, cols), false, &spec, &mut row.data, &mut row.scales);
    let at = |o: usize, k: usize| src[k * cols + o].to_f32();
    column.stats =
        reference::quantize(at, (cols, rows), true, &spec, &mut column.data, &mut column.scales);
    let what = format!("{what} {rows} x {cols} {spec:?} {level:?}");

    let mut got = Quantized::empty(rows, cols);
    let values = S::values(src);
    got.stats = rows_at(level, values, rows, cols, spec, &mut got.data, &mut got.scales);
    assert_same(&got, &by_row, cols, &format!("rows {what}"));

    let mut got = Quantized::empty(cols, rows);
    got.stats = columns_at(level, values, rows, cols, spec, &mut got.data, &mut got.scales);
    assert_same(&got, &by_column, rows, &format!("columns {what}"));

    let (mut got, mut got_t) = (Quantized::empty(rows, cols), Quantized::empty(cols, rows));
    let out = (&mut got.data[..], &mut got.scales[..]);
    let out_t = (&mut got_t.data[..], &mut got_t.scales[..]);
    let stats = both_at(level, values, rows, cols, spec, out, out_t);
    assert_eq!(stats, by_row.stats.merged(by_column.stats), "both {what}");
    (got.stats, got_t.stats) = (by_row.stats, by_column.stats);
    assert_same(&got, &by_row, cols, &format!("both {what}"));
    assert_same(&got_t, &by_column, rows, &format!("both, transposed {what}"));
}

fn assert_same(got: &Quantized, expected: &Quantized, contraction: usize, what: &str) {
    let first = got.data.iter().zip(&expected.data).position(|(got, expected)| got != expected);
    if let Some(i) = first {
        let (o, k) = (i / contraction, i % contraction);
        let (got, expected) = (got.data[i], expected.data[i]);
        panic!("{what}: element ({o}, {k}) is {got:#04x}, expected {expected:#04x}");
    }
    assert_eq!(got.scales, expected.scales, "{what}");
    assert_eq!(got.stats, expected.stats, "{what}");
}

#[test]
fn kernels_follow_the_definition() {
    let shapes = [
        (0, 0),
        (0, 5),
        (5, 0),
        (1, 1),
        (1, 31),
        (31, 1),
        (3, 32),
        (32, 33),
        (65, 160),
        (127, 129),
        (128, 128),
        (130, 544),
        (7, 1100),
        (300, 96),
    ];
    for (seed, &(rows, cols)) in shapes.iter().enumerate() {
        for &fill in FILLS {
            let src = matrix(fill, rows * cols, seed as u64);
            let narrow: Vec<bf16> = src.iter().map(|&x| bf16::from_f32(x)).collect();
            for spec in all_specs() {
                let what = format!("{fill:?}");
                check(Level::Native, &src, rows, cols, spec, &what);
                check(Level::Native, &narrow, rows, cols, spec, &what);
            }
        }
    }
}

#[test]
fn no_bit_depends_on_the_instruction_set() {
    for &level in LEVELS {
        for &fill in FILLS {
            let src = matrix(fill, 150 * 200, 99);
            for spec in all_specs() {
                check(level, &src, 150, 200, spec, &format!("{fill:?}"));
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn no_bit_depends_on_the_number_of_threads() {
    let (rows, cols) = (300, 1537);
    let src = matrix(Fill::Broken, rows * cols, 7);
    let aligned = matrix(Fill::Wild, 256 * 1024, 8);
    // Of one ragged tile of columns, and more stripes than threads.
    let narrow = matrix(Fill::Wild, 1000 * 70, 9);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            for spec in all_specs() {
                check(Level::Native, &src, rows, cols, spec, &format!("{threads} threads"));
                check(Level::Native, &aligned, 256, 1024, spec, &format!("{threads} threads"));
                check(Level::Native, &narrow, 1000, 70, spec, &format!("{threads} threads"));
            }
        });
    }
}

#[test]
fn statistics_by_hand() {
    let rceil = MxSpec::default();
    let floor = MxSpec { scale_rule: ScaleRule::OcpFloor, ..rceil };
    let tiny = f32::from_bits(1);
    let none = QuantStats { elements: 4, ..QuantStats::default() };
    for (spec, src, expected) in [
        (rceil, [0.0, -0.0, 0.0, 0.0], none),
        (
            rceil,
            [448.0, 2.0_f32.powi(-10), 0.0, 1.0],
            QuantStats { amax: 448.0, underflows: 1, ..none },
        ),
        (rceil, [448.0, 2.0_f32.powi(-9), 0.0, 1.0], QuantStats { amax: 448.0, ..none }),
        (rceil, [-511.0, 1.0, 0.0, 1.0], QuantStats { amax: 511.0, ..none }),
        (floor, [-511.0, 449.0, 448.0, 1.0], QuantStats { amax: 511.0, saturations: 2, ..none }),
        (
            rceil,
            [tiny, 0.0, 0.0, 0.0],
            QuantStats { amax: tiny, scale_clamps: 1, underflows: 1, ..none },
        ),
        (
            rceil,
            [f32::NAN, 3.0, f32::INFINITY, 0.0],
            QuantStats { amax: 3.0, nonfinite: 2, ..none },
        ),
        // Scaled by 2^-127, the finite element vanishes.
        (
            floor,
            [f32::NEG_INFINITY, 3.0, 0.0, 0.0],
            QuantStats { amax: 3.0, nonfinite: 1, underflows: 1, ..none },
        ),
    ] {
        let (mut data, mut scales) = ([0; 4], [0; 1]);
        let stats = quantize_rows(&src, 1, 4, &spec.format(), &mut data, &mut scales).unwrap();
        assert_eq!(stats, expected, "{src:?} {}", spec.scale_rule);
    }
}

#[test]
fn non_finite_values_come_back() {
    for (src, scale, expected) in [
        ([f32::NAN, 1.0], 0xFF, [f32::NAN, f32::NAN]),
        ([f32::INFINITY, 1.0], 0xFE, [f32::INFINITY, 0.0]),
        ([f32::NEG_INFINITY, f32::INFINITY], 0xFE, [f32::NEG_INFINITY, f32::INFINITY]),
        ([f32::INFINITY, -f32::NAN], 0xFF, [f32::NAN, f32::NAN]),
    ] {
        for spec in all_specs() {
            let (mut data, mut scales, mut back) = ([0; 2], [0; 1], [0.0_f32; 2]);
            quantize_rows(&src, 1, 2, &spec.format(), &mut data, &mut scales).unwrap();
            crate::dequantize_rows(&data, &scales, 1, 2, &spec.format(), &mut back).unwrap();
            assert_eq!(scales, [scale], "{src:?}");
            assert_eq!(format!("{back:?}"), format!("{expected:?}"), "{src:?} {spec:?}");
        }
    }
}

/// The vector encoder against the scalar one, which has its own tests.
#[test]
fn lanes_follow_the_scalar_encoder() {
    fn check<E: Element>(values: impl Iterator<Item = f32>) {
        for x in values.filter(|x| x.is_finite()) {
            let mut counters = Counters::new();
            let mut clipped = [0; LANES];
            encode_lanes::<E, true>(&[x; LANES], &[1.0; LANES], &mut clipped, &mut counters);
            let expected = E::encode_any(x);
            assert_eq!(clipped, [expected; LANES], "{x:e}");
            counters.flush();
            let lanes = LANES as u64;
            let beyond = x.abs().to_bits() > E::MAX_BITS;
            assert_eq!(counters.totals.saturations, lanes * u64::from(beyond), "{x:e}");
            let lost = x != 0.0 && expected & E::MAGNITUDE == 0;
            assert_eq!(counters.totals.underflows, lanes * u64::from(lost), "{x:e}");
            if !beyond {
                let mut plain = [0; LANES];
                encode_lanes::<E, false>(&[x; LANES], &[1.0; LANES], &mut plain, &mut counters);
                assert_eq!(plain, clipped, "{x:e}");
            }
        }
    }
    let mut random = Random(3);
    let mut bits: Vec<u32> = (0..=u16::MAX).map(|bits| u32::from(bits) << 16).collect();
    for _ in 0..500_000 {
        // Around the range of the formats, and the neighbours of their ties.
        let exponent = random.next() % 40 + 105;
        let fraction = random.next() & 0x007F_FFFF;
        bits.push(exponent << 23 | fraction);
        bits.push(exponent << 23 | (fraction & 0x007C_0000).wrapping_add(random.next() % 2));
    }
    check::<E4m3>(bits.iter().map(|&bits| f32::from_bits(bits)));
    check::<E5m2>(bits.iter().map(|&bits| f32::from_bits(bits)));
    check::<E3m2>(bits.iter().map(|&bits| f32::from_bits(bits)));
    check::<E2m3>(bits.iter().map(|&bits| f32::from_bits(bits)));
    check::<E2m1>(bits.iter().map(|&bits| f32::from_bits(bits)));
}

#[test]
fn square_blocks_give_both_copies_the_same_values() {
    let (rows, cols) = (160, 200);
    let src = matrix(Fill::Smooth, rows * cols, 5);
    for &granularity in Granularity::ALL {
        let spec = MxSpec { granularity, block: BlockShape::Square, ..MxSpec::default() };
        let mut operand = Quantized::empty(rows, cols);
        let mut operand_t = Quantized::empty(cols, rows);
        let by_row = (&mut operand.data[..], &mut operand.scales[..]);
        let by_column = (&mut operand_t.data[..], &mut operand_t.scales[..]);
        quantize_both(&src, rows, cols, &spec.format(), by_row, by_column).unwrap();
        for r in 0..rows {
            for c in 0..cols {
                assert_eq!(operand.data[r * cols + c], operand_t.data[c * rows + r]);
                let scale = operand.scales[r * cols.div_ceil(32) + c / 32];
                assert_eq!(scale, operand_t.scales[c * rows.div_ceil(32) + r / 32]);
            }
        }
    }
}

#[test]
fn wrong_lengths() {
    let spec = MxSpec::default();
    let src = [0.0_f32; 80];
    for (data, scales, expected) in [
        (79, 4, "`data` of a 2 x 40 matrix: expected 80 elements, got 79"),
        (80, 3, "`scales` of a 2 x 40 matrix: expected 4 elements, got 3"),
    ] {
        let (mut data, mut scales) = (vec![0; data], vec![0; scales]);
        let error = quantize_rows(&src, 2, 40, &spec.format(), &mut data, &mut scales).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    for (data, scales, expected) in [
        (79, 40, "`data_t` of a 2 x 40 matrix: expected 80 elements, got 79"),
        (80, 41, "`scales_t` of a 2 x 40 matrix: expected 40 elements, got 41"),
    ] {
        let (mut data, mut scales) = (vec![0; data], vec![0; scales]);
        let error =
            quantize_columns(&src, 2, 40, &spec.format(), &mut data, &mut scales).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    for (rows, cols, expected) in [
        (3, 40, "`src` of a 3 x 40 matrix: expected 120 elements, got 80"),
        (
            usize::MAX,
            2,
            "a 18446744073709551615 x 2 matrix has more elements than this machine can address",
        ),
    ] {
        let error = quantize_rows(&src, rows, cols, &spec.format(), &mut [], &mut []).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What comes back differs from what went in by half a step of the element at most.
    #[test]
    fn round_trip(
        rows in 1_usize..40,
        cols in 1_usize..80,
        seed in any::<u64>(),
        exponent in -60_i32..60,
        spec_index in 0_usize..40,
    ) {
        let spec = all_specs()[spec_index];
        let factor = 2.0_f32.powi(exponent);
        let mut src = matrix(Fill::Smooth, rows * cols, seed % 1_000_003);
        src.iter_mut().for_each(|x| *x *= factor);
        let mut operand = Quantized::empty(rows, cols);
        let (format, data, scales) = (spec.format(), &mut operand.data, &mut operand.scales);
        operand.stats = quantize_rows(&src, rows, cols, &format, data, scales).unwrap();
        let mut back = vec![0.0_f32; rows * cols];
        let (data, scales) = (&operand.data, &operand.scales);
        crate::dequantize_rows(data, scales, rows, cols, &spec.format(), &mut back).unwrap();
        // Half a unit of the last place of the fraction; half of the smallest subnormal; and under
        // the floor rule what is clipped: amax / max - 1 <= 511.99 / 448 - 1.
        let (relative, tiny) = match spec.element {
            ElementFormat::E4M3 => (1.0 / 16.0, 2.0_f32.powi(-10)),
            ElementFormat::E5M2 => (1.0 / 8.0, 2.0_f32.powi(-17)),
            ElementFormat::E3M2 => (1.0 / 8.0, 2.0_f32.powi(-5)),
            ElementFormat::E2M3 => (1.0 / 16.0, 2.0_f32.powi(-4)),
            ElementFormat::E2M1 => (1.0 / 4.0, 2.0_f32.powi(-2)),
        };
        // By the smaller error it may be anything up to twice the largest element.
        let clip = match spec.scale_rule {
            ScaleRule::OcpFloor => 1.0 / 7.0,
            ScaleRule::MinError => 0.5,
            _ => 0.0,
        };
        for (i, (&x, &y)) in src.iter().zip(&back).enumerate() {
            let scale = operand.scales[i / cols * cols.div_ceil(32) + i % cols / 32];
            let bound = (x.abs() * f32::max(relative, clip)).max(tiny * crate::e8m0::decode(scale));
            prop_assert!((x - y).abs() <= bound, "{x:e} became {y:e}");
        }

        // A quantized matrix is its own quantization under the same rule, unless the exponent
        // fell: a group whose amax rounded down to a value that fits the next smaller scale.
        let mut again = Quantized::empty(rows, cols);
        let (format, data, scales) = (spec.format(), &mut again.data, &mut again.scales);
        quantize_rows(&back, rows, cols, &format, data, scales).unwrap();
        let mut twice = vec![0.0_f32; rows * cols];
        let (data, scales) = (&again.data, &again.scales);
        crate::dequantize_rows(data, scales, rows, cols, &spec.format(), &mut twice).unwrap();
        prop_assert_eq!(twice, back);
    }
}
