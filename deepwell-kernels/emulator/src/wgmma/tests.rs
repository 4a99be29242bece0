//! Matrices laid out by the canonical layouts, MMAs against plain sums, and rules by name.

use super::*;
use crate::decode::{MmaShape, Type};
use crate::error::Fault;
use crate::number::{Format, Rounding, encode};
use crate::numerics::ResultMode;
use crate::place::{Memory, Place};
use crate::warp_mma::fragment::{gather_accumulator, scatter_accumulator};
use crate::warp_mma::{LANES, Row};

struct Shared(Vec<u8>);

impl Memory for Shared {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        match place {
            Place::Shared { rank: 1, offset } if offset as usize + bytes.len() <= self.0.len() => {
                bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
                Ok(())
            }
            _ => Err(Fault::new("test-memory", format!("{place}"))),
        }
    }

    fn write(&mut self, place: Place, _: &[u8]) -> Result<(), Fault> {
        Err(Fault::new("test-memory", format!("{place} is only read")))
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, count: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % count
    }
}

const SWIZZLES: [Swizzle; 4] =
    [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];

/// Byte of element `(row, column)` of a matrix `[rows, K]` in tiles as a bulk copy of boxes of the
/// swizzle's width leaves them: K-major boxes have all rows and `16 W` bytes of K, the others all
/// of K and `16 W` bytes of rows. Without swizzle, core matrices of 8 times 16 bytes follow each
/// other, first along the rows. Gives leading and stride offset too.
fn place(
    (rows, k): (u32, u32),
    (row, column): (u32, u32),
    bytes: u32,
    swizzle: Swizzle,
    is_transposed: bool,
) -> (u32, u32, u32) {
    // Let `inner` go along the contiguous dimension.
    let (outers, outer, inner) =
        if is_transposed { (k, column, row * bytes) } else { (rows, row, column * bytes) };
    if swizzle == Swizzle::None {
        let chunk = inner / 16;
        let linear = chunk * outers * 16 + outer * 16 + inner % 16;
        // From one chunk to the next along the contiguous dimension, and from 8 rows to the next.
        let (along, across) = (outers * 16, 128);
        let (leading, stride) = if is_transposed { (across, along) } else { (along, across) };
        return (linear, leading, stride);
    }
    let width = 16 * swizzle.chunks();
    let linear = inner / width * outers * width + outer * width + inner % width;
    let line = linear / 128;
    let chunk = (linear / 16 % swizzle.chunks()) ^ (line % swizzle.chunks());
    let swizzled = linear / width * width + chunk * 16 + linear % 16;
    (swizzled, outers * width, 8 * width)
}

/// Puts bit patterns `[rows, K]` into memory and gives their descriptor.
fn lay(
    memory: &mut Shared,
    start: u32,
    element_bits: &[u32],
    shape: (u32, u32),
    bytes: u32,
    swizzle: Swizzle,
    is_transposed: bool,
) -> u64 {
    let mut offsets = (0, 0);
    for (index, code) in element_bits.iter().enumerate() {
        let at = (index as u32 / shape.1, index as u32 % shape.1);
        let (byte, leading, stride) = place(shape, at, bytes, swizzle, is_transposed);
        offsets = (leading, stride);
        let target = &mut memory.0[(start + byte) as usize..][..bytes as usize];
        target.copy_from_slice(&code.to_le_bytes()[..bytes as usize]);
    }
    let (leading_bytes, stride_bytes) = offsets;
    Descriptor { start, leading_bytes, stride_bytes, base_offset: 0, swizzle }.encode()
}

fn code(element: Type, value: i32) -> u32 {
    let format = match element {
        Type::F16 => Format::F16,
        Type::Bf16 => Format::BF16,
        Type::Tf32 => Format::TF32,
        Type::E4m3 => Format::E4M3,
        Type::E5m2 => Format::E5M2,
        _ => return value as u32 & 0xff,
    };
    encode(format, value as f32, Rounding::NearestEven, false, false)
}

const BF16: WgmmaForm = WgmmaForm {
    shape: MmaShape { m: 64, n: 64, k: 16 },
    a: Type::Bf16,
    b: Type::Bf16,
    d: Type::F32,
    a_in_registers: false,
    saturate: false,
    negate_a: false,
    negate_b: false,
    transpose_a: false,
    transpose_b: false,
};

fn same(element: Type, d: Type, n: u32) -> WgmmaForm {
    let shape = MmaShape { m: 64, n, k: 32 / element.bytes() };
    WgmmaForm { shape, a: element, b: element, d, ..BF16 }
}

/// Registers of A by the ISA's figures: the rows of a warp are those of `mma.sync`'s A.
fn a_registers(element_bits: &[u32], warp: usize, k: usize, bits: usize) -> Vec<Row> {
    let each = 32 / bits;
    (0..4)
        .map(|register| {
            std::array::from_fn(|lane| {
                (0..each).fold(0, |word, i| {
                    let row = 16 * warp + lane / 4 + 8 * (register % 2);
                    let column = each * (lane % 4) + i + 4 * each * (register / 2);
                    word | element_bits[row * k + column] << (bits * i)
                })
            })
        })
        .collect()
}

fn check(form: WgmmaForm, swizzles: (Swizzle, Swizzle), random: &mut Random) {
    let MmaShape { m, n, k } = form.shape;
    let mut values = |count: u32, element| -> Vec<i32> {
        let least = if element == Type::U8 { 0 } else { -2 };
        (0..count).map(|_| random.below(5) as i32 + least).collect()
    };
    let a = values(m * k, form.a);
    let b = values(n * k, form.b);
    let c = values(m * n, Type::S8);
    let element_bits = |values: &[i32], element| -> Vec<u32> {
        values.iter().map(|&value| code(element, value)).collect()
    };
    let (a_element_bits, b_element_bits) = (element_bits(&a, form.a), element_bits(&b, form.b));
    let mut memory = Shared(vec![0xff; 64 * 1024]);
    let bytes = form.a.bytes();
    let a_at = lay(&mut memory, 4096, &a_element_bits, (m, k), bytes, swizzles.0, form.transpose_a);
    let b_at =
        lay(&mut memory, 32768, &b_element_bits, (n, k), bytes, swizzles.1, form.transpose_b);
    let d_code = |value: i32| match form.d {
        Type::F16 => code(Type::F16, value),
        Type::F32 => (value as f32).to_bits(),
        _ => value as u32,
    };
    let d_bits = if form.d == Type::F16 { 16 } else { 32 };
    let (_, d_registers) = form.registers();
    let part = 16 * n as usize;
    let mut warps: Vec<WarpFragments> = (0..4)
        .map(|warp| {
            let mut d = vec![[0; LANES]; d_registers];
            let rows: Vec<u32> = c[warp * part..][..part].iter().map(|&v| d_code(v)).collect();
            scatter_accumulator(&rows, d_bits, n as usize, &mut d);
            let a = if form.a_in_registers {
                a_registers(&a_element_bits, warp, k as usize, 8 * bytes as usize)
            } else {
                Vec::new()
            };
            WarpFragments { warp: warp as u32, a, d }
        })
        .collect();
    let a_place = if form.a_in_registers { MatrixA::Registers } else { MatrixA::Shared(a_at) };
    // Warps may come one by one or all at once.
    let (first, rest) = warps.split_at_mut(1);
    let accumulate = random.below(4) > 0;
    for warps in [first, rest] {
        form.run(ResultMode::Exact, 1, a_place, b_at, accumulate, warps, &mut memory)
            .unwrap_or_else(|fault| panic!("{form:?} {swizzles:?}: {fault}"));
    }
    let sign = if form.negate_a != form.negate_b { -1 } else { 1 };
    for row in 0..m as usize {
        let warp = &warps[row / 16];
        let came = gather_accumulator(&warp.d, d_bits, n as usize);
        for column in 0..n as usize {
            let k = k as usize;
            let sum: i32 = (0..k).map(|i| a[row * k + i] * b[column * k + i]).sum();
            let old = if accumulate { c[row * n as usize + column] } else { 0 };
            let expected = d_code(old + sign * sum);
            let came = came[row % 16 * n as usize + column];
            assert_eq!(came, expected, "{form:?} {swizzles:?} at {row}, {column}");
        }
    }
}

#[test]
fn sixteen_bit_forms_of_all_layouts() {
    let mut random = Random(3);
    for a_swizzle in SWIZZLES {
        for b_swizzle in SWIZZLES {
            for (transpose_a, transpose_b) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                // Columns of 16-bit elements fill whole boxes of 128 bytes with 64 and 128 of them.
                for form in [BF16, same(Type::F16, Type::F32, 128), same(Type::F16, Type::F16, 64)]
                {
                    let form = WgmmaForm { transpose_a, transpose_b, ..form };
                    check(form, (a_swizzle, b_swizzle), &mut random);
                }
            }
        }
    }
}

#[test]
fn forms_of_all_types_and_sizes() {
    let mut random = Random(4);
    let mut forms = vec![
        same(Type::Tf32, Type::F32, 72),
        same(Type::E4m3, Type::F16, 8),
        same(Type::E5m2, Type::F32, 256),
        same(Type::S8, Type::S32, 24),
        WgmmaForm { a: Type::U8, ..same(Type::S8, Type::S32, 208) },
        WgmmaForm { saturate: true, ..same(Type::U8, Type::S32, 32) },
        WgmmaForm { a: Type::E5m2, ..same(Type::E4m3, Type::F32, 40) },
        WgmmaForm { negate_a: true, ..BF16 },
        WgmmaForm { negate_b: true, ..same(Type::E4m3, Type::F32, 16) },
        WgmmaForm { negate_a: true, negate_b: true, ..same(Type::Tf32, Type::F32, 8) },
    ];
    for n in (8..=256).step_by(8) {
        forms.push(WgmmaForm { shape: MmaShape { n, ..BF16.shape }, ..BF16 });
    }
    for form in forms {
        for swizzle in SWIZZLES {
            for a_in_registers in [false, true] {
                let form = WgmmaForm { a_in_registers, ..form };
                check(form, (swizzle, swizzle), &mut random);
            }
        }
    }
}

#[test]
fn wrong_forms_have_a_name() {
    let shape = |m, n, k| WgmmaForm { shape: MmaShape { m, n, k }, ..BF16 };
    let transposed = WgmmaForm { transpose_b: true, ..BF16 };
    for (form, rule) in [
        (WgmmaForm { b: Type::F16, ..BF16 }, "wgmma-types"),
        (WgmmaForm { d: Type::F16, ..BF16 }, "wgmma-types"),
        (same(Type::E2m1, Type::F32, 64), "wgmma-types"),
        (same(Type::S8, Type::F32, 64), "wgmma-types"),
        (shape(128, 64, 16), "wgmma-shape"),
        (shape(64, 64, 32), "wgmma-shape"),
        (shape(64, 12, 16), "wgmma-shape"),
        (shape(64, 264, 16), "wgmma-shape"),
        (shape(64, 0, 16), "wgmma-shape"),
        (same(Type::S8, Type::S32, 40), "wgmma-shape"),
        (WgmmaForm { transpose_a: true, ..same(Type::Tf32, Type::F32, 8) }, "wgmma-transpose"),
        (WgmmaForm { transpose_b: true, ..same(Type::E4m3, Type::F32, 8) }, "wgmma-transpose"),
        (WgmmaForm { transpose_a: true, a_in_registers: true, ..transposed }, "wgmma-transpose"),
        (WgmmaForm { negate_a: true, ..same(Type::S8, Type::S32, 8) }, "wgmma-scale"),
        (WgmmaForm { saturate: true, ..BF16 }, "wgmma-saturate"),
    ] {
        assert_eq!(form.check().expect_err(rule).rule, rule, "{form:?}");
    }
    for bits in [1 << 14, 1 << 31, 1 << 46, 1 << 52, 1 << 61, 1 << 49] {
        let fault = Descriptor::decode(bits).expect_err("a descriptor");
        assert_eq!(fault.rule, "wgmma-descriptor");
    }
    let mut memory = Shared(vec![0; 1024]);
    let none = Descriptor {
        start: 0x3_fff0,
        leading_bytes: 16,
        stride_bytes: 128,
        base_offset: 0,
        swizzle: Swizzle::None,
    };
    let mut run = |a, d: usize| {
        let mut warps = [WarpFragments { warp: 0, a: Vec::new(), d: vec![[0; LANES]; d] }];
        BF16.run(ResultMode::Exact, 1, a, 0, true, &mut warps, &mut memory).expect_err("refused")
    };
    assert_eq!(run(MatrixA::Shared(none.encode()), 31).rule, "wgmma-registers");
    assert_eq!(run(MatrixA::Registers, 32).rule, "wgmma-registers");
    assert_eq!(run(MatrixA::Shared(none.encode()), 32).rule, "test-memory");
}
