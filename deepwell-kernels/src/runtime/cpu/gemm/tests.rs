//! GEMMs against f64 loops over the dequantized operands.

use deepwell_precision::scale_tiles::{TILE_BYTES, offset, tiled_len};
use deepwell_precision::{ElementFormat, packed};
use half::bf16;

use super::*;
use crate::ops::dequantize::oracle;

/// xorshift64*, so that every run sees the same numbers.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// In -1 to 1.
    fn uniform(&mut self) -> f32 {
        self.bits() as u32 as f32 / 2f32.powi(31) - 1.0
    }
}

/// Owned numbers of an operand, with gaps and strides.
#[derive(Clone)]
struct Matrix {
    outer: usize,
    k: usize,
    outer_stride: usize,
    k_stride: usize,
    numbers: Numbers,
}

#[derive(Clone)]
enum Numbers {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    Mx { element: ElementFormat, data: Vec<u8>, scales: Vec<u8> },
}

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    /// Rows of `k`.
    Rows,
    /// Rows of `k` with gaps.
    RowsWithGaps,
    /// Memory is `[k, outer]`.
    Transposed,
    /// Contiguous in neither direction.
    Strided,
}

impl Matrix {
    fn random(kind: DataKind, layout: Layout, outer: usize, k: usize, random: &mut Random) -> Self {
        let (outer_stride, k_stride) = match layout {
            Layout::Rows => (k, 1),
            Layout::RowsWithGaps => (k + 3, 1),
            Layout::Transposed => (1, outer),
            Layout::Strided => (2 * k + 5, 2),
        };
        let length = if outer == 0 || k == 0 {
            0
        } else {
            (outer - 1) * outer_stride + (k - 1) * k_stride + 1
        };
        let numbers = match kind {
            DataKind::F32 => Numbers::F32((0..length).map(|_| random.uniform()).collect()),
            DataKind::Bf16 => {
                Numbers::Bf16((0..length).map(|_| bf16::from_f32(random.uniform())).collect())
            }
            DataKind::Mx => Numbers::Mx {
                element: ElementFormat::E4M3,
                // All bit patterns but the NaNs.
                data: (0..outer * k)
                    .map(|_| random.bits() as u8)
                    .map(|code| if code & 0x7f == 0x7f { code - 1 } else { code })
                    .collect(),
                scales: (0..tiled_len(outer, k.div_ceil(32)))
                    .map(|_| 117 + (random.bits() % 12) as u8)
                    .collect(),
            },
        };
        Self { outer, k, outer_stride, k_stride, numbers }
    }

    /// An MX operand with random codes, finite ones, of any element format.
    fn of_elements(element: ElementFormat, outer: usize, k: usize, random: &mut Random) -> Self {
        let mask = (1u64 << element.bits()) - 1;
        let codes: Vec<u8> = (0..outer * k)
            .map(|_| (random.bits() & mask) as u8)
            .map(|code| if oracle::decode(element, code).is_finite() { code } else { 0x3B })
            .collect();
        let mut data = vec![0; packed::len(element, outer, k)];
        packed::pack(element, &codes, outer, k, &mut data).unwrap();
        let scales = (0..tiled_len(outer, k.div_ceil(32)))
            .map(|_| 117 + (random.bits() % 12) as u8)
            .collect();
        let numbers = Numbers::Mx { element, data, scales };
        Self { outer, k, outer_stride: k, k_stride: 1, numbers }
    }

    fn operand(&self) -> Operand<'_> {
        let data = match &self.numbers {
            Numbers::F32(data) => OperandData::F32(data),
            Numbers::Bf16(data) => OperandData::Bf16(data),
            Numbers::Mx { element, data, scales } => {
                OperandData::Mx { element: *element, data, scales }
            }
        };
        Operand { data, outer_stride: self.outer_stride, k_stride: self.k_stride, part: None }
    }

    fn value(&self, row: usize, column: usize) -> f64 {
        let place = row * self.outer_stride + column * self.k_stride;
        match &self.numbers {
            Numbers::F32(data) => f64::from(data[place]),
            Numbers::Bf16(data) => data[place].to_f64(),
            Numbers::Mx { element, data, scales } => {
                let scale = scales[offset(row, column / 32, self.k.div_ceil(32))];
                let code =
                    packed::code(*element, &data[packed::len(*element, row, self.k)..], column);
                oracle::decode(*element, code) * e8m0(scale)
            }
        }
    }
}

/// The definition, apart from the kernels' tables.
fn e4m3(code: u8) -> f64 {
    let exponent = i32::from(code >> 3 & 15);
    let mantissa = f64::from(code & 7);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn e8m0(code: u8) -> f64 {
    if code == 0xff { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
}

fn available_tiers() -> impl Iterator<Item = Tier> {
    Tier::ALL.into_iter().filter(|tier| tier.is_available())
}

/// The documented bound on the rounding of one sum, in units of `2^-24 * sum |a| |b|`.
fn rounding_units(tier: Tier, k: usize) -> f64 {
    match tier {
        Tier::AmxBf16 => 18.0 + k.div_ceil(32) as f64,
        Tier::Avx512Bf16 => k as f64 + 1.0,
        Tier::Avx512 => k as f64,
        Tier::F32 => k as f64 + 2.0,
    }
}

/// The documented number of roundings at the size of an accumulating output.
fn accumulating_units(tier: Tier, k: usize) -> f64 {
    match tier {
        Tier::AmxBf16 | Tier::Avx512Bf16 | Tier::Avx512 => 1.0,
        Tier::F32 => k.div_ceil(512).max(2) as f64,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum To {
    F32,
    F32Accumulate,
    Bf16,
}

fn run(tier: Tier, a: &Matrix, b: &Matrix, to: To, serial: bool) -> Vec<f32> {
    let (m, n, k) = (a.outer, b.outer, a.k);
    let (a, b) = (a.operand(), b.operand());
    // Poisoned, so that a read before a write shows.
    let mut workspace = vec![0xffu8; workspace_bytes(tier, m, n, k, a.kind(), b.kind())];
    let mut f32_result: Vec<f32> = (0..m * n).map(before).collect();
    let mut bf16_result = vec![bf16::NAN; m * n];
    let out = match to {
        To::F32 => Output::F32 { data: &mut f32_result, accumulate: false },
        To::F32Accumulate => Output::F32 { data: &mut f32_result, accumulate: true },
        To::Bf16 => Output::Bf16 { data: &mut bf16_result },
    };
    let run = if serial { gemm_serial } else { gemm };
    run(tier, m, n, k, a, b, out, &mut workspace).unwrap();
    match to {
        To::Bf16 => bf16_result.iter().map(|value| value.to_f32()).collect(),
        _ => f32_result,
    }
}

/// What an accumulating output holds before.
fn before(index: usize) -> f32 {
    (index % 17) as f32 - 8.0
}

fn check(tier: Tier, a: &Matrix, b: &Matrix, to: To) {
    let got = run(tier, a, b, to, false);
    let serial = run(tier, a, b, to, true);
    let what = || {
        let (a, b) = (a.operand(), b.operand());
        format!("{tier:?} {:?} x {:?} strides {:?}", a.kind(), b.kind(), (a.k_stride, b.k_stride))
    };
    for row in 0..a.outer {
        for column in 0..b.outer {
            let index = row * b.outer + column;
            let terms = (0..a.k).map(|k| a.value(row, k) * b.value(column, k));
            let (sum, magnitude) = terms
                .fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()));
            let unit = 2f64.powi(-24);
            let mut allowed = rounding_units(tier, a.k) * unit * magnitude;
            let mut expected = sum;
            match to {
                To::F32 => {}
                To::F32Accumulate => {
                    let before = f64::from(before(index));
                    expected += before;
                    let size = before.abs() + magnitude + allowed;
                    allowed += accumulating_units(tier, a.k) * unit * size;
                }
                To::Bf16 => allowed += (expected.abs() + allowed) / 256.0,
            }
            let error = (f64::from(got[index]) - expected).abs();
            assert!(
                error <= allowed || (error.is_nan() && got[index].is_nan() && expected.is_nan()),
                "{} [{}, {}, {}] to {to:?} at ({row}, {column}): expected {expected}, got {}, \
                 allowed error {allowed}",
                what(),
                a.outer,
                b.outer,
                a.k,
                got[index]
            );
            assert_eq!(got[index].to_bits(), serial[index].to_bits(), "serial differs: {}", what());
        }
    }
}

/// Sizes around those of tiles (16), panels and steps (32), and nothing at all.
const SIZES: [(usize, usize, usize); 16] = [
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (1, 33, 64),
    (2, 1, 31),
    (15, 17, 33),
    (16, 16, 32),
    (17, 15, 63),
    (31, 32, 2),
    (32, 32, 64),
    (33, 31, 65),
    (64, 96, 128),
    (65, 48, 1),
    (100, 70, 96),
    (47, 130, 257),
];

#[test]
fn bf16_in_every_layout() {
    let mut random = Random(1);
    let layouts = [Layout::Rows, Layout::RowsWithGaps, Layout::Transposed, Layout::Strided];
    for tier in available_tiers() {
        for (m, n, k) in SIZES {
            for layout_a in layouts {
                for layout_b in layouts {
                    let a = Matrix::random(DataKind::Bf16, layout_a, m, k, &mut random);
                    let b = Matrix::random(DataKind::Bf16, layout_b, n, k, &mut random);
                    for to in [To::F32, To::F32Accumulate, To::Bf16] {
                        check(tier, &a, &b, to);
                    }
                }
            }
        }
    }
}

#[test]
fn every_pair_of_kinds() {
    let mut random = Random(2);
    let kinds = [DataKind::F32, DataKind::Bf16, DataKind::Mx];
    for tier in available_tiers() {
        for (m, n, k) in SIZES {
            for kind_a in kinds {
                for kind_b in kinds {
                    let a = Matrix::random(kind_a, Layout::Rows, m, k, &mut random);
                    let b = Matrix::random(kind_b, Layout::Rows, n, k, &mut random);
                    // An F32 operand is multiplied in FP32: the bound is that tier's.
                    let tier = if takes_f32_tier(tier, kind_a, kind_b) { Tier::F32 } else { tier };
                    for to in [To::F32, To::F32Accumulate, To::Bf16] {
                        check(tier, &a, &b, to);
                    }
                }
            }
        }
    }
}

#[test]
fn more_than_one_block_of_rows() {
    // OUTER_BLOCK is 1024: the blocks of either operand, and of both.
    let mut random = Random(3);
    for tier in available_tiers() {
        for (m, n, k) in [(1030, 5, 40), (5, 1030, 40), (1040, 1025, 3)] {
            for kind in [DataKind::Bf16, DataKind::Mx] {
                let a = Matrix::random(kind, Layout::Rows, m, k, &mut random);
                let b = Matrix::random(kind, Layout::Rows, n, k, &mut random);
                check(tier, &a, &b, To::F32Accumulate);
                check(tier, &a, &b, To::Bf16);
            }
        }
    }
}

/// Large terms that cancel, so that a wrong order or a lost term is far outside the bound.
#[test]
fn cancellation_stays_in_the_bound() {
    let k = 96;
    let numbers = |sign: f32| {
        (0..3 * k).map(move |index| {
            let size = 2f32.powi((index * 7 % 40) as i32 - 20);
            bf16::from_f32(if index % 2 == 0 { size } else { size * sign })
        })
    };
    let matrix = |numbers: Vec<bf16>| Matrix {
        outer: 3,
        k,
        outer_stride: k,
        k_stride: 1,
        numbers: Numbers::Bf16(numbers),
    };
    let a = matrix(numbers(1.0).collect());
    let b = matrix(numbers(-1.0).collect());
    for tier in available_tiers() {
        check(tier, &a, &b, To::F32);
    }
}

/// Every E4M3 code times one, under scales at the edges of what the BF16 tiers take and beyond.
#[test]
fn every_code_at_extreme_scales() {
    for tier in available_tiers() {
        for scale in [0, 1, 9, 10, 11, 100, 127, 246, 247, 250, 254] {
            let data: Vec<u8> = (0..=255u8).collect();
            let ones: Vec<bf16> = vec![bf16::ONE; 32];
            for code_row in data.chunks_exact(32) {
                // One code a row, so that nothing is summed; the rest zero.
                let mut a_data = vec![0u8; 32 * 32];
                for (row, &code) in code_row.iter().enumerate() {
                    a_data[row * 32 + row] = code;
                }
                let a_scales = [scale; TILE_BYTES];
                let a = Operand::rows_mx(ElementFormat::E4M3, &a_data, &a_scales, 32);
                let b = Operand::rows_bf16(&ones, 32);
                let mut result = [7.0f32; 32];
                let bytes = workspace_bytes(tier, 32, 1, 32, a.kind(), b.kind());
                let out = Output::F32 { data: &mut result, accumulate: false };
                gemm(tier, 32, 1, 32, a, b, out, &mut vec![0; bytes]).unwrap();
                for (&code, got) in code_row.iter().zip(result) {
                    // Exact, up to the one rounding of `f32` at its own edges.
                    let expected = (e4m3(code) * e8m0(scale)) as f32;
                    assert!(
                        got == expected || (got.is_nan() && expected.is_nan()),
                        "{tier:?} code {code:#04x} scale {scale}: expected {expected}, got {got}"
                    );
                }
            }
        }
    }
}

/// Every pair of element formats, packed or not, at ragged sizes.
#[test]
fn elements_of_every_format() {
    let mut random = Random(11);
    for (m, n, k) in [(1, 1, 1), (33, 40, 70), (64, 17, 128), (130, 35, 45)] {
        for &of_a in ElementFormat::ALL {
            for &of_b in ElementFormat::ALL {
                let a = Matrix::of_elements(of_a, m, k, &mut random);
                let b = Matrix::of_elements(of_b, n, k, &mut random);
                for tier in available_tiers() {
                    check(tier, &a, &b, To::F32);
                }
            }
        }
    }
}

/// Every code times one, under scales at both edges of what the BF16 tiers take and beyond.
#[test]
fn codes_of_every_format_at_extreme_scales() {
    for &element in ElementFormat::ALL {
        let [least, greatest] = elements::exponents(element);
        let edges = [1 - least, 254 - greatest];
        let edges = edges.into_iter().flat_map(|edge| [edge - 1, edge, edge + 1]);
        for scale in edges.map(|edge| edge as u8).chain([0, 127, 254]) {
            let codes: Vec<u8> = (0..1u16 << element.bits()).map(|code| code as u8).collect();
            let ones = vec![bf16::ONE; 32];
            for codes in codes.chunks(32) {
                let mut spread = vec![0u8; 32 * 32];
                for (row, &code) in codes.iter().enumerate() {
                    spread[row * 32 + row] = code;
                }
                let mut data = vec![0; packed::len(element, 32, 32)];
                packed::pack(element, &spread, 32, 32, &mut data).unwrap();
                let scales = [scale; TILE_BYTES];
                for tier in available_tiers() {
                    let a = Operand::rows_mx(element, &data, &scales, 32);
                    let b = Operand::rows_bf16(&ones, 32);
                    let mut result = [7.0f32; 32];
                    let bytes = workspace_bytes(tier, 32, 1, 32, a.kind(), b.kind());
                    let out = Output::F32 { data: &mut result, accumulate: false };
                    gemm(tier, 32, 1, 32, a, b, out, &mut vec![0; bytes]).unwrap();
                    for (&code, got) in codes.iter().zip(result) {
                        let expected = (oracle::decode(element, code) * e8m0(scale)) as f32;
                        let is_same = got == expected || (got.is_nan() && expected.is_nan());
                        let what = format!("{tier:?} {element} {code:#04x} under 2^{scale}-127");
                        assert!(is_same, "{what}: expected {expected}, got {got}");
                    }
                }
            }
        }
    }
}

/// A product of two MXFP8 values under 2^-126 is not flushed.
#[test]
fn tiny_products_survive() {
    let data = [0x01; 32];
    for tier in available_tiers() {
        for (scale_a, scale_b) in [(72, 74), (72, 73), (60, 63), (13, 110), (5, 240)] {
            let (scales_a, scales_b) = ([scale_a; TILE_BYTES], [scale_b; TILE_BYTES]);
            let a = Operand::rows_mx(ElementFormat::E4M3, &data, &scales_a, 32);
            let b = Operand::rows_mx(ElementFormat::E4M3, &data, &scales_b, 32);
            let mut result = [0.0f32];
            let bytes = workspace_bytes(tier, 1, 1, 32, a.kind(), b.kind());
            let out = Output::F32 { data: &mut result, accumulate: false };
            gemm(tier, 1, 1, 32, a, b, out, &mut vec![0; bytes]).unwrap();
            let expected = 32.0 * 2f64.powi(-18) * e8m0(scale_a) * e8m0(scale_b);
            assert_eq!(f64::from(result[0]), expected, "{tier:?} scales {scale_a} {scale_b}");
        }
    }
}

#[test]
fn non_finite_values_come_through() {
    let mut random = Random(4);
    for tier in available_tiers() {
        let mut a = Matrix::random(DataKind::Mx, Layout::Rows, 40, 70, &mut random);
        let b = Matrix::random(DataKind::Mx, Layout::Rows, 33, 70, &mut random);
        if let Numbers::Mx { data, scales, .. } = &mut a.numbers {
            // A NaN scale over a block that is all zeros, and one NaN code.
            data[5 * 70 + 32..5 * 70 + 64].fill(0);
            scales[offset(5, 1, 3)] = 0xff;
            data[37 * 70 + 69] = 0xff;
        }
        check(tier, &a, &b, To::F32);
        let result = run(tier, &a, &b, To::F32, false);
        for (index, value) in result.iter().enumerate() {
            assert_eq!(value.is_nan(), [5, 37].contains(&(index / 33)), "{tier:?} at {index}");
        }

        let mut a = Matrix::random(DataKind::Bf16, Layout::Rows, 34, 64, &mut random);
        let b = Matrix::random(DataKind::Bf16, Layout::Rows, 34, 64, &mut random);
        if let Numbers::Bf16(numbers) = &mut a.numbers {
            numbers[0] = bf16::INFINITY;
            numbers[33 * 64] = bf16::NEG_INFINITY;
            numbers[33 * 64 + 1] = bf16::NAN;
        }
        for to in [To::F32, To::Bf16] {
            let result = run(tier, &a, &b, to, false);
            assert!(result[..34].iter().all(|value| value.is_infinite()), "{tier:?}");
            assert!(result[34..33 * 34].iter().all(|value| value.is_finite()), "{tier:?}");
            assert!(result[33 * 34..].iter().all(|value| value.is_nan()), "{tier:?}");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut random = Random(5);
    for tier in available_tiers() {
        for kind in [DataKind::F32, DataKind::Bf16, DataKind::Mx] {
            for layout in [Layout::Rows, Layout::Transposed] {
                if kind == DataKind::Mx && layout == Layout::Transposed {
                    continue;
                }
                // Above SERIAL_FMAS_MAX, so that the pool is used.
                let a = Matrix::random(kind, layout, 200, 700, &mut random);
                let b = Matrix::random(kind, layout, 100, 700, &mut random);
                let on = |threads| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    pool.unwrap().install(|| run(tier, &a, &b, To::F32Accumulate, false))
                };
                let one: Vec<u32> = on(1).iter().map(|value| value.to_bits()).collect();
                for threads in [2, 3] {
                    let many: Vec<u32> = on(threads).iter().map(|value| value.to_bits()).collect();
                    assert!(one == many, "{tier:?} {kind:?} {layout:?} on {threads} threads");
                }
                let serial = run(tier, &a, &b, To::F32Accumulate, true);
                let serial: Vec<u32> = serial.iter().map(|value| value.to_bits()).collect();
                assert!(one == serial, "{tier:?} {kind:?} {layout:?} serial");
            }
        }
    }
}

#[test]
fn unaligned_and_oversized_workspace() {
    let mut random = Random(6);
    let a = Matrix::random(DataKind::Mx, Layout::Rows, 33, 40, &mut random);
    let b = Matrix::random(DataKind::Mx, Layout::Rows, 33, 40, &mut random);
    for tier in available_tiers() {
        let expected = run(tier, &a, &b, To::F32, false);
        let bytes = workspace_bytes(tier, 33, 33, 40, DataKind::Mx, DataKind::Mx);
        for shift in [0, 1, 3, 63] {
            let mut workspace = vec![0xee_u8; bytes + shift + 8];
            let guarded = &mut workspace[shift..shift + bytes];
            let mut result = vec![0.0; 33 * 33];
            let out = Output::F32 { data: &mut result, accumulate: false };
            gemm(tier, 33, 33, 40, a.operand(), b.operand(), out, guarded).unwrap();
            assert_eq!(result, expected);
            assert!(workspace[..shift].iter().all(|&byte| byte == 0xee));
            assert!(workspace[shift + bytes..].iter().all(|&byte| byte == 0xee));
        }
    }
}

#[test]
fn all_in_f32_needs_no_workspace() {
    let (x, w) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 0.0, 0.0, 1.0]);
    for tier in available_tiers() {
        let (a, b) = (Operand::rows_f32(&x, 2), Operand::rows_f32(&w, 2));
        let mut y = [0.0f32; 4];
        let out = Output::F32 { data: &mut y, accumulate: false };
        gemm(tier, 2, 2, 2, a, b, out, &mut []).unwrap();
        assert_eq!(y, x);
        let mut y = [bf16::ZERO; 4];
        let error = gemm(tier, 2, 2, 2, a, b, Output::Bf16 { data: &mut y }, &mut []);
        assert!(matches!(error, Err(GemmError::WorkspaceTooSmall { .. })), "{tier:?}");
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let numbers = vec![bf16::ZERO; 12];
    let rows = |stride| Operand::rows_bf16(&numbers, stride);
    let run = |a: Operand<'_>, b: Operand<'_>, length: usize, bytes: usize| {
        let mut data = vec![0.0; length];
        let out = Output::F32 { data: &mut data, accumulate: false };
        gemm(Tier::F32, 3, 3, 4, a, b, out, &mut vec![0; bytes]).unwrap_err().to_string()
    };
    let data = [0u8; 12];
    let mx = Operand::rows_mx(ElementFormat::E4M3, &data, &[0; TILE_BYTES], 4);
    let rows_of = [
        (run(rows(5), rows(4), 9, 9999), "operand A: expected at least 14 elements"),
        (run(rows(4), rows(usize::MAX), 9, 9999), "operand B: expected at least"),
        (run(rows(4), rows(4), 8, 9999), "output: expected [3, 3] elements, got a slice of 8"),
        (run(rows(4), rows(4), 9, 7), "workspace: expected at least"),
        (run(mx.transposed(), rows(4), 9, 9999), "operand A: expected MX rows with strides"),
        (
            run(Operand::rows_mx(ElementFormat::E4M3, &data, &data[..2], 4), rows(4), 9, 9999),
            "operand A: expected at least 512 scales",
        ),
    ];
    for (message, expected) in rows_of {
        assert!(message.starts_with(expected), "{message}");
    }
    for tier in Tier::ALL.into_iter().filter(|tier| !tier.is_available()) {
        let mut data = [0.0; 9];
        let out = Output::F32 { data: &mut data, accumulate: false };
        let error = gemm(tier, 3, 3, 4, rows(4), rows(4), out, &mut [0; 9999]).unwrap_err();
        assert_eq!(
            error,
            GemmError::TierUnavailable { tier: tier.name(), best: best_tier().name() }
        );
    }
}
