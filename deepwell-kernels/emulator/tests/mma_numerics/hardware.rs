//! The hardware's sums against their definition.

use deepwell_emulator::number::{Format, Rounding, decode, encode};
use deepwell_emulator::numerics::{
    Accumulate, ElementBits, Kind, MmaSpec, Operand, ResultMode, TensorCore, multiply,
};

use crate::data::{DATA, Data, Random, accumulator, element};
use crate::reference::Sum;

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
    let mut element_bits = |format, count: usize| -> Vec<u32> {
        (0..count).map(|_| element(format, data, center, random)).collect()
    };
    let (a, b) = (element_bits(row.formats[0], m * k), element_bits(row.formats[1], n * k));
    let scaled = row.kind == Kind::Mxf8f6f4;
    let blocks = k.div_ceil(32);
    let mut scales = |rows: usize| -> Vec<u8> {
        (0..rows * blocks)
            .map(|_| match data {
                Data::ElementBits => random.next() as u8,
                Data::Near => 124 + random.below(7) as u8,
                _ => random.below(255) as u8,
            })
            .collect()
    };
    let (a_scales, b_scales) = (scales(m), scales(n));
    let before: Vec<u32> = (0..m * n).map(|_| accumulator(half, data, center, random)).collect();
    let (use_accumulator, negate_a, negate_b) =
        (round % 4 != 0, round == 2, round == 2 || round == 3);

    let operand = |element_bits, scale_element_bits| {
        if scaled {
            Operand::scaled(ElementBits::U32(element_bits), Format::UE8M0, 32, scale_element_bits)
        } else {
            Operand::new(ElementBits::U32(element_bits))
        }
    };
    let spec = MmaSpec {
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
                let mut element_bits = |rows: usize| -> Vec<u8> {
                    (0..rows * k)
                        .map(|_| element(Format::E2M1, data, 0, &mut random) as u8)
                        .collect()
                };
                let (a, b) = (element_bits(m), element_bits(n));
                let mut scales = |rows: usize| -> Vec<u8> {
                    (0..rows * k / block)
                        .map(|_| match (data, format) {
                            (Data::ElementBits, _) => random.next() as u8,
                            (Data::Near, Format::UE8M0) => 120 + random.below(16) as u8,
                            _ => random.below(0x7f) as u8,
                        })
                        .collect()
                };
                let (a_scales, b_scales) = (scales(m), scales(n));
                let before: Vec<u32> =
                    (0..m * n).map(|_| accumulator(false, data, 0, &mut random)).collect();
                let spec = MmaSpec {
                    model: ResultMode::Hardware,
                    architecture: TensorCore::Blackwell,
                    kind: Kind::Mxf4nvf4,
                    a: Format::E2M1,
                    b: Format::E2M1,
                    accumulate: Accumulate::F32,
                };
                let a_operand = Operand::scaled(ElementBits::U8(&a), format, block, &a_scales);
                let b_operand = Operand::scaled(ElementBits::U8(&b), format, block, &b_scales);
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

/// 8-bit floats of `mma.sync` on sm_90: two MMAs in F16, then an addition.
#[test]
fn halves_are_two_mmas_and_an_addition() {
    let mut random = Random(99);
    for (data, k) in DATA.into_iter().flat_map(|data| [(data, 16), (data, 32), (data, 64)]) {
        let (m, n) = (4, 9);
        let mut element_bits = |rows: usize| -> Vec<u8> {
            (0..rows * k).map(|_| element(Format::E4M3, data, 0, &mut random) as u8).collect()
        };
        let (a, b) = (element_bits(m), element_bits(n));
        let before: Vec<u32> =
            (0..m * n).map(|_| accumulator(false, data, 0, &mut random)).collect();
        let spec = MmaSpec {
            model: ResultMode::Hardware,
            architecture: TensorCore::HopperWarp,
            kind: Kind::F8f6f4,
            a: Format::E4M3,
            b: Format::E4M3,
            accumulate: Accumulate::F32,
        };
        let mut got = before.clone();
        let (a_operand, b_operand) =
            (Operand::new(ElementBits::U8(&a)), Operand::new(ElementBits::U8(&b)));
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
