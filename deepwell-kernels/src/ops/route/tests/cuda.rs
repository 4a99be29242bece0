//! `route.cu`: the same experts as by the definition, and their gates.

use deepwell_ir::DType;
use deepwell_ir::ops::{Route, RouteBackward, RouteGroups, RouteScore};
use deepwell_kernels::ops::route::oracle;

use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mixture::to_i32;

fn settings(experts: usize, top_k: usize, score: RouteScore, is_grouped: bool) -> Route {
    let is_sigmoid = score == RouteScore::Sigmoid;
    Route {
        experts,
        top_k,
        score,
        normalize: is_sigmoid || top_k.is_multiple_of(2),
        scaling: if is_sigmoid { 2.5 } else { 1.0 },
        groups: is_grouped.then_some(RouteGroups { count: experts / 4, chosen: 2 }),
        selection_bias: is_sigmoid,
    }
}

fn check(gpu: &mut Gpu, settings: &Route, tokens: usize, with_ties: bool) {
    let Route { experts, top_k, .. } = *settings;
    let what = format!("{settings:?} of {tokens}, ties {with_ties}");
    let mut logits = uniform(tokens * experts, 1, 6.0);
    if with_ties {
        logits.iter_mut().for_each(|logit| *logit = logit.round());
    }
    let bias = uniform(experts, 2, 0.5);
    let dgates = uniform(tokens * top_k, 3, 1.0);
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let of_bias = settings.selection_bias.then(|| wide(&bias));
    let expected = oracle::forward(settings, &wide(&logits), of_bias.as_deref());

    let logits_in = HostTensor::f32(&[tokens, experts], &logits);
    let mut inputs = vec![logits_in.clone()];
    if settings.selection_bias {
        inputs.push(HostTensor::f32(&[experts], &bias));
    }
    let outputs = [DType::F32, DType::I32].map(|dtype| HostTensor::output(dtype, &[tokens, top_k]));
    let got = gpu.run(settings.clone(), &inputs, &outputs, false, 1);
    assert_eq!(to_i32(&got[1]), expected.experts, "{what}");
    // FP64 until one rounding to FP32.
    let bounds: Vec<f64> = expected.gates.iter().map(|gate| 2f64.powi(-23) * gate.abs()).collect();
    assert_within(&format!("gates {what}"), &got[0].to_f64(), &expected.gates, &bounds);

    let chosen = got[1].clone();
    let inputs = [HostTensor::f32(&[tokens, top_k], &dgates), logits_in, chosen];
    let output = [HostTensor::output(DType::F32, &[tokens, experts])];
    let op = RouteBackward { forward: settings.clone() };
    let got = gpu.run(op, &inputs, &output, false, 1)[0].to_f64();
    let expected = oracle::backward(settings, &wide(&dgates), &wide(&logits), &expected.experts);
    let bounds: Vec<f64> =
        expected.iter().map(|d| 2f64.powi(-23) * d.abs() + 2f64.powi(-45)).collect();
    assert_within(&format!("dlogits {what}"), &got, &expected, &bounds);
}

fn check_all(gpu: &mut Gpu) {
    for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
        for (experts, top_k) in [(1, 1), (4, 2), (8, 3), (33, 6), (128, 8)] {
            for tokens in [0, 1, 5] {
                check(gpu, &settings(experts, top_k, score, false), tokens, false);
            }
            check(gpu, &settings(experts, top_k, score, false), 9, true);
        }
        for (experts, top_k) in [(8, 3), (40, 6)] {
            check(gpu, &settings(experts, top_k, score, true), 5, false);
            check(gpu, &settings(experts, top_k, score, true), 5, true);
        }
    }
    check(gpu, &settings(1024, 40, RouteScore::Softmax, false), 2, false);
    check(gpu, &settings(12, 12, RouteScore::Softmax, false), 3, false);
}

/// NaN and infinity show in the gates of their token alone; its experts exist and differ.
fn check_not_finite(gpu: &mut Gpu) {
    let settings = settings(40, 4, RouteScore::Softmax, false);
    let mut logits = uniform(3 * 40, 1, 2.0);
    logits[40 + 35] = f32::NAN;
    logits[2 * 40 + 1] = f32::INFINITY;
    let logits = HostTensor::f32(&[3, 40], &logits);
    let outputs = [DType::F32, DType::I32].map(|dtype| HostTensor::output(dtype, &[3, 4]));
    let got = gpu.run(settings, &[logits], &outputs, false, 1);
    let gates = got[0].to_f64();
    assert!(gates[..4].iter().all(|gate| gate.is_finite()), "{gates:?}");
    assert!(gates[4..].iter().all(|gate| gate.is_nan()), "{gates:?}");
    for chosen in to_i32(&got[1]).chunks(4) {
        let mut chosen = chosen.to_vec();
        chosen.sort_unstable();
        chosen.dedup();
        assert!(chosen.len() == 4 && chosen.iter().all(|e| (0..40).contains(e)), "{chosen:?}");
    }
}

trial!(experts_are_those_of_the_definition);
fn experts_are_those_of_the_definition() {
    let mut gpu = Gpu::open();
    check_all(&mut gpu);
    check_not_finite(&mut gpu);
    if gpu.runs(1, 0) {
        check(&mut gpu, &settings(128, 8, RouteScore::Softmax, false), 20_000, false);
    }
}

emulated! {
    route on Sm90a: |gpu| {
        check_all(gpu);
        check_not_finite(gpu);
        check(gpu, &settings(8, 2, RouteScore::Softmax, false), 100, false);
    }
}
