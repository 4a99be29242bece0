//! `swiglu.cu`.

use std::slice;

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::swiglu::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

/// Gates where the sigmoid is flat, where its derivative cancels, and where FP32 ends.
const ADVERSARIAL: [f32; 16] = [
    0.0,
    -0.0,
    1e-38,
    -1e-38,
    -1.278_464_5,
    88.0,
    89.0,
    -85.0,
    -87.0,
    -89.0,
    -104.0,
    -1e4,
    1e4,
    3e30,
    -3e30,
    1e-40,
];

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize, adversarial: bool) {
    let what = format!("{rows}x{columns}");
    let (shape, len) = ([rows, columns], rows * columns);
    let mut gate = uniform(len, 1, 8.0);
    if adversarial {
        gate.iter_mut().zip(ADVERSARIAL.into_iter().cycle()).for_each(|(g, a)| *g = a);
    }
    let gate = HostTensor::bf16(&shape, &gate);
    let up = HostTensor::bf16(&shape, &uniform(len, 2, 2.0));
    let dout = HostTensor::bf16(&shape, &uniform(len, 3, 2.0));
    let (g, u, d) = (gate.to_f64(), up.to_f64(), dout.to_f64());
    let output = HostTensor::output(DType::Bf16, &shape);

    // The sigmoid is good to 2^-20 of itself at |gate| <= 16 and is rounded away with BF16's
    // 2^-8 beyond; below 2^-120 it may be zero, where |gate up| is up to 2^8: 2^-110 of nothing.
    let floor = 2f64.powi(-110);
    let got =
        gpu.run(ops::SwiGlu {}, &[gate.clone(), up.clone()], slice::from_ref(&output), false, 1);
    assert_close(&what, &got[0].to_f64(), &oracle::forward(&g, &u), Tolerance::bf16(floor));

    let inputs = [dout, gate, up];
    let got = gpu.run(ops::SwiGluBackward {}, &inputs, &[output.clone(), output], false, 1);
    let (dgate, dup) = oracle::backward(&d, &g, &u);
    // `1 + gate (1 - s)` cancels near gate = -1.28 and 1 - s loses bits at large gates: 2^-20 of
    // |dout up| s (1 + |gate|), which is 2^-20 * 4 * 1.1 for negative gates; for positive ones
    // nothing cancels, and gate (1 - s) is off by at most 16 * 2^-24 of the whole.
    let cancelled = 4.0 * 1.1 * 2f64.powi(-20);
    let tolerance = Tolerance::bf16(cancelled + floor);
    assert_close(&format!("dgate {what}"), &got[0].to_f64(), &dgate, tolerance);
    assert_close(&format!("dup {what}"), &got[1].to_f64(), &dup, Tolerance::bf16(floor));
}

trial!(gates_as_the_oracle);
fn gates_as_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, columns) in
        [(0, 8), (1, 1), (1, 7), (1, 8), (3, 3), (2, 8), (17, 255), (64, 256), (1000, 4097)]
    {
        if gpu.runs(rows * columns, 1 << 18) {
            check(&mut gpu, rows, columns, false);
        }
    }
    check(&mut gpu, 3, 16, true);
    check(&mut gpu, 3, 5, true);
}

trial!(what_is_not_finite_shows);
fn what_is_not_finite_shows() {
    let mut gpu = Gpu::open();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let gate = HostTensor::bf16(&[1, 5], &[nan, 1.0, 1.0, inf, -1.0]);
    let up = HostTensor::bf16(&[1, 5], &[1.0, nan, inf, 1.0, 2.0]);
    let output = [HostTensor::output(DType::Bf16, &[1, 5])];
    let got = gpu.run(ops::SwiGlu {}, &[gate, up], &output, false, 1)[0].to_f64();
    assert!(got[0].is_nan() && got[1].is_nan());
    assert_eq!(got[2..4], [f64::INFINITY; 2]);
    assert!(got[4].is_finite());
}

emulated! {
    swiglu on Sm100a: |gpu| check(gpu, 401, 1000, false)
}

emulated! {
    swiglu_quantize on Sm100a: |gpu| {
        crate::elementwise_quantize::check_file(gpu, "swiglu_quantize");
    }
}

emulated! {
    sm90_swiglu_backward_quantize on Sm90a: |gpu| {
        crate::elementwise_quantize::check_gradients_of_whole_tiles(gpu);
    }
}
