//! `add.cu`.

use deepwell_ir::{DType, ops};

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

pub(crate) fn check(gpu: &mut Gpu, rows: usize, columns: usize) {
    let len = rows * columns;
    let mut a = uniform(len, 1, 4.0);
    if let Some(first) = a.first_mut() {
        *first = f32::NAN;
    }
    let a = HostTensor::bf16(&[rows, columns], &a);
    let b = HostTensor::bf16(&[rows, columns], &uniform(len, 2, 4.0));
    let expected: Vec<f64> = a.to_f64().iter().zip(b.to_f64()).map(|(&x, y)| x + y).collect();
    let sum = HostTensor::output(DType::Bf16, &[rows, columns]);
    let got = gpu.run(ops::Add {}, &[a, b], &[sum], false, 1);
    // One rounding of an exact FP32 sum.
    let tolerance = Tolerance::bf16(0.0);
    assert_close(&format!("{rows}x{columns}"), &got[0].to_f64(), &expected, tolerance);

    let a = HostTensor::f32(&[rows, columns], &uniform(len, 3, 4.0));
    let b = HostTensor::f32(&[rows, columns], &uniform(len, 4, 4.0));
    let expected: Vec<f64> = a.to_f64().iter().zip(b.to_f64()).map(|(&x, y)| x + y).collect();
    let sum = HostTensor::output(DType::F32, &[rows, columns]);
    let got = gpu.run(ops::Add {}, &[a, b], &[sum], false, 1);
    let tolerance = Tolerance { absolute: 0.0, relative: 2f64.powi(-23) };
    assert_close(&format!("f32 {rows}x{columns}"), &got[0].to_f64(), &expected, tolerance);
}

trial!(sums_of_any_length);
fn sums_of_any_length() {
    let mut gpu = Gpu::open();
    for (rows, columns) in [(0, 8), (1, 1), (1, 7), (3, 5), (17, 8), (33, 255), (1000, 4097)] {
        check(&mut gpu, rows, columns);
    }
}

emulated! {
    add on Sm100a: |gpu| check(gpu, 401, 1000)
}
