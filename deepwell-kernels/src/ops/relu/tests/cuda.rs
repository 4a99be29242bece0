//! `relu.cu`.

use std::slice;

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::relu::oracle;

use crate::compare::{EXACT, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

pub(crate) fn check(gpu: &mut Gpu, what: &str, shape: [usize; 2], values: &[f32]) {
    let x = HostTensor::bf16(&shape, values);
    let dy = HostTensor::bf16(&shape, &uniform(values.len(), 2, 2.0));
    let output = [HostTensor::output(DType::Bf16, &shape)];
    let got = gpu.run(ops::Relu {}, slice::from_ref(&x), &output, false, 1);
    assert_close(what, &got[0].to_f64(), &oracle::forward(&x.to_f64()), EXACT);
    let got = gpu.run(ops::ReluBackward {}, &[dy.clone(), x.clone()], &output, false, 1);
    let expected = oracle::backward(&dy.to_f64(), &x.to_f64());
    assert_close(&format!("gradient, {what}"), &got[0].to_f64(), &expected, EXACT);
}

trial!(values_and_gradients_as_the_oracle);
fn values_and_gradients_as_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in
        [(0, 8), (1, 1), (1, 7), (1, 8), (3, 3), (2, 8), (17, 255), (64, 256), (1000, 4097)]
    {
        if gpu.runs(rows * columns, 1 << 18) {
            let values = uniform(rows * columns, 1, 6.0);
            check(&mut gpu, &format!("{rows}x{columns}"), [rows, columns], &values);
        }
    }
    let edges = [0.0, -0.0, 1e-38, -1e-38, 1e-40, -1e-40, 3e38, -3e38, f32::INFINITY];
    check(&mut gpu, "edges", [1, 9], &edges);
}

trial!(what_is_not_finite_shows);
fn what_is_not_finite_shows() {
    let mut gpu = Gpu::open();
    let x = HostTensor::bf16(&[1, 3], &[f32::NAN, f32::INFINITY, 1.0]);
    let dy = HostTensor::bf16(&[1, 3], &[1.0, 1.0, f32::NAN]);
    let output = [HostTensor::output(DType::Bf16, &[1, 3])];
    let got = gpu.run(ops::Relu {}, slice::from_ref(&x), &output, false, 1)[0].to_f64();
    assert!(got[0].is_nan() && got[1] == f64::INFINITY && got[2] == 1.0, "{got:?}");
    let got = gpu.run(ops::ReluBackward {}, &[dy, x], &output, false, 1)[0].to_f64();
    assert!(got[0] == 1.0 && got[2].is_nan(), "{got:?}");
}

emulated! {
    relu on Sm100a: |gpu| check(gpu, "tiles", [401, 1000], &uniform(401_000, 1, 6.0))
}
