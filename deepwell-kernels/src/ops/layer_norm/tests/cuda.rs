//! `layer_norm.cu` against the f64 oracle.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::layer_norm::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::rms_norm::{SHAPES, f32_error};

const EPS: f64 = 1e-5;

/// Rows of ordinary and of large numbers, far from zero, and all equal.
fn rows_of(rows: usize, columns: usize, seed: u64) -> HostTensor {
    let mut x = uniform(rows * columns, seed, 2.0);
    for (row, x) in x.chunks_exact_mut(columns.max(1)).enumerate() {
        match row % 5 {
            1 => x.iter_mut().for_each(|x| *x *= 1e15),
            2 => x.iter_mut().for_each(|x| *x += 200.0),
            3 => x.fill(100.5),
            _ => {}
        }
    }
    HostTensor::bf16(&[rows, columns], &x)
}

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize) {
    let what = format!("{rows}x{columns}");
    let x = rows_of(rows, columns, 1);
    let vector = |seed| HostTensor::bf16(&[columns], &uniform(columns, seed, 2.0));
    let (weight, bias) = (vector(2), vector(3));
    let y = HostTensor::output(DType::Bf16, &[rows, columns]);
    let of_row = HostTensor::output(DType::F32, &[rows]);
    let inputs = [x.clone(), weight.clone(), bias.clone()];
    let outputs = [y, of_row.clone(), of_row];
    let got = gpu.run(ops::LayerNorm { eps: EPS }, &inputs, &outputs, false, 1);
    let x = x.to_f64();
    let expected = oracle::forward(&x, &weight.to_f64(), &bias.to_f64(), EPS);
    let error = f32_error(columns);
    let (mean, rstd) = (got[1].to_f64(), got[2].to_f64());
    let y = got[0].to_f64();
    for (row, x) in x.chunks_exact(columns).enumerate() {
        let what = format!("{what} row {row}");
        // Distances from the first element are at most twice the row's largest magnitude, and
        // the mean itself is rounded.
        let largest = x.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
        let of_mean = 2.0 * largest * error;
        let close = Tolerance { absolute: of_mean, relative: 0.0 };
        assert_close(&format!("{what} mean"), &mean[row..=row], &expected.mean[row..=row], close);
        // The variance takes the mean's error squared beside its own.
        let r = expected.rstd[row];
        let relative = error + (of_mean * r) * (of_mean * r);
        let close = Tolerance { absolute: 0.0, relative };
        assert_close(&format!("{what} rstd"), &rstd[row..=row], &expected.rstd[row..=row], close);
        // One rounding to BF16, and the mean's error and rstd's on the normalized element,
        // times a weight of two at most.
        let size = (columns as f64).sqrt() * 2.0;
        let close = Tolerance::bf16(2.0 * (of_mean * r + size * relative) + 4.0 * error);
        let at = row * columns..(row + 1) * columns;
        assert_close(&format!("{what} y"), &y[at.clone()], &expected.y[at], close);
    }
}

trial!(matches_the_oracle);
fn matches_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        check(&mut gpu, rows, columns);
    }
}

pub(crate) fn check_add(gpu: &mut Gpu, rows: usize, columns: usize) {
    let what = format!("{rows}x{columns}");
    let (x, delta) = (rows_of(rows, columns, 1), rows_of(rows, columns, 4));
    let vector = |seed| HostTensor::bf16(&[columns], &uniform(columns, seed, 2.0));
    let (weight, bias) = (vector(2), vector(3));
    let empty = HostTensor::output(DType::Bf16, &[rows, columns]);
    let of_row = HostTensor::output(DType::F32, &[rows]);
    let inputs = [x.clone(), delta.clone(), weight.clone(), bias.clone()];
    let outputs = [empty.clone(), empty.clone(), of_row.clone(), of_row.clone()];
    let got = gpu.run(ops::AddLayerNorm { eps: EPS }, &inputs, &outputs, false, 1);
    let sum: Vec<f64> =
        x.to_f64().iter().zip(delta.to_f64()).map(|(&x, delta)| x + delta).collect();
    // One rounding of a sum that FP32 rounds before.
    assert_close(&format!("{what} sum"), &got[0].to_f64(), &sum, Tolerance::bf16(0.0));
    // The same bits as the norm alone has of the stored sum.
    let inputs = [got[0].clone(), weight, bias];
    let outputs = [empty, of_row.clone(), of_row];
    let alone = gpu.run(ops::LayerNorm { eps: EPS }, &inputs, &outputs, false, 1);
    assert!(got[1..] == alone[..], "{what}: differs from the norm of the sum");
}

trial!(a_sum_before_it_is_rounded_and_then_normalized);
fn a_sum_before_it_is_rounded_and_then_normalized() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        check_add(&mut gpu, rows, columns);
    }
}

emulated! {
    layer_norm on Sm100a: |gpu| {
        for (rows, columns) in crate::rms_norm::ROWS_OF_TILES {
            check(gpu, rows, columns);
            check_add(gpu, rows, columns);
        }
    }
}

emulated! {
    layer_norm_quantize on Sm100a: |gpu| {
        crate::norm_quantize::check_file(gpu, "layer_norm_quantize");
    }
}
