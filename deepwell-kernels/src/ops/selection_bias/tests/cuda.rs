//! `selection_bias.cu`: whole numbers, and biases to the bit.

use deepwell_ir::ops;
use deepwell_kernels::ops::selection_bias::oracle;

use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// Counts of `tokens` tokens with `top_k` choices each.
fn check_counts(gpu: &mut Gpu, tokens: usize, top_k: usize, experts: usize) {
    let draws = uniform(tokens * top_k, (tokens + experts) as u64, 0.5);
    // The first experts have more, the last is empty where there are several.
    let some = experts.saturating_sub(1).max(1);
    let chosen: Vec<i32> =
        draws.iter().map(|x| ((x * x * 4.0) * some as f32) as i32 % some as i32).collect();
    let inputs = [HostTensor::i32(&[tokens, top_k], &chosen)];
    let before: Vec<f32> = (0..experts).map(|expert| (expert * 3) as f32).collect();
    let expected = oracle::counts(&chosen, experts);
    for accumulate in [false, true] {
        let outputs = [HostTensor::f32(&[experts], &before)];
        let op = ops::CountExperts { experts };
        let got = gpu.run(op, &inputs, &outputs, accumulate, 1)[0].to_f64();
        let mut expected = expected.clone();
        if accumulate {
            expected.iter_mut().zip(&before).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        assert_eq!(got, expected, "{tokens} tokens, {top_k} of {experts}, {accumulate}");
    }
}

/// Biases after `counts`, in a step that is applied and in one that is not.
fn check_update(gpu: &mut Gpu, counts: &[f32]) {
    let bias = uniform(counts.len(), 5, 2.0);
    let rate = 0.001f32;
    for applies in [1.0, 0.0] {
        let mut coefficients = [0.5; ops::AdamWCoefficients::COUNT];
        coefficients[0] = applies;
        let inputs = [
            HostTensor::f32(&[coefficients.len()], &coefficients),
            HostTensor::f32(&[counts.len()], counts),
        ];
        let outputs = [HostTensor::f32(&[counts.len()], &bias)];
        let options = RunOptions { update: true, ..RunOptions::default() };
        let op = ops::SelectionBiasUpdate { rate };
        let got = gpu.run_with(op, &inputs, &outputs, options)[0].to_f64();
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let rate = f64::from(rate) * f64::from(applies);
        let moved = oracle::updated(&wide(&bias), &wide(counts), rate);
        let expected: Vec<f64> = moved.iter().map(|&x| f64::from(x as f32)).collect();
        assert_eq!(got, expected, "{counts:?}, {applies}");
    }
}

fn check_hard(gpu: &mut Gpu) {
    for (tokens, top_k, experts) in
        [(0, 2, 8), (1, 1, 1), (1, 8, 256), (31, 3, 5), (33, 8, 33), (129, 2, 300)]
    {
        check_counts(gpu, tokens, top_k, experts);
    }
    check_update(gpu, &[7.0]);
    // At the mean nothing moves; a mean that is no whole number.
    check_update(gpu, &[4.0, 2.0, 0.0, 2.0]);
    check_update(gpu, &[1.0, 0.0, 1.0]);
    check_update(gpu, &[0.0; 5]);
    // Products beyond 32 bits.
    let large: Vec<f32> = (0..300).map(|i| 16_777_216.0 - (i % 7) as f32).collect();
    check_update(gpu, &large);
}

trial!(counts_and_biases_are_those_of_the_definition);
fn counts_and_biases_are_those_of_the_definition() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        check_counts(&mut gpu, 16_384, 8, 256);
    }
}

// Runs of 256 pairs: five of them, the last of which is not whole; more experts than threads.
emulated! {
    selection_bias on Sm90a: |gpu| {
        check_hard(gpu);
        check_counts(gpu, 361, 3, 300);
    }
}
