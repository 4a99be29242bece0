//! `gelu.cu`.

use std::slice;

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::gelu::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

/// Where the tail is thin, the slope crosses zero, and squares and cubes leave FP32.
const ADVERSARIAL: [f32; 18] = [
    0.0,
    -0.0,
    1e-38,
    -1e-38,
    -0.751_791_5,
    -0.752_461_4,
    -3.0,
    3.0,
    -8.5,
    8.5,
    -13.0,
    -14.0,
    30.5,
    -30.5,
    1e13,
    -1e13,
    3e38,
    -3e38,
];

pub(crate) fn check(gpu: &mut Gpu, what: &str, shape: [usize; 2], values: &[f32]) {
    let x = HostTensor::bf16(&shape, values);
    let dy = HostTensor::bf16(&shape, &uniform(values.len(), 2, 2.0));
    let output = [HostTensor::output(DType::Bf16, &shape)];
    for tanh in [false, true] {
        let what = format!("{what}, tanh {tanh}");
        // The value is good to 2^-19 of itself, which BF16's rounding covers; what is below
        // 2^-110 may be zero.
        let floor = 2f64.powi(-110);
        let got = gpu.run(ops::Gelu { tanh }, slice::from_ref(&x), &output, false, 1);
        let expected = oracle::forward(&x.to_f64(), tanh);
        assert_close(&what, &got[0].to_f64(), &expected, Tolerance::bf16(floor));

        let op = ops::GeluBackward { tanh };
        let got = gpu.run(op, &[dy.clone(), x.clone()], &output, false, 1);
        let expected = oracle::backward(&dy.to_f64(), &x.to_f64(), tanh);
        // The slope's two terms, 0.23 each at most where they cancel, are off by 2^-19; |dy| <= 2.
        let cancelled = 2.0 * 2.0 * 0.23 * 2f64.powi(-19);
        let tolerance = Tolerance::bf16(cancelled);
        assert_close(&format!("gradient, {what}"), &got[0].to_f64(), &expected, tolerance);
    }
}

trial!(values_and_slopes_as_the_oracle);
fn values_and_slopes_as_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in
        [(0, 8), (1, 1), (1, 7), (1, 8), (3, 3), (2, 8), (17, 255), (64, 256), (1000, 4097)]
    {
        if !gpu.runs(rows * columns, 1 << 18) {
            continue;
        }
        let values = uniform(rows * columns, 1, 6.0);
        check(&mut gpu, &format!("{rows}x{columns}"), [rows, columns], &values);
    }
    check(&mut gpu, "adversarial", [2, 9], &ADVERSARIAL);
    // Every tenth of a tail.
    let tail: Vec<f32> = (0..280).map(|i| (i - 140) as f32 / 10.0).collect();
    check(&mut gpu, "tail", [1, 280], &tail);
}

trial!(what_is_not_finite_shows);
fn what_is_not_finite_shows() {
    let mut gpu = Gpu::open();
    for tanh in [false, true] {
        let x = HostTensor::bf16(&[1, 3], &[f32::NAN, f32::INFINITY, 1.0]);
        let dy = HostTensor::bf16(&[1, 3], &[1.0, 1.0, f32::NAN]);
        let output = [HostTensor::output(DType::Bf16, &[1, 3])];
        let got = gpu.run(ops::Gelu { tanh }, slice::from_ref(&x), &output, false, 1)[0].to_f64();
        assert!(got[0].is_nan() && got[1] == f64::INFINITY && got[2].is_finite(), "{got:?}");
        let op = ops::GeluBackward { tanh };
        let got = gpu.run(op, &[dy, x], &output, false, 1)[0].to_f64();
        assert!(got[0].is_nan() && got[2].is_nan(), "{got:?}");
    }
}

emulated! {
    gelu on Sm100a: |gpu| check(gpu, "tiles", [401, 1000], &uniform(401_000, 1, 6.0))
}

emulated! {
    gelu_quantize on Sm100a: |gpu| {
        crate::elementwise_quantize::check_file(gpu, "gelu_quantize");
    }
}
