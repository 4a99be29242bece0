//! Products against their definition (`reference`), for random elements of many kinds.

mod reference;

use deepwell_emulator::number::{Format, Rounding, decode, encode};
use deepwell_emulator::numerics::{
    Accumulate, Codes, Kind, Operand, ProductSpec, ResultMode, TensorCore, multiply,
};
use reference::{Exact, Sum, Value, take_apart};

/// Uniform bits (xorshift64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    fn below(&mut self, count: u32) -> u32 {
        self.next() % count
    }
}

/// What elements look like.
#[derive(Clone, Copy, Debug)]
enum Data {
    /// Any code.
    Codes,
    /// Any finite code.
    Finite,
    /// Finite, most of them zero.
    Sparse,
    /// Magnitudes within a factor of eight of each other.
    Near,
    /// Mantissas of ones: what is cut off is as much as can be.
    Ones,
    /// The largest value, now and then a small one: sums are as large as they can be.
    Largest,
}

const DATA: [Data; 6] =
    [Data::Codes, Data::Finite, Data::Sparse, Data::Near, Data::Ones, Data::Largest];

fn element(format: Format, data: Data, center: i32, random: &mut Random) -> u32 {
    let mask = u32::MAX >> (32 - format.bits());
    match data {
        Data::Codes => random.next() & mask,
        Data::Sparse if random.below(4) != 0 => random.next() & 1 << (format.bits() - 1),
        Data::Near => {
            let magnitude = (1.0 + random.below(7000) as f32 / 1000.0) * 2f32.powi(center);
            let value = if random.below(2) == 0 { magnitude } else { -magnitude };
            encode(format, value, Rounding::NearestEven, true, false)
        }
        Data::Ones => {
            let exponent = random.below(20) as i32 - 10;
            let value = (2.0 - 2f32.powi(-(format.mantissa_bits() as i32))) * 2f32.powi(exponent);
            let code = encode(format, value, Rounding::TowardZero, true, false);
            code | (random.next() & 1 << (format.bits() - 1))
        }
        Data::Largest => {
            if random.below(16) != 0 {
                let value = 1.9375 * 2f32.powi(8 + center.min(0));
                return encode(format, value, Rounding::TowardZero, true, false);
            }
            encode(
                format,
                2f32.powi(-(random.below(10) as i32)),
                Rounding::NearestEven,
                true,
                false,
            )
        }
        _ => loop {
            let code = random.next() & mask;
            if decode(format, code).is_finite() {
                break code;
            }
        },
    }
}

/// An accumulator of about a size that matters, or any.
fn accumulator(half: bool, data: Data, center: i32, random: &mut Random) -> u32 {
    let bits = match data {
        Data::Codes => random.next(),
        _ if random.below(4) == 0 => return random.next() & if half { 0x8000 } else { 1 << 31 },
        Data::Near => {
            let value = (random.next() as i32) as f32 * 2f32.powi(2 * center - 28);
            if half {
                return encode(Format::F16, value, Rounding::NearestEven, true, false);
            }
            value.to_bits()
        }
        Data::Ones if half => random.below(31) << 10 | 0x3ff | random.next() & 0x8000,
        Data::Ones => (random.below(70) + 80) << 23 | 0x7f_ffff | random.next() & 1 << 31,
        Data::Largest if half => random.below(31) << 10,
        Data::Largest => (random.below(16) + 127) << 23,
        _ => loop {
            let bits = random.next();
            if half || f32::from_bits(bits).is_finite() {
                break bits;
            }
        },
    };
    if half { bits & 0xffff } else { bits }
}

/// The least step of K, fraction bits and result bits of an instruction.
#[derive(Clone, Copy, Debug)]
struct Row {
    architecture: TensorCore,
    kind: Kind,
    formats: [Format; 2],
    accumulate: Accumulate,
    step: usize,
    sum: Sum,
}

fn rows() -> Vec<Row> {
    use Format::{BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, TF32};
    use TensorCore::{Ada, Ampere, Blackwell, Hopper};
    let mut rows = Vec::new();
    let mut row = |architecture, kind, formats, accumulate, step, fraction_bits, mantissa_bits| {
        let sum = Sum { fraction_bits, mantissa_bits, half: accumulate == Accumulate::F16 };
        rows.push(Row { architecture, kind, formats, accumulate, step, sum });
    };
    for (architecture, halves, bits) in [(Ampere, 2, 24), (Hopper, 1, 25), (Blackwell, 1, 25)] {
        let step = 16 / halves;
        row(architecture, Kind::F16, [F16, F16], Accumulate::F32, step, bits, 23);
        row(architecture, Kind::F16, [F16, F16], Accumulate::F16, step, bits, 23);
        row(architecture, Kind::Bf16, [BF16, BF16], Accumulate::F32, step, bits, 23);
        row(architecture, Kind::Tf32, [TF32, TF32], Accumulate::F32, step / 2, bits, 23);
    }
    row(Blackwell, Kind::F16, [F16, BF16], Accumulate::F32, 16, 25, 23);
    for formats in [[E4M3, E4M3], [E5M2, E4M3], [E5M2, E5M2]] {
        row(Ada, Kind::F8f6f4, formats, Accumulate::F32, 16, 13, 13);
        row(Hopper, Kind::F8f6f4, formats, Accumulate::F32, 32, 13, 13);
        row(Hopper, Kind::F8f6f4, formats, Accumulate::F16, 32, 13, 13);
    }
    for a in [E4M3, E5M2, E3M2, E2M3, E2M1] {
        for b in [E4M3, E5M2, E3M2, E2M3, E2M1] {
            row(Blackwell, Kind::F8f6f4, [a, b], Accumulate::F32, 32, 25, 23);
            row(Blackwell, Kind::F8f6f4, [a, b], Accumulate::F16, 32, 25, 23);
            row(Blackwell, Kind::Mxf8f6f4, [a, b], Accumulate::F32, 32, 25, 23);
        }
    }
    rows
}

#[test]
fn hardware_mode_is_the_definition() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for row in rows() {
        for data in DATA {
            for (m, n, k) in [(3, 19, row.step), (2, 8, 2 * row.step + row.step / 2), (1, 1, 1)] {
                for round in 0..8 {
                    check(&row, data, (m, n, k), round, &mut random);
                }
            }
        }
    }
}

fn check(row: &Row, data: Data, (m, n, k): (usize, usize, usize), round: i32, random: &mut Random) {
    let half = row.sum.half;
    let center = random.below(9) as i32 - 6;
    let mut codes = |format, count: usize| -> Vec<u32> {
        (0..count).map(|_| element(format, data, center, random)).collect()
    };
    let (a, b) = (codes(row.formats[0], m * k), codes(row.formats[1], n * k));
    let scaled = row.kind == Kind::Mxf8f6f4;
    let blocks = k.div_ceil(32);
    let mut scales = |rows: usize| -> Vec<u8> {
        (0..rows * blocks)
            .map(|_| match data {
                Data::Codes => random.next() as u8,
                Data::Near => 124 + random.below(7) as u8,
                _ => random.below(255) as u8,
            })
            .collect()
    };
    let (a_scales, b_scales) = (scales(m), scales(n));
    let before: Vec<u32> = (0..m * n).map(|_| accumulator(half, data, center, random)).collect();
    let (use_accumulator, negate_a, negate_b) =
        (round % 4 != 0, round == 2, round == 2 || round == 3);

    let operand = |codes, scale_codes| {
        if scaled {
            Operand::scaled(Codes::U32(codes), Format::UE8M0, 32, scale_codes)
        } else {
            Operand::new(Codes::U32(codes))
        }
    };
    let spec = ProductSpec {
        model: ResultMode::Hardware,
        architecture: row.architecture,
        kind: row.kind,
        a: row.formats[0],
        b: row.formats[1],
        accumulate: row.accumulate,
    };
    let mut got = before.clone();
    let (a_operand, b_operand) = (operand(&a, &a_scales), operand(&b, &b_scales));
    multiply(&spec, m, n, k, &a_operand, &b_operand, &mut got, use_accumulator, negate_a, negate_b)
        .unwrap();

    let sign = |format: Format| 1u32 << (format.bits() - 1);
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let mut expected = if use_accumulator { before[i * n + j] } else { 0 };
        for start in (0..k).step_by(row.step) {
            let products: Vec<_> = (start..k.min(start + row.step))
                .map(|index| {
                    let a = a[i * k + index] ^ if negate_a { sign(spec.a) } else { 0 };
                    let b = b[j * k + index] ^ if negate_b { sign(spec.b) } else { 0 };
                    [(spec.a, a), (spec.b, b)]
                })
                .collect();
            let code = |scales: &[u8], row: usize| {
                (Format::UE8M0, if scaled { scales[row * blocks + start / 32].into() } else { 127 })
            };
            let scales = [code(&a_scales, i), code(&b_scales, j)];
            expected = row.sum.step(&products, scales, expected);
        }
        assert_eq!(
            got[i * n + j],
            expected,
            "{row:?} {data:?} {m}x{n}x{k}, output {i} {j}: got {:e}, expected {:e}",
            decode(if half { Format::F16 } else { Format::F32 }, got[i * n + j]),
            decode(if half { Format::F16 } else { Format::F32 }, expected),
        );
    }
}

#[test]
fn scaled_fp4_is_the_definition() {
    let mut random = Random(0x0bad_cafe_1234_5677);
    let sum = Sum { fraction_bits: 35, mantissa_bits: 23, half: false };
    for (format, block) in
        [(Format::UE8M0, 32), (Format::UE8M0, 16), (Format::UE4M3, 16), (Format::UE4M3, 32)]
    {
        for data in DATA {
            for (k, step) in [(64, 64), (96, 96), (128, 64), (192, 64)] {
                let (m, n) = (5, 13);
                let mut codes = |rows: usize| -> Vec<u8> {
                    (0..rows * k)
                        .map(|_| element(Format::E2M1, data, 0, &mut random) as u8)
                        .collect()
                };
                let (a, b) = (codes(m), codes(n));
                let mut scales = |rows: usize| -> Vec<u8> {
                    (0..rows * k / block)
                        .map(|_| match (data, format) {
                            (Data::Codes, _) => random.next() as u8,
                            (Data::Near, Format::UE8M0) => 120 + random.below(16) as u8,
                            _ => random.below(0x7f) as u8,
                        })
                        .collect()
                };
                let (a_scales, b_scales) = (scales(m), scales(n));
                let before: Vec<u32> =
                    (0..m * n).map(|_| accumulator(false, data, 0, &mut random)).collect();
                let spec = ProductSpec {
                    model: ResultMode::Hardware,
                    architecture: TensorCore::Blackwell,
                    kind: Kind::Mxf4nvf4,
                    a: Format::E2M1,
                    b: Format::E2M1,
                    accumulate: Accumulate::F32,
                };
                let a_operand = Operand::scaled(Codes::U8(&a), format, block, &a_scales);
                let b_operand = Operand::scaled(Codes::U8(&b), format, block, &b_scales);
                let mut got = before.clone();
                multiply(&spec, m, n, k, &a_operand, &b_operand, &mut got, true, false, true)
                    .unwrap();
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let mut expected = before[i * n + j];
                    for start in (0..k).step_by(step) {
                        let groups: Vec<_> = (start..start + step)
                            .step_by(16)
                            .map(|first| {
                                let dot = (first..first + 16).map(|index| {
                                    let value = decode(Format::E2M1, a[i * k + index].into())
                                        * decode(Format::E2M1, b[j * k + index].into());
                                    -(value * 4.0) as i128
                                });
                                let code = |scales: &[u8], row: usize| {
                                    (format, scales[row * (k / block) + first / block].into())
                                };
                                (dot.sum(), [code(&a_scales, i), code(&b_scales, j)])
                            })
                            .collect();
                        expected = sum.step_grouped(&groups, expected);
                    }
                    assert_eq!(
                        got[i * n + j],
                        expected,
                        "{format} {block} {data:?} k {k}, output {i} {j}: got {:e}, expected {:e}",
                        f32::from_bits(got[i * n + j]),
                        f32::from_bits(expected),
                    );
                }
            }
        }
    }
}

/// 8-bit floats of `mma.sync` on sm_90: two products in F16, then an addition.
#[test]
fn halves_are_two_products_and_an_addition() {
    let mut random = Random(99);
    for (data, k) in DATA.into_iter().flat_map(|data| [(data, 16), (data, 32), (data, 64)]) {
        let (m, n) = (4, 9);
        let mut codes = |rows: usize| -> Vec<u8> {
            (0..rows * k).map(|_| element(Format::E4M3, data, 0, &mut random) as u8).collect()
        };
        let (a, b) = (codes(m), codes(n));
        let before: Vec<u32> =
            (0..m * n).map(|_| accumulator(false, data, 0, &mut random)).collect();
        let spec = ProductSpec {
            model: ResultMode::Hardware,
            architecture: TensorCore::HopperWarp,
            kind: Kind::F8f6f4,
            a: Format::E4M3,
            b: Format::E4M3,
            accumulate: Accumulate::F32,
        };
        let mut got = before.clone();
        let (a_operand, b_operand) = (Operand::new(Codes::U8(&a)), Operand::new(Codes::U8(&b)));
        multiply(&spec, m, n, k, &a_operand, &b_operand, &mut got, true, false, false).unwrap();
        let sum = Sum { fraction_bits: 25, mantissa_bits: 23, half: false };
        let as_half = |code: u8| {
            let value = decode(Format::E4M3, code.into());
            (Format::F16, encode(Format::F16, value, Rounding::NearestEven, false, false))
        };
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let mut expected = before[i * n + j];
            for start in (0..k).step_by(32) {
                let mut total = 0;
                for pair in [0, 2] {
                    let products: Vec<_> = (start..k.min(start + 32))
                        .filter(|index| index % 4 == pair || index % 4 == pair + 1)
                        .map(|index| [as_half(a[i * k + index]), as_half(b[j * k + index])])
                        .collect();
                    total = sum.step(&products, [(Format::UE8M0, 127); 2], total);
                }
                let added = f32::from_bits(expected) + f32::from_bits(total);
                expected = if added.is_nan() { 0x7fff_ffff } else { added.to_bits() };
            }
            assert_eq!(got[i * n + j], expected, "{data:?} k {k}, output {i} {j}");
        }
    }
}

/// Operands of one kind, with scales where the kind has them.
struct Case {
    spec: ProductSpec,
    a: Vec<u32>,
    b: Vec<u32>,
    scales: Option<(Format, usize, Vec<u8>, Vec<u8>)>,
    before: Vec<u32>,
    shape: (usize, usize, usize),
}

impl Case {
    fn new(
        kind: Kind,
        format: Format,
        data: Data,
        shape: (usize, usize, usize),
        seed: u64,
    ) -> Case {
        let mut random = Random(seed);
        let (m, n, k) = shape;
        let mut codes = |rows: usize| -> Vec<u32> {
            (0..rows * k).map(|_| element(format, data, 1, &mut random)).collect()
        };
        let (a, b) = (codes(m), codes(n));
        let scaling = match kind {
            Kind::Mxf8f6f4 => Some((Format::UE8M0, 32)),
            Kind::Mxf4nvf4 => Some((Format::UE4M3, 16)),
            _ => None,
        };
        let scales = scaling.map(|(format, block)| {
            let mut codes = |rows: usize| -> Vec<u8> {
                let near = (if format == Format::UE8M0 { 125 } else { 0x36 }, 4);
                let (first, count) = match data {
                    Data::Near => near,
                    _ => (0, if format == Format::UE8M0 { 255 } else { 0x7f }),
                };
                (0..rows * k.div_ceil(block)).map(|_| first + random.below(count) as u8).collect()
            };
            (format, block, codes(m), codes(n))
        });
        let before = (0..m * n).map(|_| accumulator(false, data, 1, &mut random)).collect();
        let spec = ProductSpec {
            model: ResultMode::Exact,
            architecture: TensorCore::Blackwell,
            kind,
            a: format,
            b: format,
            accumulate: Accumulate::F32,
        };
        Case { spec, a, b, scales, before, shape }
    }

    fn run(&self, model: ResultMode) -> Vec<u32> {
        let (m, n, k) = self.shape;
        let operand = |codes, first: bool| match &self.scales {
            Some((format, block, a, b)) => {
                Operand::scaled(Codes::U32(codes), *format, *block, if first { a } else { b })
            }
            None => Operand::new(Codes::U32(codes)),
        };
        let mut got = self.before.clone();
        let spec = ProductSpec { model, ..self.spec };
        let (a, b) = (operand(&self.a, true), operand(&self.b, false));
        multiply(&spec, m, n, k, &a, &b, &mut got, true, false, false).unwrap();
        got
    }

    /// The factors of each term of an output's products of one step.
    fn terms(&self, i: usize, j: usize) -> Vec<Vec<Value>> {
        let k = self.shape.2;
        (0..k)
            .map(|index| {
                let a = take_apart(self.spec.a, self.a[i * k + index]);
                let b = take_apart(self.spec.b, self.b[j * k + index]);
                let mut factors = vec![a, b];
                if let Some((format, block, a_scales, b_scales)) = &self.scales {
                    for (scales, row) in [(a_scales, i), (b_scales, j)] {
                        let code = scales[row * k.div_ceil(*block) + index / block];
                        factors.push(take_apart(*format, code.into()));
                    }
                }
                factors
            })
            .collect()
    }
}

const KINDS: [(Kind, Format, usize); 7] = [
    (Kind::F16, Format::F16, 16),
    (Kind::Bf16, Format::BF16, 16),
    (Kind::Tf32, Format::TF32, 8),
    (Kind::F8f6f4, Format::E5M2, 32),
    (Kind::Mxf8f6f4, Format::E4M3, 32),
    (Kind::Mxf8f6f4, Format::E5M2, 32),
    (Kind::Mxf4nvf4, Format::E2M1, 64),
];

#[test]
fn exact_mode_rounds_once() {
    for (index, (kind, format, k)) in KINDS.into_iter().enumerate() {
        for data in [Data::Finite, Data::Sparse, Data::Near] {
            let case = Case::new(kind, format, data, (6, 11, k), 77 + index as u64);
            let got = case.run(ResultMode::Exact);
            for (i, j) in (0..6).flat_map(|i| (0..11).map(move |j| (i, j))) {
                let mut exact = Exact::new();
                exact.add(&[take_apart(Format::F32, case.before[i * 11 + j])]);
                case.terms(i, j).iter().for_each(|factors| exact.add(factors));
                let (got, expected) = (f32::from_bits(got[i * 11 + j]), exact.into_f32());
                assert!(got == expected, "{kind:?} {format} {data:?}: {got:e}, not {expected:e}");
            }
        }
    }
}

#[test]
fn fuzz_is_near_and_depends_on_its_seed_alone() {
    for (index, (kind, format, k)) in KINDS.into_iter().enumerate() {
        let case = Case::new(kind, format, Data::Near, (32, 40, k), 5 + index as u64);
        let exact = case.run(ResultMode::Exact);
        let first = case.run(ResultMode::Fuzz(1));
        assert_eq!(first, case.run(ResultMode::Fuzz(1)), "{kind:?}");
        assert_ne!(first, case.run(ResultMode::Fuzz(2)), "{kind:?}");
        for (place, (&fuzz, &exact)) in first.iter().zip(&exact).enumerate() {
            let (i, j) = (place / 40, place % 40);
            let size = |factors: &Vec<Value>| {
                factors.iter().fold(1.0, |size, factor| match factor {
                    Value::Finite(n) => {
                        size * n.significand.abs() as f64 * 2f64.powi(n.exponent - n.fraction)
                    }
                    _ => unreachable!("all are finite"),
                })
            };
            let sizes: f64 = case.terms(i, j).iter().map(size).sum();
            let sizes = sizes + f64::from(f32::from_bits(case.before[place])).abs();
            // A partial sum after each two products at least, each off by at most one last bit.
            let bound = (k as f64 / 2.0 + 1.0) * 2f64.powi(-23) * sizes;
            let off = (f64::from(f32::from_bits(fuzz)) - f64::from(f32::from_bits(exact))).abs();
            assert!(off <= bound, "{kind:?} output {i} {j}: off by {off:e}, bound {bound:e}");
        }
    }
}

#[test]
fn integers_are_exact() {
    let mut random = Random(3);
    let (m, n, k) = (5, 7, 96);
    for (a_format, b_format) in
        [(Format::S8, Format::S8), (Format::U8, Format::S8), (Format::U8, Format::U8)]
    {
        for accumulate in [Accumulate::F32, Accumulate::I32, Accumulate::I32Saturating] {
            let mut codes = |rows: usize| -> Vec<u8> {
                (0..rows * k).map(|_| random.next() as u8 | 0x40).collect()
            };
            let (a, b) = (codes(m), codes(n));
            let edge = [i32::MAX - 1000, i32::MIN + 1000, 0, i32::MAX];
            let before: Vec<u32> =
                (0..m * n).map(|_| edge[random.below(4) as usize] as u32).collect();
            let spec = ProductSpec {
                model: ResultMode::Hardware,
                architecture: TensorCore::Hopper,
                kind: Kind::I8,
                a: a_format,
                b: b_format,
                accumulate,
            };
            let mut got = before.clone();
            let (a_operand, b_operand) = (Operand::new(Codes::U8(&a)), Operand::new(Codes::U8(&b)));
            multiply(&spec, m, n, k, &a_operand, &b_operand, &mut got, true, false, false).unwrap();
            let value = |format, code: u8| {
                if format == Format::S8 { i64::from(code as i8) } else { i64::from(code) }
            };
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let mut sum = i64::from(before[i * n + j] as i32);
                for start in (0..k).step_by(32) {
                    sum += (start..start + 32)
                        .map(|x| value(a_format, a[i * k + x]) * value(b_format, b[j * k + x]))
                        .sum::<i64>();
                    sum = match accumulate {
                        Accumulate::I32Saturating => sum.clamp(i32::MIN.into(), i32::MAX.into()),
                        _ => i64::from(sum as i32),
                    };
                }
                assert_eq!(
                    got[i * n + j] as i32,
                    sum as i32,
                    "{a_format} {b_format} {accumulate:?}"
                );
            }
        }
    }
}

/// Enough work for several threads, with an odd number of rows and columns.
#[test]
fn threads_do_not_matter() {
    for (kind, format, k) in KINDS {
        let case = Case::new(kind, format, Data::Finite, (131, 141, 2 * k), 11);
        for model in [ResultMode::Hardware, ResultMode::Exact, ResultMode::Fuzz(9)] {
            let pool =
                |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let one = pool(1).install(|| case.run(model));
            assert_eq!(one, pool(3).install(|| case.run(model)), "{kind:?} {model:?}");
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let spec = ProductSpec {
        model: ResultMode::Hardware,
        architecture: TensorCore::Blackwell,
        kind: Kind::Mxf8f6f4,
        a: Format::E4M3,
        b: Format::E4M3,
        accumulate: Accumulate::F32,
    };
    let codes = [0u8; 64];
    let scaled = |format, block, scales| Operand::scaled(Codes::U8(&codes), format, block, scales);
    let right = scaled(Format::UE8M0, 32, &[127, 127]);
    let plain = Operand::new(Codes::U8(&codes));
    let check = |spec: ProductSpec, a: Operand<'_>, outputs: usize, rule: &str| {
        let b = if a.scales.is_some() { right } else { plain };
        let mut sums = vec![0; outputs];
        let error = multiply(&spec, 2, 2, 32, &a, &b, &mut sums, true, false, false).unwrap_err();
        assert_eq!(error.rule, rule, "{error}");
    };
    check(ProductSpec { a: Format::F16, ..spec }, right, 4, "product-element-format");
    check(ProductSpec { accumulate: Accumulate::F16, ..spec }, right, 4, "product-accumulator");
    check(spec, plain, 4, "product-scale-format");
    check(spec, scaled(Format::UE4M3, 32, &[127; 2]), 4, "product-scale-format");
    check(spec, scaled(Format::UE8M0, 16, &[127; 4]), 4, "product-scale-format");
    check(spec, scaled(Format::UE8M0, 32, &[127; 3]), 4, "product-scale-size");
    check(spec, right, 5, "product-accumulator-size");
    let short = Operand { codes: Codes::U8(&codes[..63]), ..right };
    check(spec, short, 4, "product-operand-size");
    let half = ProductSpec { kind: Kind::F16, a: Format::F16, b: Format::F16, ..spec };
    check(half, plain, 4, "product-operand-size");
    check(ProductSpec { kind: Kind::F8f6f4, ..spec }, right, 4, "product-scale-format");
}
