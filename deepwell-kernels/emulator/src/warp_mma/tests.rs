//! Fragments against the index formulas of the ISA, which are written here once more, shape by
//! shape, and rules by name.

use super::*;
use crate::decode::{MatrixElement, MatrixShape, MmaKind, MmaShape, Type};
use crate::error::Fault;
use crate::number::{Format, Rounding, decode, encode};
use crate::numerics::{ResultMode, TensorCore};
use crate::place::{Memory, Place};

/// Row and column of element `ai`, `bi` or `ci` of a lane.
type Formula = fn(usize, usize) -> (usize, usize);

struct Shape {
    k: u32,
    bits: u32,
    a: Formula,
    b: Formula,
}

/// The ISA's sections "Matrix Fragments for mma.m16n8kK".
const SHAPES: [Shape; 7] = [
    Shape {
        k: 8,
        bits: 16,
        a: |lane, i| (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2),
        b: |lane, i| (lane % 4 * 2 + i, lane / 4),
    },
    Shape {
        k: 16,
        bits: 16,
        a: |lane, i| {
            let row = if i < 2 || (4..6).contains(&i) { 0 } else { 8 };
            (lane / 4 + row, lane % 4 * 2 + i % 2 + if i < 4 { 0 } else { 8 })
        },
        b: |lane, i| (lane % 4 * 2 + i % 2 + if i < 2 { 0 } else { 8 }, lane / 4),
    },
    Shape {
        k: 4,
        bits: 32,
        a: |lane, i| (lane / 4 + if i == 0 { 0 } else { 8 }, lane % 4),
        b: |lane, _| (lane % 4, lane / 4),
    },
    Shape {
        k: 8,
        bits: 32,
        a: |lane, i| {
            let row = if matches!(i, 0 | 2) { 0 } else { 8 };
            (lane / 4 + row, lane % 4 + if i < 2 { 0 } else { 4 })
        },
        b: |lane, i| (lane % 4 + if i == 0 { 0 } else { 4 }, lane / 4),
    },
    Shape {
        k: 16,
        bits: 8,
        a: |lane, i| (lane / 4 + if i < 4 { 0 } else { 8 }, lane % 4 * 4 + i % 4),
        b: |lane, i| (lane % 4 * 4 + i, lane / 4),
    },
    Shape {
        k: 32,
        bits: 8,
        a: |lane, i| {
            let row = if i < 4 || (8..12).contains(&i) { 0 } else { 8 };
            (lane / 4 + row, lane % 4 * 4 + i % 4 + if i < 8 { 0 } else { 16 })
        },
        b: |lane, i| (lane % 4 * 4 + i % 4 + if i < 4 { 0 } else { 16 }, lane / 4),
    },
    Shape {
        k: 64,
        bits: 4,
        a: |lane, i| {
            let row = if i < 8 || (16..24).contains(&i) { 0 } else { 8 };
            (lane / 4 + row, lane % 4 * 8 + i % 8 + if i < 16 { 0 } else { 32 })
        },
        b: |lane, i| (lane % 4 * 8 + i % 8 + if i < 8 { 0 } else { 32 }, lane / 4),
    },
];

/// The same for all shapes.
fn c_place(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2)
}

struct Random(u64);

impl Random {
    fn below(&mut self, count: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % count
    }
}

/// Bit patterns of elements in registers, where the formula has them.
fn registers(
    count: usize,
    bits: u32,
    formula: Formula,
    code: impl Fn(usize, usize) -> u32,
) -> Vec<Row> {
    let each = (32 / bits) as usize;
    (0..count)
        .map(|register| {
            std::array::from_fn(|lane| {
                (0..each).fold(0, |word, i| {
                    let (row, column) = formula(lane, register * each + i);
                    word | code(row, column) << (bits as usize * i)
                })
            })
        })
        .collect()
}

fn format(element: Type) -> Format {
    format_of(element).map_or(Format::F32, |(format, _)| format)
}

/// An integer from -2 to 2, which all formats have; from 0 to 2 for unsigned ones.
fn small(random: &mut Random, element: Type) -> (u32, f64) {
    let value = random.below(5) as i32 - 2;
    match element {
        Type::S8 => ((value as u32) & 0xff, f64::from(value)),
        Type::U8 => (value.unsigned_abs(), f64::from(value.abs())),
        _ => {
            let code = encode(format(element), value as f32, Rounding::NearestEven, false, false);
            (code, f64::from(decode(format(element), code)))
        }
    }
}

/// Where in its container an element of fewer bits lies.
fn contained(element: Type, kind: Option<MmaKind>, code: u32) -> u32 {
    match (element, kind) {
        (Type::E2m1, Some(MmaKind::F8f6f4 | MmaKind::Mxf8f6f4)) => code << 2,
        _ => code,
    }
}

fn accumulator_code(d: Type, value: f64) -> u32 {
    match d {
        Type::S32 => value as i32 as u32,
        Type::F16 => encode(Format::F16, value as f32, Rounding::NearestEven, false, false),
        _ => (value as f32).to_bits(),
    }
}

fn check_form(form: WarpMmaForm, random: &mut Random) {
    let k = form.shape.k as usize;
    let (a_registers, b_registers, c_registers) = form.registers();
    let bits = (a_registers * 32 * 32 / (16 * k)) as u32;
    let shape = SHAPES
        .iter()
        .find(|shape| shape.k == form.shape.k && shape.bits == bits)
        .expect("a shape of the ISA");
    let a: Vec<(u32, f64)> = (0..16 * k).map(|_| small(random, form.a)).collect();
    let b: Vec<(u32, f64)> = (0..8 * k).map(|_| small(random, form.b)).collect();
    let c: Vec<f64> = (0..128).map(|_| f64::from(random.below(9)) - 4.0).collect();
    let a_rows = registers(a_registers, bits, shape.a, |row, column| {
        contained(form.a, form.kind, a[row * k + column].0)
    });
    let b_rows = registers(b_registers, bits, shape.b, |row, column| {
        contained(form.b, form.kind, b[column * k + row].0)
    });
    let c_bits = if form.d == Type::F16 { 16 } else { 32 };
    let c_rows = registers(c_registers, c_bits, c_place, |row, column| {
        accumulator_code(form.d, c[row * 8 + column])
    });
    // Scales are powers of two around 1; those that are not selected are NaN.
    let vector = form.scales.map_or(1, |scales| scales.vector as usize);
    let (one, step) = match form.scales.map(|scales| scales.scale_type) {
        Some(Type::Ue4m3) => (7 << 3, 1 << 3),
        _ => (127, 1),
    };
    let a_scales: Vec<u32> = (0..16 * vector).map(|_| random.below(3)).collect();
    let b_scales: Vec<u32> = (0..8 * vector).map(|_| random.below(3)).collect();
    let threads = [random.below(2), random.below(4)];
    let bytes = [0, 1].map(|_| random.below(4) / vector as u32 * vector as u32);
    let word = |element_bits: &[u32], row: usize, byte: u32| {
        (0..vector).fold(0xffff_ffff, |word: u32, i| {
            let at = 8 * (byte + i as u32);
            word & !(0xff << at) | (one + step * element_bits[row * vector + i]) << at
        })
    };
    let mut scales = WarpScales {
        a: [0xffff_ffff; LANES],
        a_selector: ScaleSelector { byte: bytes[0], thread: threads[0] },
        b: [0xffff_ffff; LANES],
        b_selector: ScaleSelector { byte: bytes[1], thread: threads[1] },
    };
    for quad in 0..8 {
        let pair = 4 * quad + 2 * threads[0] as usize;
        scales.a[pair] = word(&a_scales, quad, bytes[0]);
        scales.a[pair + 1] = word(&a_scales, quad + 8, bytes[0]);
        scales.b[4 * quad + threads[1] as usize] = word(&b_scales, quad, bytes[1]);
    }
    let scales = form.scales.map(|_| scales);
    let d = form
        .run(120, ResultMode::Exact, &a_rows, &b_rows, &c_rows, scales.as_ref())
        .unwrap_or_else(|fault| panic!("{form:?}: {fault}"));
    let expected = registers(c_registers, c_bits, c_place, |row, column| {
        let sum: f64 = (0..k)
            .map(|i| {
                let block = i / (k / vector);
                let exponent = match form.scales {
                    Some(_) => a_scales[row * vector + block] + b_scales[column * vector + block],
                    None => 0,
                };
                a[row * k + i].1 * b[column * k + i].1 * f64::from(1 << exponent)
            })
            .sum();
        accumulator_code(form.d, c[row * 8 + column] + sum)
    });
    assert_eq!(d, expected, "{form:?}");
}

const PLAIN: WarpMmaForm = WarpMmaForm {
    shape: MmaShape { m: 16, n: 8, k: 16 },
    a: Type::Bf16,
    b: Type::Bf16,
    d: Type::F32,
    kind: None,
    saturate: false,
    scales: None,
};

fn form(k: u32, d: Type, a: Type, b: Type) -> WarpMmaForm {
    WarpMmaForm { shape: MmaShape { m: 16, n: 8, k }, a, b, d, ..PLAIN }
}

fn scaled(k: u32, a: Type, b: Type, kind: MmaKind, vector: u32, scale_type: Type) -> WarpMmaForm {
    let scales = Some(MmaScales { vector, scale_type });
    WarpMmaForm { kind: Some(kind), scales, ..form(k, Type::F32, a, b) }
}

#[test]
fn forms_use_the_fragments_of_the_isa() {
    use Type::{Bf16, E2m1, E2m3, E3m2, E4m3, E5m2, F16, F32, S8, S32, Tf32, U8, Ue4m3, Ue8m0};
    let mut forms = vec![
        form(8, F32, F16, F16),
        form(8, F16, F16, F16),
        form(16, F32, F16, F16),
        form(16, F16, F16, F16),
        form(8, F32, Bf16, Bf16),
        form(16, F32, Bf16, Bf16),
        form(4, F32, Tf32, Tf32),
        form(8, F32, Tf32, Tf32),
        form(16, F32, E4m3, E5m2),
        form(32, F32, E5m2, E4m3),
        form(32, F16, E4m3, E4m3),
        form(16, S32, S8, U8),
        form(32, S32, U8, S8),
        WarpMmaForm { saturate: true, ..form(32, S32, S8, S8) },
        scaled(64, E2m1, E2m1, MmaKind::Mxf4, 2, Ue8m0),
        scaled(64, E2m1, E2m1, MmaKind::Mxf4nvf4, 2, Ue8m0),
        scaled(64, E2m1, E2m1, MmaKind::Mxf4nvf4, 4, Ue8m0),
        scaled(64, E2m1, E2m1, MmaKind::Mxf4nvf4, 4, Ue4m3),
    ];
    for a in [E4m3, E5m2, E3m2, E2m3, E2m1] {
        for b in [E4m3, E5m2, E3m2, E2m3, E2m1] {
            forms.push(scaled(32, a, b, MmaKind::Mxf8f6f4, 1, Ue8m0));
            forms.push(WarpMmaForm { kind: Some(MmaKind::F8f6f4), ..form(32, F32, a, b) });
            forms.push(WarpMmaForm { kind: Some(MmaKind::F8f6f4), ..form(32, F16, a, b) });
        }
    }
    let mut random = Random(11);
    for form in forms {
        // Often enough that each scale selector comes.
        (0..16).for_each(|_| check_form(form, &mut random));
    }
}

#[test]
fn wrong_forms_have_a_name() {
    use Type::{Bf16, E2m1, E3m2, E4m3, F16, F32, Tf32, Ue4m3, Ue8m0};
    for (form, target, rule) in [
        (form(32, F32, Bf16, Bf16), 90, "mma-form"),
        (form(16, F16, Bf16, Bf16), 90, "mma-form"),
        (form(16, F32, F16, Bf16), 90, "mma-form"),
        (form(16, F32, Tf32, Tf32), 90, "mma-form"),
        (form(32, F32, E3m2, E3m2), 120, "mma-form"),
        (WarpMmaForm { saturate: true, ..PLAIN }, 90, "mma-form"),
        (scaled(32, E4m3, E4m3, MmaKind::Mxf8f6f4, 2, Ue8m0), 120, "mma-form"),
        (scaled(64, E2m1, E2m1, MmaKind::Mxf4, 4, Ue8m0), 120, "mma-form"),
        (scaled(64, E2m1, E2m1, MmaKind::Mxf4nvf4, 2, Ue4m3), 120, "mma-form"),
        (scaled(32, E4m3, E4m3, MmaKind::Mxf8f6f4, 1, Ue8m0), 100, "mma-target"),
        (form(32, F32, E4m3, E4m3), 80, "mma-target"),
        (form(16, F32, Bf16, Bf16), 75, "mma-target"),
    ] {
        assert_eq!(form.check(target).expect_err(rule).rule, rule, "{form:?}");
    }
    let one = [[0; LANES]];
    let refused = PLAIN.run(90, ResultMode::Exact, &one, &one, &one, None);
    assert_eq!(refused.expect_err("registers").rule, "mma-registers");
    let form = scaled(64, E2m1, E2m1, MmaKind::Mxf4, 2, Ue8m0);
    for (a, b, rule) in [
        ((1, 0), (0, 0), "mma-scale-byte-id"),
        ((0, 2), (0, 0), "mma-scale-thread-id"),
        ((0, 0), (4, 0), "mma-scale-byte-id"),
        ((0, 0), (0, 4), "mma-scale-thread-id"),
    ] {
        let scales = WarpScales {
            a: [0; LANES],
            a_selector: ScaleSelector { byte: a.0, thread: a.1 },
            b: [0; LANES],
            b_selector: ScaleSelector { byte: b.0, thread: b.1 },
        };
        let rows = [[0; LANES]; 4];
        let done = form.run(120, ResultMode::Exact, &rows, &rows[..2], &rows, Some(&scales));
        assert_eq!(done.expect_err(rule).rule, rule);
    }
}

/// Shared memory of CTA 3.
struct Shared(Vec<u8>);

impl Memory for Shared {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        let Place::Shared { rank: 3, offset } = place else {
            return Err(Fault::new("test-memory", format!("{place}")));
        };
        bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault> {
        let Place::Shared { rank: 3, offset } = place else {
            return Err(Fault::new("test-memory", format!("{place}")));
        };
        self.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Every lane's row at another place, in no order.
fn scattered() -> [(u32, u32); LANES] {
    std::array::from_fn(|lane| (3, 16 * ((lane as u32 * 37 + 5) % 64)))
}

fn random_bytes(count: usize) -> Vec<u8> {
    let mut random = Random(5);
    (0..count).map(|_| random.below(256) as u8).collect()
}

/// Byte `column` of row `row` of all the matrices' rows, as elements of `bits` bits.
fn element(memory: &Shared, row: usize, column: usize, bits: usize) -> u32 {
    let start = 8 * scattered()[row].1 as usize + bits * column;
    (0..bits).fold(0, |value, i| {
        value | u32::from(memory.0[(start + i) / 8] >> ((start + i) % 8) & 1) << i
    })
}

#[test]
fn loads_of_bytes_are_as_the_isa_draws_them() {
    let mut memory = Shared(random_bytes(1024));
    for (kind, bits) in
        [(MatrixElement::B8, 8), (MatrixElement::B8FromB6, 6), (MatrixElement::B8FromB4, 4)]
    {
        for count in [1, 2] {
            let access =
                MatrixAccess { shape: MatrixShape::M16n16, count, transpose: true, element: kind };
            let loaded = load_matrix(access, &scattered(), &mut memory).expect("legal");
            assert_eq!(loaded.len(), 2 * count as usize);
            for (index, register) in loaded.iter().enumerate() {
                for (lane, word) in register.iter().enumerate() {
                    // Of the transposed matrix each four lanes have a row, each lane four columns.
                    for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
                        let row = 16 * (index / 2) + 4 * (lane % 4) + i;
                        let column = lane / 4 + 8 * (index % 2);
                        assert_eq!(u32::from(byte), element(&memory, row, column, bits));
                    }
                }
            }
        }
        if kind == MatrixElement::B8 {
            continue;
        }
        for count in [1, 2, 4] {
            let access =
                MatrixAccess { shape: MatrixShape::M8n16, count, transpose: false, element: kind };
            let loaded = load_matrix(access, &scattered(), &mut memory).expect("legal");
            for (index, register) in loaded.iter().enumerate() {
                for (lane, word) in register.iter().enumerate() {
                    for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
                        let (row, column) = (8 * index + lane / 4, 4 * (lane % 4) + i);
                        assert_eq!(u32::from(byte), element(&memory, row, column, bits));
                    }
                }
            }
        }
    }
}

#[test]
fn stored_bytes_of_an_accumulator_are_its_columns() {
    for count in [1, 2, 4] {
        let access = MatrixAccess {
            shape: MatrixShape::M16n8,
            count,
            transpose: true,
            element: MatrixElement::B8,
        };
        // Byte i of a register is element ci of a 16 x 8 matrix: its place is its value.
        let rows: Vec<Row> = (0..count)
            .map(|_| {
                std::array::from_fn(|lane| {
                    u32::from_le_bytes([0, 1, 2, 3].map(|i| {
                        let (row, column) = c_place(lane, i);
                        (16 * column + row) as u8
                    }))
                })
            })
            .collect();
        let mut memory = Shared(vec![0xee; 1024]);
        store_matrix(access, &scattered(), &rows, &mut memory).expect("legal");
        let mut untouched = 1024;
        for (lane, &(_, offset)) in scattered().iter().enumerate().take(8 * count as usize) {
            let expected: [u8; 16] = std::array::from_fn(|row| (16 * (lane % 8) + row) as u8);
            assert_eq!(memory.0[offset as usize..][..16], expected);
            untouched -= 16;
        }
        let filled = memory.0.iter().filter(|&&byte| byte == 0xee).count();
        assert!(filled >= untouched);
    }
}

#[test]
fn words_go_and_come_and_turn() {
    let mut memory = Shared(random_bytes(1024));
    let before = memory.0.clone();
    for (count, transpose) in [(1, false), (2, true), (4, false), (4, true)] {
        let access = MatrixAccess {
            shape: MatrixShape::M8n8,
            count,
            transpose,
            element: MatrixElement::B16,
        };
        let loaded = load_matrix(access, &scattered(), &mut memory).expect("legal");
        for (index, register) in loaded.iter().enumerate() {
            for (lane, &word) in register.iter().enumerate() {
                for i in 0..2 {
                    let (row, column) = (lane / 4, lane % 4 * 2 + i);
                    let (row, column) = if transpose { (column, row) } else { (row, column) };
                    let expected = element(&memory, 8 * index + row, column, 16);
                    assert_eq!(word >> (16 * i) & 0xffff, expected);
                }
            }
        }
        let turned: Vec<Row> = loaded.iter().map(transpose_matrix).collect();
        let other = MatrixAccess { transpose: !transpose, ..access };
        assert_eq!(load_matrix(other, &scattered(), &mut memory).expect("legal"), turned);
        memory.0[..].fill(0);
        store_matrix(access, &scattered(), &loaded, &mut memory).expect("legal");
        for &(_, offset) in &scattered()[..8 * count as usize] {
            let range = offset as usize..offset as usize + 16;
            assert_eq!(memory.0[range.clone()], before[range]);
        }
        memory.0.copy_from_slice(&before);
    }
}

#[test]
fn wrong_matrices_have_a_name() {
    use MatrixElement::{B8, B8FromB4, B16};
    use MatrixShape::{M8n8, M8n16, M16n8, M16n16};
    let mut memory = Shared(vec![0; 1024]);
    for (shape, count, transpose, element) in [
        (M8n8, 3, false, B16),
        (M8n8, 1, false, B8),
        (M16n16, 4, true, B8),
        (M16n16, 1, false, B8),
        (M8n16, 1, true, B8FromB4),
        (M8n16, 1, false, B8),
        (M16n8, 1, true, B8),
    ] {
        let access = MatrixAccess { shape, count, transpose, element };
        let fault = load_matrix(access, &scattered(), &mut memory).expect_err("refused");
        assert_eq!(fault.rule, "matrix-load-form");
    }
    let store = MatrixAccess { shape: M16n8, count: 1, transpose: false, element: B8 };
    let fault = store_matrix(store, &scattered(), &[[0; LANES]], &mut memory);
    assert_eq!(fault.expect_err("refused").rule, "matrix-store-form");
    let load = MatrixAccess { shape: M8n8, count: 1, transpose: false, element: B16 };
    let fault = store_matrix(load, &scattered(), &[], &mut memory).expect_err("refused");
    assert_eq!(fault.rule, "matrix-registers");
    let mut rows = scattered();
    rows[7].1 += 8;
    let fault = load_matrix(load, &rows, &mut memory).expect_err("refused");
    assert_eq!(fault.rule, "matrix-row-alignment");
    // Lane 8 and up do not count.
    rows = scattered();
    rows[8].1 += 8;
    load_matrix(load, &rows, &mut memory).expect("legal");
}

#[test]
fn eight_bit_floats_run_as_f16_where_sass_says_so() {
    for (target, fp8, bf16) in [
        (80, TensorCore::Ampere, TensorCore::Ampere),
        (89, TensorCore::Ada, TensorCore::Ada),
        (90, TensorCore::HopperWarp, TensorCore::Hopper),
        (100, TensorCore::HopperWarp, TensorCore::Blackwell),
        (103, TensorCore::HopperWarp, TensorCore::Blackwell),
        (120, TensorCore::Blackwell, TensorCore::Blackwell),
    ] {
        assert_eq!(tensor_core_of(target, Type::E4m3), fp8, "sm_{target}");
        assert_eq!(tensor_core_of(target, Type::Bf16), bf16, "sm_{target}");
    }
}
