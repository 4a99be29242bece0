//! `rms_norm_backward.cu` against the f64 oracle.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::rms_norm::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::rms_norm::{SHAPES, f32_error};

const EPS: f64 = 1e-5;

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize, residual: bool, accumulate: bool) {
    let what = format!("{rows}x{columns} residual={residual} accumulate={accumulate}");
    let matrix =
        |seed, scale| HostTensor::bf16(&[rows, columns], &uniform(rows * columns, seed, scale));
    let (dy, x, dresidual) = (matrix(1, 1.0), matrix(2, 3.0), matrix(3, 1.0));
    let weight = HostTensor::bf16(&[columns], &uniform(columns, 4, 2.0));
    let forward = oracle::forward(&x.to_f64(), &weight.to_f64(), EPS);
    let rstd: Vec<f32> = forward.rstd.iter().map(|&rstd| rstd as f32).collect();
    let rstd = HostTensor::f32(&[rows], &rstd);
    let before = uniform(columns, 5, 1.0);
    let mut inputs = vec![dy.clone(), x.clone(), weight.clone(), rstd.clone()];
    if residual {
        inputs.push(dresidual.clone());
    }
    let dx = HostTensor::output(DType::Bf16, &[rows, columns]);
    let dweight = HostTensor::f32(&[columns], &before);
    let op = ops::RmsNormBackward { residual };
    let got = gpu.run(op, &inputs, &[dx, dweight], accumulate, 1);

    let rstd = rstd.to_f64();
    let mut expected = oracle::backward(&dy.to_f64(), &x.to_f64(), &weight.to_f64(), &rstd);
    if residual {
        expected.dx.iter_mut().zip(dresidual.to_f64()).for_each(|(dx, more)| *dx += more);
    }
    if accumulate {
        expected.dweight.iter_mut().zip(&before).for_each(|(dw, &b)| *dw += f64::from(b));
    }
    // Terms of dx may cancel: they are at most rstd * |dy * weight| <= 2 rstd and, as n^2 averages
    // to one and n <= sqrt(columns), some 4 rstd more; the residual is at most one.
    let largest = rstd.iter().fold(0.0, |a: f64, &b| a.max(b));
    let close = Tolerance::bf16((6.0 * largest + 1.0) * f32_error(columns));
    assert_close(&format!("{what} dx"), &got[0].to_f64(), &expected.dx, close).must_tell();
    // |dy * n| <= 2 for these numbers, added in runs of rows / 132 and two short levels.
    let roundings = rows as f64 / 132.0 + 32.0;
    let size = 2.0 * rows as f64 + 1.0;
    let close = Tolerance { absolute: roundings * size * 2f64.powi(-24), relative: 0.0 };
    assert_close(&format!("{what} dweight"), &got[1].to_f64(), &expected.dweight, close)
        .must_tell();
}

trial!(matches_the_oracle);
fn matches_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        for (residual, accumulate) in [(false, false), (true, true), (true, false)] {
            check(&mut gpu, rows, columns, residual, accumulate);
        }
    }
}

trial!(many_rows_for_each_group);
fn many_rows_for_each_group() {
    let mut gpu = Gpu::open();
    for (rows, columns) in [(5000, 768), (1501, 2048), (700, 4096), (777, 72), (600, 33)] {
        let rows = gpu.pick(rows, rows / 12);
        check(&mut gpu, rows, columns, true, true);
    }
}

emulated! {
    rms_norm_backward on Sm100a: |gpu| {
        for (rows, columns) in crate::rms_norm::ROWS_OF_TILES {
            check(gpu, rows, columns, true, true);
        }
    }
}
