//! `grouped_bias.cu`.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::grouped_bias::oracle;

use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mixture::{Choice, HARD, Mixture};

fn check(gpu: &mut Gpu, mixture: Mixture, columns: usize, capacity: usize, gated: bool) {
    let what = format!("{mixture:?} of {columns}, capacity {capacity}, gated {gated}");
    let Mixture { tokens, experts, top_k, .. } = mixture;
    let rows = mixture.rows();
    let grouped = mixture.grouped(capacity);
    let chosen = mixture.chosen();
    let [rows_of_pairs, pairs] = mixture.maps(&grouped);
    // What no pair has is not read.
    let mut x = uniform(rows * columns, 1, 4.0);
    for (row, _) in grouped.pairs.iter().enumerate().filter(|(_, pair)| **pair < 0) {
        x[row * columns..][..columns].fill(f32::NAN);
    }
    let x = HostTensor::bf16(&[rows, columns], &x);
    let bias = HostTensor::bf16(&[experts, columns], &uniform(experts * columns, 2, 2.0));
    let mut of_pairs = uniform(tokens * top_k, 3, 1.0);
    // Nothing is divided by a gate.
    of_pairs.iter_mut().step_by(5).for_each(|gate| *gate = 0.0);
    let gates = HostTensor::f32(&[tokens, top_k], &of_pairs);
    let offsets = HostTensor::i32(&[experts + 1], &grouped.offsets);
    let inputs = [x.clone(), bias.clone(), offsets, gates.clone(), rows_of_pairs, pairs];
    let op = ops::GroupedBias { grouped: mixture.grouped_rows(), gated };
    let out = HostTensor::output(DType::Bf16, &[rows, columns]);
    let got = gpu.run(op.clone(), &inputs, &[out], false, 1)[0].to_f64();
    let of_gates = gated.then(|| gates.to_f64());
    let [x, bias] = [x.to_f64(), bias.to_f64()];
    let expected = oracle::forward(&x, &bias, of_gates.as_deref(), &chosen, &grouped.pairs);
    // A product and a sum of numbers below 8 in FP32, and one rounding.
    let bounds: Vec<f64> =
        expected.iter().map(|y| y.abs() / 256.0 + 16.0 * 2f64.powi(-24)).collect();
    assert_within(&format!("out {what}"), &got, &expected, &bounds);

    let backward = |x: &[f64], bias: &[f64], gates: Option<&[f64]>| {
        oracle::backward(x, bias, gates, &chosen, &grouped.rows, columns)
    };
    let magnitudes = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let expected = backward(&x, &bias, of_gates.as_deref());
    let sizes = of_gates.as_deref().map(magnitudes);
    let sizes = backward(&magnitudes(&x), &magnitudes(&bias), sizes.as_deref());
    // A rounding of each product and of each partial sum, by 2^-24 of the sum of magnitudes.
    let bound = |sizes: &[f64], terms: usize, before: f64| -> Vec<f64> {
        let unit = (terms + 3) as f64 * 2f64.powi(-24);
        sizes.iter().map(|size| unit * (size + before)).collect()
    };
    let op = ops::GroupedBiasBackward { forward: op };
    for accumulate in [false, true] {
        let before = HostTensor::f32(&[experts, columns], &uniform(experts * columns, 4, 3.0));
        let mut outputs = vec![before.clone()];
        if gated {
            outputs.push(HostTensor::output(DType::F32, &[tokens, top_k]));
        }
        let got = gpu.run(op.clone(), &inputs, &outputs, accumulate, 1);
        let mut dbias = expected[0].clone();
        if accumulate {
            dbias.iter_mut().zip(before.to_f64()).for_each(|(sum, before)| *sum += before);
        }
        let bounds = bound(&sizes[0], rows, if accumulate { 3.0 } else { 0.0 });
        assert_within(&format!("dbias {what}"), &got[0].to_f64(), &dbias, &bounds);
        if gated {
            let bounds = bound(&sizes[1], columns, 0.0);
            assert_within(&format!("dgates {what}"), &got[1].to_f64(), &expected[1], &bounds);
        }
    }
}

/// Few columns and many, whole vectors and not, rows of one lane and of several turns of a warp.
fn check_hard(gpu: &mut Gpu) {
    for (mixture, columns) in HARD.into_iter().zip([8, 64, 3, 264, 33, 300, 64, 9, 40, 1]) {
        for (capacity, gated) in [(usize::MAX, true), (usize::MAX, false), (7, true), (0, true)] {
            check(gpu, mixture, columns, capacity, gated);
        }
    }
}

/// NaN and infinity stay in their column of their expert, and in the gate of their pair.
fn check_not_finite(gpu: &mut Gpu) {
    let (experts, columns, rows) = (3, 16, 6);
    let mut dout = vec![1.0; rows * columns];
    dout[2 * columns + 5] = f32::NAN;
    dout[5 * columns + 9] = f32::INFINITY;
    let inputs = [
        HostTensor::bf16(&[rows, columns], &dout),
        HostTensor::bf16(&[experts, columns], &vec![1.0; experts * columns]),
        HostTensor::i32(&[experts + 1], &[0, 2, 4, 6]),
        HostTensor::f32(&[rows, 1], &vec![1.0; rows]),
        HostTensor::i32(&[rows, 1], &[0, 1, 2, 3, 4, 5]),
        HostTensor::i32(&[rows], &[0, 1, 2, 3, 4, 5]),
    ];
    let grouped = ops::GroupedRows::new(experts, 1);
    let forward = ops::GroupedBias { grouped, gated: true };
    let outputs = [
        HostTensor::output(DType::F32, &[experts, columns]),
        HostTensor::output(DType::F32, &[rows, 1]),
    ];
    let got = gpu.run(ops::GroupedBiasBackward { forward }, &inputs, &outputs, false, 1);
    for (index, value) in got[0].to_f64().into_iter().enumerate() {
        let is_right = match (index / columns, index % columns) {
            (1, 5) => value.is_nan(),
            (2, 9) => value == f64::INFINITY,
            _ => value == 2.0,
        };
        assert!(is_right, "{index}: {value}");
    }
    let dgates = got[1].to_f64();
    assert!(dgates[2].is_nan() && dgates[5] == f64::INFINITY, "{dgates:?}");
    assert!([0, 1, 3, 4].iter().all(|&pair| dgates[pair] == 16.0), "{dgates:?}");
}

trial!(biases_are_those_of_the_definition);
fn biases_are_those_of_the_definition() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    check_not_finite(&mut gpu);
    if gpu.runs(1, 0) {
        let large = Mixture { tokens: 2000, experts: 32, top_k: 4, ..HARD[1] };
        check(&mut gpu, large, 2880, usize::MAX, true);
    }
}

// Runs of rows, so many that a CTA joins them on each SM, and groups of one run.
emulated! {
    grouped_bias on Sm90a: |gpu| {
        check_hard(gpu);
        check_not_finite(gpu);
        for (choice, columns) in [(Choice::Spread, 264), (Choice::AllOn(1), 261)] {
            let mixture = Mixture { tokens: 130, experts: 4, top_k: 2, choice, align: 32 };
            check(gpu, mixture, columns, usize::MAX, true);
        }
    }
}
