//! `bias_grad.cu`.

use std::slice;

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::bias_grad::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

pub(crate) fn check(
    gpu: &mut Gpu,
    rows: usize,
    columns: usize,
    values: &[f32],
    tolerance: Tolerance,
) {
    check_of(gpu, &HostTensor::bf16(&[rows, columns], values), tolerance);
    // What a router has.
    check_of(gpu, &HostTensor::f32(&[rows, columns], values), tolerance);
}

fn check_of(gpu: &mut Gpu, dy: &HostTensor, tolerance: Tolerance) {
    let (rows, columns) = (dy.shape[0], dy.shape[1]);
    let before: Vec<f32> = (0..columns).map(|column| (column % 17) as f32 - 8.0).collect();
    let before = HostTensor::f32(&[columns], &before);
    let sums = oracle::backward(&dy.to_f64(), columns);
    for accumulate in [false, true] {
        let output = [before.clone()];
        let got = gpu.run(ops::BiasGrad {}, slice::from_ref(dy), &output, accumulate, 1);
        let expected: Vec<f64> = sums
            .iter()
            .zip(before.to_f64())
            .map(|(sum, before)| if accumulate { sum + before } else { *sum })
            .collect();
        let what = format!("{rows}x{columns} of {}, accumulate {accumulate}", dy.dtype);
        assert_close(&what, &got[0].to_f64(), &expected, tolerance);
    }
}

const SHAPES: [(usize, usize); 14] = [
    (0, 5),
    (0, 8),
    (1, 1),
    (3, 7),
    (31, 8),
    (32, 255),
    (33, 256),
    (65, 257),
    (100, 264),
    (1000, 33),
    (2048, 512),
    (4099, 1000),
    (40_000, 16),
    (5, 40_000),
];

trial!(integers_are_summed_exactly);
fn integers_are_summed_exactly() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        // Sums of up to 40000 integers below 8 are whole numbers below 2^24.
        let values: Vec<f32> =
            uniform(rows * columns, 3, 8.0).iter().map(|value| value.trunc()).collect();
        check(&mut gpu, rows, columns, &values, Tolerance { absolute: 0.0, relative: 0.0 });
    }
}

trial!(any_numbers_are_summed_in_fp32);
fn any_numbers_are_summed_in_fp32() {
    let mut gpu = Gpu::open();
    for (rows, columns) in SHAPES {
        let largest = 4.0;
        let values = uniform(rows * columns, 5, largest);
        // Each of the additions that a number goes through (a warp's rows, eight warps, up to 64
        // runs in groups of eight, eight again) rounds a sum of at most all magnitudes.
        let terms = (rows.div_ceil(8) + 32) as f64;
        let absolute = terms * 2f64.powi(-24) * (rows as f64 * f64::from(largest) + 8.0);
        check(&mut gpu, rows, columns, &values, Tolerance { absolute, relative: 0.0 });
    }
}

trial!(a_column_that_is_not_finite_is_alone);
fn a_column_that_is_not_finite_is_alone() {
    let mut gpu = Gpu::open();
    let mut values = vec![1.0; 100 * 9];
    values[50 * 9 + 4] = f32::NAN;
    values[7 * 9 + 2] = f32::INFINITY;
    let dy = HostTensor::bf16(&[100, 9], &values);
    let got = gpu.run(ops::BiasGrad {}, &[dy], &[HostTensor::output(DType::F32, &[9])], false, 1);
    let got = got[0].to_f64();
    for (column, &sum) in got.iter().enumerate() {
        match column {
            2 => assert_eq!(sum, f64::INFINITY),
            4 => assert!(sum.is_nan()),
            _ => assert_eq!(sum, 100.0),
        }
    }
}

emulated! {
    bias_grad on Sm100a: |gpu| {
        for (rows, columns) in [(400, 512), (400, 255)] {
            let values = uniform(rows * columns, 3, 8.0);
            let values: Vec<f32> = values.iter().map(|value| value.trunc()).collect();
            check(gpu, rows, columns, &values, crate::compare::EXACT);
        }
    }
}
