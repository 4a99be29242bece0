//! Exact and varied sums, integers, threads, and what is refused.

use deepwell_emulator::number::Format;
use deepwell_emulator::numerics::{
    Accumulate, ElementBits, Kind, MmaSpec, Operand, ResultMode, TensorCore, multiply,
};

use crate::data::{Data, Random, accumulator, element};
use crate::reference::{Exact, Value, take_apart};

/// Operands of one kind, with scales where the kind has them.
struct Case {
    spec: MmaSpec,
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
        let mut element_bits = |rows: usize| -> Vec<u32> {
            (0..rows * k).map(|_| element(format, data, 1, &mut random)).collect()
        };
        let (a, b) = (element_bits(m), element_bits(n));
        let scaling = match kind {
            Kind::Mxf8f6f4 => Some((Format::UE8M0, 32)),
            Kind::Mxf4nvf4 => Some((Format::UE4M3, 16)),
            _ => None,
        };
        let scales = scaling.map(|(format, block)| {
            let mut element_bits = |rows: usize| -> Vec<u8> {
                let near = (if format == Format::UE8M0 { 125 } else { 0x36 }, 4);
                let (first, count) = match data {
                    Data::Near => near,
                    _ => (0, if format == Format::UE8M0 { 255 } else { 0x7f }),
                };
                (0..rows * k.div_ceil(block)).map(|_| first + random.below(count) as u8).collect()
            };
            (format, block, element_bits(m), element_bits(n))
        });
        let before = (0..m * n).map(|_| accumulator(false, data, 1, &mut random)).collect();
        let spec = MmaSpec {
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
        let operand = |element_bits, first: bool| match &self.scales {
            Some((format, block, a, b)) => Operand::scaled(
                ElementBits::U32(element_bits),
                *format,
                *block,
                if first { a } else { b },
            ),
            None => Operand::new(ElementBits::U32(element_bits)),
        };
        let mut got = self.before.clone();
        let spec = MmaSpec { model, ..self.spec };
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
            let mut element_bits = |rows: usize| -> Vec<u8> {
                (0..rows * k).map(|_| random.next() as u8 | 0x40).collect()
            };
            let (a, b) = (element_bits(m), element_bits(n));
            let edge = [i32::MAX - 1000, i32::MIN + 1000, 0, i32::MAX];
            let before: Vec<u32> =
                (0..m * n).map(|_| edge[random.below(4) as usize] as u32).collect();
            let spec = MmaSpec {
                model: ResultMode::Hardware,
                architecture: TensorCore::Hopper,
                kind: Kind::I8,
                a: a_format,
                b: b_format,
                accumulate,
            };
            let mut got = before.clone();
            let (a_operand, b_operand) =
                (Operand::new(ElementBits::U8(&a)), Operand::new(ElementBits::U8(&b)));
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
    let spec = MmaSpec {
        model: ResultMode::Hardware,
        architecture: TensorCore::Blackwell,
        kind: Kind::Mxf8f6f4,
        a: Format::E4M3,
        b: Format::E4M3,
        accumulate: Accumulate::F32,
    };
    let element_bits = [0u8; 64];
    let scaled = |format, block, scales| {
        Operand::scaled(ElementBits::U8(&element_bits), format, block, scales)
    };
    let right = scaled(Format::UE8M0, 32, &[127, 127]);
    let plain = Operand::new(ElementBits::U8(&element_bits));
    let check = |spec: MmaSpec, a: Operand<'_>, outputs: usize, rule: &str| {
        let b = if a.scales.is_some() { right } else { plain };
        let mut sums = vec![0; outputs];
        let error = multiply(&spec, 2, 2, 32, &a, &b, &mut sums, true, false, false).unwrap_err();
        assert_eq!(error.rule, rule, "{error}");
    };
    check(MmaSpec { a: Format::F16, ..spec }, right, 4, "mma-element-format");
    check(MmaSpec { accumulate: Accumulate::F16, ..spec }, right, 4, "mma-accumulator");
    check(spec, plain, 4, "mma-scale-format");
    check(spec, scaled(Format::UE4M3, 32, &[127; 2]), 4, "mma-scale-format");
    check(spec, scaled(Format::UE8M0, 16, &[127; 4]), 4, "mma-scale-format");
    check(spec, scaled(Format::UE8M0, 32, &[127; 3]), 4, "mma-scale-size");
    check(spec, right, 5, "mma-accumulator-size");
    let short = Operand { element_bits: ElementBits::U8(&element_bits[..63]), ..right };
    check(spec, short, 4, "mma-operand-size");
    let half = MmaSpec { kind: Kind::F16, a: Format::F16, b: Format::F16, ..spec };
    check(half, plain, 4, "mma-operand-size");
    check(MmaSpec { kind: Kind::F8f6f4, ..spec }, right, 4, "mma-scale-format");
}
