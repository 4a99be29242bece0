//! `mxfp8_gemm.cu`: MXFP8 GEMMs against f64 sums of what they stand for. The checks are also those
//! of `sm120_mxfp8_gemm.cu`.

use deepwell_ir::{DType, GemmKind, ops};
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::{BlockShape, Granularity, QuantFormat};

use crate::bf16_gemm::EMULATED_WORK;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};

/// A kernel that takes GEMMs of any size and any scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// What each block of 32 along K may add to the error, and what all may together, in units of
    /// 2^-23 of the sum of the magnitudes of the products.
    pub(crate) error: (f64, f64),
}

/// The sum of a block of 32 is exact or cut below 2^-23 of its largest product by the tensor core,
/// in two steps at most; then each of the `k / 32` additions rounds once.
pub(crate) const KERNEL: Kernel = Kernel { name: "cuda_mxfp8_gemm", error: (1.0, 8.0) };

/// M, N, K: empty, single, odd, around the tile of 128, the block of 32 and the copy of 16.
const SIZES: &[(usize, usize, usize)] = &[
    (0, 8, 32),
    (8, 0, 32),
    (8, 8, 0),
    (1, 1, 1),
    (3, 5, 31),
    (5, 3, 33),
    (64, 32, 32),
    (127, 128, 127),
    (128, 129, 128),
    (129, 127, 144),
    (130, 136, 160),
    (257, 40, 1056),
    (136, 264, 509),
    (384, 520, 768),
];

/// One GEMM by one kernel.
pub(crate) fn multiply(
    gpu: &mut Gpu,
    kernel: &str,
    op: ops::ScaledGemm,
    (a, b): (&MxMatrix, &MxMatrix),
    bias: Option<&HostTensor>,
    out: &HostTensor,
    accumulate: bool,
) -> Vec<f64> {
    let mut inputs = vec![a.data.clone(), a.scales.clone(), b.data.clone(), b.scales.clone()];
    inputs.extend(bias.cloned());
    let options = RunOptions { accumulate, kernel: Some(kernel), ..RunOptions::default() };
    gpu.run_with(op, &inputs, std::slice::from_ref(out), options).remove(0).to_f64()
}

impl Kernel {
    /// What a GEMM may be wrong by, as a share of the magnitudes.
    fn share(&self, k: usize, kind: MxKind) -> f64 {
        let (of_block, of_all) = self.error;
        match kind {
            MxKind::Exact => 0.0,
            _ => (k.div_ceil(32) as f64 * of_block + of_all) * 2f64.powi(-23),
        }
    }
}

pub(crate) fn check(
    gpu: &mut Gpu,
    kernel: Kernel,
    sizes: (usize, usize, usize),
    spec: QuantFormat,
    kind: MxKind,
) {
    let (rows, columns, k) = sizes;
    let by_rows = spec.with_shape(BlockShape::Row);
    let a = MxMatrix::new(rows, k, by_rows, kind, 1);
    let b = MxMatrix::new(columns, k, spec, kind, 50);
    let mut sums = linear::forward(&a.values, &b.values, None, k);
    let mut magnitude = magnitudes(&a, &b, k);
    if k == 0 {
        // The oracle has no rows to walk when there is nothing to sum.
        sums = vec![0.0; rows * columns];
        magnitude = sums.clone();
    }
    let share = kernel.share(k, kind);
    let op = |kind, output, bias| ops::ScaledGemm { kind, output, bias, a: by_rows, b: spec };
    let name = |what: &str| format!("{} {what} {sizes:?} {kind:?} {spec:?}", kernel.name);

    for output in [DType::Bf16, DType::F32] {
        let out = HostTensor::output(output, &[rows, columns]);
        for has_bias in [false, true] {
            let bias = HostTensor::from_f32(output, &[columns], &uniform(columns, 4, 8.0));
            let bias = has_bias.then_some(&bias);
            let mut expected = sums.clone();
            let mut magnitude = magnitude.clone();
            if let Some(bias) = bias {
                for (row, sums) in expected.chunks_mut(columns.max(1)).enumerate() {
                    for (column, (sum, bias)) in sums.iter_mut().zip(bias.to_f64()).enumerate() {
                        *sum += bias;
                        magnitude[row * columns + column] += bias.abs();
                    }
                }
            }
            let op = op(GemmKind::Fprop, output, has_bias);
            let got = multiply(gpu, kernel.name, op, (&a, &b), bias, &out, false);
            let name = name(&format!("{output} bias {has_bias}"));
            // A bias is one more addition.
            let share = share + 2f64.powi(-23) * f64::from(u8::from(has_bias));
            assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
        }
    }

    let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
    let expected: Vec<f64> =
        sums.iter().zip(before.to_f64()).map(|(sum, there)| sum + there).collect();
    let got = multiply(
        gpu,
        kernel.name,
        op(GemmKind::Wgrad, DType::Bf16, false),
        (&a, &b),
        None,
        &before,
        true,
    );
    let name = name("accumulate");
    assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, DType::F32);
}

pub(crate) fn check_sizes(gpu: &mut Gpu, kernel: Kernel) {
    for &sizes in SIZES {
        if !gpu.runs(sizes.0 * sizes.1 * sizes.2, EMULATED_WORK) {
            continue;
        }
        check(gpu, kernel, sizes, QuantFormat::MXFP8, MxKind::Even);
    }
}

pub(crate) fn check_hard_numbers(gpu: &mut Gpu, kernel: Kernel) {
    let square = QuantFormat::MXFP8.square();
    let wide = square.with_granularity(Granularity::G128);
    for spec in [QuantFormat::MXFP8, square, wide] {
        for kind in [MxKind::Spread, MxKind::Exact] {
            for sizes in [gpu.pick((130, 136, 288), (70, 40, 288)), (65, 67, 100)] {
                check(gpu, kernel, sizes, spec, kind);
            }
        }
    }
}

/// Scales at both ends of E8M0: factors that are no FP32 though the scaled products are, and sums
/// that overflow, vanish, or are NaN.
pub(crate) fn check_ends_of_scales(gpu: &mut Gpu, kernel: Kernel) {
    let k = 160;
    let blocks = k / 32;
    // Row i of a and row j of b have scales pairs[i].0 and pairs[j].1 in all blocks.
    let ends = [0u8, 1, 63, 64, 100, 127, 190, 191, 253, 254, 255];
    let matrix = |seed: u64| {
        let scales: Vec<u8> = ends.iter().flat_map(|&scale| vec![scale; blocks]).collect();
        // Ones and, in each last block, zeros: zero times a scale that is no FP32 is zero.
        let mut data = vec![0x38u8; ends.len() * k];
        for (index, code) in data.iter_mut().enumerate() {
            if index % k >= k - 32 {
                *code = 0;
            } else if (index as u64 * 7 + seed).is_multiple_of(5) {
                *code = 0xb0;
            }
        }
        MxMatrix::from_bytes(ends.len(), k, &data, &scales)
    };
    let (a, b) = (matrix(1), matrix(2));
    let exact = linear::forward(&a.values, &b.values, None, k);
    // What FP32 makes of it: sums are below 2^8 times the scales, so that the exact result rounds
    // to infinity, to a subnormal or to zero where FP32 does.
    let expected: Vec<f64> = exact.iter().map(|&x| f64::from(x as f32)).collect();
    let (infinite, nan) = (f64::is_infinite, f64::is_nan);
    assert!(expected.iter().any(|&x| infinite(x)) && expected.iter().any(|&x| nan(x)));
    let spec = QuantFormat::MXFP8;
    let op = ops::ScaledGemm {
        kind: GemmKind::Fprop,
        output: DType::F32,
        bias: false,
        a: spec,
        b: spec,
    };
    let out = HostTensor::output(DType::F32, &[ends.len(), ends.len()]);
    let got = multiply(gpu, kernel.name, op, (&a, &b), None, &out, false);
    for (index, (&got, &expected)) in got.iter().zip(&expected).enumerate() {
        // Few bits and one exponent a sum: exact, but for subnormal partial sums, which round to
        // multiples of 2^-149, once a block.
        // Where products of both signs overflow, an H200's tensor cores add infinities of both.
        let is_same = got == expected
            || (got.is_nan() && !expected.is_finite())
            || (got - expected).abs() <= blocks as f64 * 2f64.powi(-149);
        let row = ends[index / ends.len()];
        let column = ends[index % ends.len()];
        assert!(is_same, "scales {row} and {column}: {got}, expected {expected}");
    }
}

/// NaN elements reach their row and column, and nothing else.
pub(crate) fn check_nan_elements(gpu: &mut Gpu, kernel: Kernel) {
    let (rows, columns) = (140, 130);
    for k in [96, 100] {
        let spec = QuantFormat::MXFP8;
        let change = |matrix: MxMatrix, rows: usize, at: usize| {
            let mut data = matrix.data.bytes.clone();
            data[at] = 0x7f;
            MxMatrix::from_bytes(rows, k, &data, &matrix.plain_scales)
        };
        let a = change(MxMatrix::new(rows, k, spec, MxKind::Even, 1), rows, 131 * k + 95);
        let b = change(MxMatrix::new(columns, k, spec, MxKind::Even, 50), columns, 2 * k);
        let op = ops::ScaledGemm {
            kind: GemmKind::Dgrad,
            output: DType::F32,
            bias: false,
            a: spec,
            b: spec,
        };
        let out = HostTensor::output(DType::F32, &[rows, columns]);
        let got = multiply(gpu, kernel.name, op, (&a, &b), None, &out, false);
        for (index, value) in got.iter().enumerate() {
            let expected = index / columns == 131 || index % columns == 2;
            assert_eq!(value.is_nan(), expected, "row {}", index / columns);
        }
    }
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = Gpu::open();
    check_sizes(&mut gpu, KERNEL);
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = Gpu::open();
    check_hard_numbers(&mut gpu, KERNEL);
}

trial!(scales_at_the_ends_of_their_range);
fn scales_at_the_ends_of_their_range() {
    let mut gpu = Gpu::open();
    check_ends_of_scales(&mut gpu, KERNEL);
}

trial!(nan_elements_stay_in_their_rows);
fn nan_elements_stay_in_their_rows() {
    let mut gpu = Gpu::open();
    check_nan_elements(&mut gpu, KERNEL);
}

emulated! {
    mxfp8_gemm on Sm100a: |gpu| {
        for sizes in [(390, 264, 288), (140, 140, 150)] {
            check(gpu, KERNEL, sizes, QuantFormat::MXFP8, MxKind::Even);
        }
    }
}
