//! `grad_norm.cu`.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::grad_norm::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

fn norm(gpu: &mut Gpu, gradients: &[HostTensor]) -> f64 {
    let output = [HostTensor::output(DType::F32, &[1])];
    gpu.run(ops::GradNorm {}, gradients, &output, false, 1)[0].to_f64()[0]
}

pub(crate) fn check(gpu: &mut Gpu, lengths: &[usize]) {
    let gradients: Vec<HostTensor> = lengths
        .iter()
        .enumerate()
        .map(|(index, &len)| HostTensor::f32(&[len], &uniform(len, index as u64, 3.0)))
        .collect();
    let wide: Vec<Vec<f64>> = gradients.iter().map(HostTensor::to_f64).collect();
    let wide: Vec<&[f64]> = wide.iter().map(|tensor| &tensor[..]).collect();
    let expected = oracle::forward(&wide);
    // Sums in FP64, rounded to FP32 once.
    let tolerance = Tolerance { absolute: 0.0, relative: 2f64.powi(-24) * 1.0001 };
    let what = format!("{} tensors", lengths.len());
    assert_close(&what, &[norm(gpu, &gradients)], &[expected], tolerance);
}

/// Sums of each tensor, and the norm of all from them.
pub(crate) fn check_sums(gpu: &mut Gpu, lengths: &[usize]) {
    let gradients: Vec<HostTensor> = lengths
        .iter()
        .enumerate()
        .map(|(index, &len)| HostTensor::f32(&[len], &uniform(len, index as u64, 3.0)))
        .collect();
    let output = [HostTensor::output(DType::U64, &[lengths.len()])];
    let sums = gpu.run(ops::SumsOfSquares {}, &gradients, &output, false, 1).remove(0);
    let values: Vec<f64> = sums.to_u64().into_iter().map(f64::from_bits).collect();
    // A rounding of FP64 for each element at most.
    for ((sum, tensor), &length) in values.iter().zip(&gradients).zip(lengths) {
        let expected: f64 = tensor.to_f64().iter().map(|x| x * x).sum();
        let bound = length as f64 * f64::EPSILON * expected;
        assert!((sum - expected).abs() <= bound, "{sum} beside {expected}");
    }
    let output = [HostTensor::output(DType::F32, &[1])];
    let half = values.len() / 2;
    let bits = |values: &[f64]| -> Vec<u64> { values.iter().map(|it| it.to_bits()).collect() };
    let lists = [&values[..half], &values[half..]].map(bits);
    let lists = lists.map(|list| HostTensor::u64(&[list.len()], &list));
    let of_lists = gpu.run(ops::NormOfSums {}, &lists, &output, false, 1)[0].to_f64();
    let got = gpu.run(ops::NormOfSums {}, &[sums], &output, false, 1)[0].to_f64();
    assert_eq!(got, of_lists, "one list or two");
    let expected = values.iter().sum::<f64>().sqrt();
    assert_eq!(got, [f64::from(expected as f32)], "one order, one rounding");
}

trial!(sums_of_parts_give_the_norm);
fn sums_of_parts_give_the_norm() {
    let mut gpu = Gpu::open();
    for lengths in [&[1usize][..], &[8191, 8192, 8193], &[5, 0, 3], &[100_003, 24_577]] {
        if gpu.runs(lengths.iter().sum(), 1 << 18) {
            check_sums(&mut gpu, lengths);
        }
    }
}

trial!(tables_of_tensors_as_the_oracle);
fn tables_of_tensors_as_the_oracle() {
    let mut gpu = Gpu::open();
    let tables: [&[usize]; 9] = [
        &[],
        &[0],
        &[1],
        &[0, 3, 0, 5, 7, 0],
        &[8191, 8192, 8193],
        &[1023, 1, 1, 2, 3, 16_385],
        &[100_003, 0, 1, 24_577],
        &[1; 300],
        // More chunks than CTAs.
        &[5, 9_000_001, 3],
    ];
    for lengths in tables {
        if gpu.runs(lengths.iter().sum(), 1 << 18) {
            check(&mut gpu, lengths);
        }
    }
}

trial!(squares_neither_overflow_nor_vanish);
fn squares_neither_overflow_nor_vanish() {
    let mut gpu = Gpu::open();
    for x in [1e-30f32, 1e-44, 1e25, 2e38] {
        let expected = f64::from(x) * 2f64.sqrt();
        let gradients = [HostTensor::f32(&[1], &[x]), HostTensor::f32(&[3], &[0.0, -x, 0.0])];
        // One rounding; next to zero to a multiple of 2^-149.
        let tolerance = Tolerance { absolute: 2f64.powi(-150), relative: 2f64.powi(-24) * 1.0001 };
        assert_close("norm", &[norm(&mut gpu, &gradients)], &[expected], tolerance);
    }
}

trial!(what_is_not_finite_shows_wherever_it_is);
fn what_is_not_finite_shows_wherever_it_is() {
    let mut gpu = Gpu::open();
    for place in [0, 5, 8191, 8192, 20_000] {
        for (bad, is_nan) in [(f32::NAN, true), (f32::NEG_INFINITY, false)] {
            let mut values = vec![0.5; 20_001];
            values[place] = bad;
            let gradients = [HostTensor::f32(&[3], &[1.0; 3]), HostTensor::f32(&[20_001], &values)];
            let norm = norm(&mut gpu, &gradients);
            assert!(if is_nan { norm.is_nan() } else { norm == f64::INFINITY }, "{place}: {norm}");
        }
    }
}

emulated! {
    grad_norm on Sm100a: |gpu| {
        check(gpu, &[5, 110_003]);
        check_sums(gpu, &[5, 60_003]);
    }
}
