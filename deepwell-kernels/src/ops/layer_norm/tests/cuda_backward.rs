//! `layer_norm_backward.cu` against the f64 oracle.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::layer_norm::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::rms_norm::{SHAPES, f32_error};

const EPS: f64 = 1e-5;

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize, residual: bool, accumulate: bool) {
    let what = format!("{rows}x{columns} residual={residual} accumulate={accumulate}");
    let len = rows * columns;
    let matrix = |seed, scale| HostTensor::bf16(&[rows, columns], &uniform(len, seed, scale));
    let (dy, x, dresidual) = (matrix(1, 1.0), matrix(2, 3.0), matrix(3, 1.0));
    let weight = HostTensor::bf16(&[columns], &uniform(columns, 4, 2.0));
    let bias = vec![0.0; columns];
    let forward = oracle::forward(&x.to_f64(), &weight.to_f64(), &bias, EPS);
    let of_rows = |values: &[f64]| {
        let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
        HostTensor::f32(&[rows], &values)
    };
    let (mean, rstd) = (of_rows(&forward.mean), of_rows(&forward.rstd));
    let before = [uniform(columns, 5, 1.0), uniform(columns, 6, 1.0)];
    let mut inputs = vec![dy.clone(), x.clone(), weight.clone(), mean.clone(), rstd.clone()];
    if residual {
        inputs.push(dresidual.clone());
    }
    let dx = HostTensor::output(DType::Bf16, &[rows, columns]);
    let [dweight, dbias] = [0, 1].map(|index| HostTensor::f32(&[columns], &before[index]));
    let op = ops::LayerNormBackward { residual };
    let got = gpu.run(op, &inputs, &[dx, dweight, dbias], accumulate, 1);

    let (mean, rstd) = (mean.to_f64(), rstd.to_f64());
    let (dy, x, weight) = (dy.to_f64(), x.to_f64(), weight.to_f64());
    let mut expected = oracle::backward(&dy, &x, &weight, &mean, &rstd);
    if residual {
        expected.dx.iter_mut().zip(dresidual.to_f64()).for_each(|(dx, more)| *dx += more);
    }
    if accumulate {
        let of_parameters = [&mut expected.dweight, &mut expected.dbias];
        for (sums, before) in of_parameters.into_iter().zip(&before) {
            sums.iter_mut().zip(before).for_each(|(sum, &b)| *sum += f64::from(b));
        }
    }
    // Terms of dx may cancel: |g| <= 2, so each is at most some 2 rstd, or 4 where n is large; an
    // element's n takes the rounding of x - mean. The residual is at most one.
    let largest = rstd.iter().fold(0.0, |a: f64, &b| a.max(b));
    let close = Tolerance::bf16((12.0 * largest + 1.0) * f32_error(columns));
    assert_close(&format!("{what} dx"), &got[0].to_f64(), &expected.dx, close).must_tell();
    // |dy * n| <= 3 for these numbers, added in runs of rows / 132 and two short levels.
    let roundings = rows as f64 / 132.0 + 32.0;
    let size = 3.0 * rows as f64 + 1.0;
    let close = Tolerance { absolute: roundings * size * 2f64.powi(-24), relative: 0.0 };
    assert_close(&format!("{what} dweight"), &got[1].to_f64(), &expected.dweight, close)
        .must_tell();
    assert_close(&format!("{what} dbias"), &got[2].to_f64(), &expected.dbias, close).must_tell();
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
    layer_norm_backward on Sm100a: |gpu| {
        for (rows, columns) in crate::rms_norm::ROWS_OF_TILES {
            check(gpu, rows, columns, true, true);
        }
    }
}
