//! `expand_scales.cu`, by the FP8 GEMMs of cuBLASLt that read what it lays out.

use deepwell_ir::{DType, GemmKind, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::QuantFormat;
use deepwell_trials::skip;

use crate::cublaslt::{ROWS, SQUARES};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};
use crate::mxfp8_gemm::multiply;

const KERNEL: &str = "cublaslt_mx_gemm";

/// Tensor cores of Hopper cut each of the 33 terms of a step of 32 (the sum so far is one) at 2^-13
/// of the largest of them, and four steps come between promotions to FP32. The largest term is at
/// most about an eighth of the sum of the magnitudes here: 4 · 33 / 8 · 2^-13.
const SHARE: f64 = 16.5 / 8192.0;

/// M, N, K: K that 128 does not divide, and whose groups of 128 four does not divide; sides that
/// 128 does not divide.
const SIZES: &[(usize, usize, usize)] = &[
    (8, 8, 16),
    (16, 128, 128),
    (64, 256, 704),
    (128, 128, 512),
    (136, 264, 640),
    (248, 1040, 400),
    (392, 384, 640),
];

/// A GEMM of `sizes` with scales of `specs`, in every form.
pub(crate) fn check(
    gpu: &mut Gpu,
    (rows, columns, k): (usize, usize, usize),
    specs: [QuantFormat; 2],
    kind: MxKind,
) {
    let a = MxMatrix::new(rows, k, specs[0], kind, 1);
    let b = MxMatrix::new(columns, k, specs[1], kind, 50);
    let sums = linear::forward(&a.values, &b.values, None, k);
    let magnitude = magnitudes(&a, &b, k);
    let share = if kind == MxKind::Exact { 0.0 } else { SHARE };
    let op = |kind, output, bias| {
        let [a, b] = specs;
        ops::ScaledGemm { kind, output, bias, a, b }
    };
    let name = |what: &str| format!("{what} {rows} {columns} {k} {kind:?} {specs:?}");

    let bias = HostTensor::bf16(&[columns], &uniform(columns, 4, 8.0));
    for has_bias in [false, true] {
        let out = HostTensor::output(DType::Bf16, &[rows, columns]);
        let mut expected = sums.clone();
        if has_bias {
            let bias = bias.to_f64();
            for row in expected.chunks_mut(columns) {
                row.iter_mut().zip(&bias).for_each(|(sum, bias)| *sum += bias);
            }
        }
        let op = op(GemmKind::Fprop, DType::Bf16, has_bias);
        let bias = has_bias.then_some(&bias);
        let got = multiply(gpu, KERNEL, op, (&a, &b), bias, &out, false);
        let name = name(&format!("bf16 bias {has_bias}"));
        // One more rounding in FP32 for the bias.
        let share = share + if has_bias { 2f64.powi(-23) } else { 0.0 };
        let output = DType::Bf16;
        assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
    }

    let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
    for accumulate in [false, true] {
        let mut expected = sums.clone();
        if accumulate {
            let before = before.to_f64();
            expected.iter_mut().zip(before).for_each(|(sum, there)| *sum += there);
        }
        let op = op(GemmKind::Wgrad, DType::Bf16, false);
        let got = multiply(gpu, KERNEL, op, (&a, &b), None, &before, accumulate);
        let name = name(&format!("f32 accumulate {accumulate}"));
        assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, DType::F32);
    }
}

trial!(fp8_gemms_with_scales_for_128);
fn fp8_gemms_with_scales_for_128() {
    let mut gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip(format!("{KERNEL} is for Hopper"));
    }
    for &sizes in SIZES {
        for (specs, kind) in [
            ([ROWS, SQUARES], MxKind::Even),
            ([ROWS, ROWS], MxKind::Even),
            ([SQUARES, ROWS], MxKind::Even),
            ([ROWS, SQUARES], MxKind::Spread),
            ([ROWS, ROWS], MxKind::Exact),
        ] {
            if gpu.runs(sizes.0 * sizes.1 * sizes.2, 8 << 20) {
                check(&mut gpu, sizes, specs, kind);
            }
        }
    }
}

emulated! {
    expand_scales on Sm90a: |gpu| {
        check(gpu, (1040, 72, 272), [ROWS, SQUARES], MxKind::Even);
    }
}
