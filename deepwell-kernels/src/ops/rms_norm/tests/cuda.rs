//! `rms_norm.cu` against the f64 oracle.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::rms_norm::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

const EPS: f64 = 1e-5;

/// Shapes: nothing, one, whole and broken vectors, rows of one warp to sixteen, too long ones.
pub(crate) const SHAPES: [(usize, usize); 18] = [
    (0, 64),
    (1, 1),
    (1, 8),
    (3, 7),
    (5, 127),
    (7, 128),
    (9, 136),
    (33, 768),
    (4, 1024),
    (5, 1032),
    (130, 2048),
    (17, 4096),
    (3, 5120),
    (3, 11008),
    (2, 16384),
    (2, 16392),
    (2, 40001),
    (2000, 256),
];

/// Rows of ordinary, tiny and large numbers, zeros, and one outlier.
pub(crate) fn rows_of(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    let mut x = uniform(rows * columns, seed, 2.0);
    for (row, x) in x.chunks_exact_mut(columns.max(1)).enumerate() {
        match row % 7 {
            1 => x.iter_mut().for_each(|x| *x *= 1e-20),
            2 => x.iter_mut().for_each(|x| *x *= 1e15),
            3 => x.fill(0.0),
            4 => x[columns / 2] = 3e4,
            _ => {}
        }
    }
    x
}

/// A row's sum is rounded once for each element of a thread, and a few times in trees.
pub(crate) fn f32_error(columns: usize) -> f64 {
    (columns as f64 / 256.0 + 48.0) * 2f64.powi(-24)
}

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize) {
    let what = format!("{rows}x{columns}");
    let x = HostTensor::bf16(&[rows, columns], &rows_of(rows, columns, 1));
    let weight = HostTensor::bf16(&[columns], &uniform(columns, 2, 2.0));
    let y = HostTensor::output(DType::Bf16, &[rows, columns]);
    let rstd = HostTensor::output(DType::F32, &[rows]);
    let inputs = [x.clone(), weight.clone()];
    let got = gpu.run(ops::RmsNorm { eps: EPS }, &inputs, &[y, rstd], false, 1);
    let expected = oracle::forward(&x.to_f64(), &weight.to_f64(), EPS);
    let close = Tolerance { absolute: 0.0, relative: f32_error(columns) };
    assert_close(&format!("{what} rstd"), &got[1].to_f64(), &expected.rstd, close);
    // One rounding to BF16; half its smallest subnormal.
    let close = Tolerance::bf16(2f64.powi(-134));
    assert_close(&format!("{what} y"), &got[0].to_f64(), &expected.y, close);
}

pub(crate) fn check_add(gpu: &mut Gpu, rows: usize, columns: usize) {
    let what = format!("{rows}x{columns}");
    let x = HostTensor::bf16(&[rows, columns], &rows_of(rows, columns, 1));
    let delta = HostTensor::bf16(&[rows, columns], &rows_of(rows, columns, 3));
    let weight = HostTensor::bf16(&[columns], &uniform(columns, 2, 2.0));
    let empty = HostTensor::output(DType::Bf16, &[rows, columns]);
    let rstd = HostTensor::output(DType::F32, &[rows]);
    let inputs = [x.clone(), delta.clone(), weight.clone()];
    let outputs = [empty.clone(), empty.clone(), rstd.clone()];
    let got = gpu.run(ops::AddRmsNorm { eps: EPS }, &inputs, &outputs, false, 1);
    let sum: Vec<f64> =
        x.to_f64().iter().zip(delta.to_f64()).map(|(&x, delta)| x + delta).collect();
    // One rounding of an exact FP32 sum.
    assert_close(&format!("{what} sum"), &got[0].to_f64(), &sum, Tolerance::bf16(0.0));
    // The same bits as the norm alone has of the stored sum.
    let inputs = [got[0].clone(), weight];
    let alone = gpu.run(ops::RmsNorm { eps: EPS }, &inputs, &[empty, rstd], false, 1);
    assert_eq!(got[1], alone[0], "{what} y");
    assert_eq!(got[2], alone[1], "{what} rstd");
}

trial!(matches_the_oracle);
fn matches_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        check(&mut gpu, rows, columns);
    }
}

trial!(a_sum_before_it_is_rounded_and_then_normalized);
fn a_sum_before_it_is_rounded_and_then_normalized() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        check_add(&mut gpu, rows, columns);
    }
}

trial!(what_is_not_finite_stays_in_its_row);
fn what_is_not_finite_stays_in_its_row() {
    let mut gpu = Gpu::open();
    for (rows, columns) in [(3, 512), (3, 515)] {
        let mut x = uniform(rows * columns, 4, 1.0);
        x[columns + 17] = f32::NAN;
        x[2 * columns + 3] = f32::INFINITY;
        let x = HostTensor::bf16(&[rows, columns], &x);
        let weight = HostTensor::bf16(&[columns], &vec![1.0; columns]);
        let y = HostTensor::output(DType::Bf16, &[rows, columns]);
        let rstd = HostTensor::output(DType::F32, &[rows]);
        let got = gpu.run(ops::RmsNorm { eps: EPS }, &[x, weight], &[y, rstd], false, 1);
        let y = got[0].to_f64();
        assert!(y[..columns].iter().all(|y| y.is_finite()), "{columns}");
        assert!(y[columns..2 * columns].iter().all(|y| y.is_nan()), "{columns}");
        // rstd is zero: only the infinity itself is NaN.
        let nan = y[2 * columns..].iter().position(|y| y.is_nan());
        assert_eq!(nan, Some(3), "{columns}");
        assert!(y[2 * columns..].iter().filter(|y| **y == 0.0).count() == columns - 1);
    }
}

/// Rows of several tiles: for blocks of 16 rows, and for those that take a row element by element.
pub(crate) const ROWS_OF_TILES: [(usize, usize); 2] = [(200, 768), (40, 33)];

emulated! {
    rms_norm on Sm100a: |gpu| {
        for (rows, columns) in ROWS_OF_TILES {
            check(gpu, rows, columns);
            check_add(gpu, rows, columns);
        }
    }
}

emulated! {
    rms_norm_quantize on Sm100a: |gpu| {
        crate::norm_quantize::check_file(gpu, "rms_norm_quantize");
    }
}
