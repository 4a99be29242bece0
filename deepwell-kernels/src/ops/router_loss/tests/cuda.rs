//! `router_loss.cu`: the losses and their gradient by the definition, which is the CPU's.

use deepwell_ir::DType;
use deepwell_ir::ops::{IGNORED_TARGET, RouteScore, RouterLoss, RouterLossGrad};
use deepwell_kernels::ops::router_loss::cpu::{Routed, router_loss};

use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mixture::{Choice, HARD, Mixture};

fn check(gpu: &mut Gpu, score: RouteScore, mixture: Mixture, accumulate: bool) {
    let Mixture { tokens, experts, top_k, .. } = mixture;
    let what = format!("{score:?} {mixture:?}, accumulate {accumulate}");
    let ranks = 1 + tokens as u32 % 3;
    let op = RouterLoss { score, balance: 0.3, z: 0.02, ranks };
    let logits = uniform(tokens * experts, 1, 4.0);
    let (chosen, loss_scale, before) = (mixture.chosen(), 0.013, 1.75);
    let target = |token: usize| if token % 5 == 3 { IGNORED_TARGET } else { token as i32 };
    let targets: Vec<i32> = (0..tokens).map(target).collect();
    let mut loss = before;
    let mut dlogits = vec![0f32; logits.len()];
    let routed = Routed { logits: &logits, chosen: &chosen, targets: &targets, loss_scale };
    let of_loss = (&mut loss, accumulate);
    router_loss(&op, [experts, top_k], routed, of_loss, Some(&mut dlogits)).unwrap();

    let inputs = [
        HostTensor::f32(&[tokens, experts], &logits),
        HostTensor::i32(&[tokens, top_k], &chosen),
        HostTensor::i32(&[tokens], &targets),
        HostTensor::f32(&[1], &[loss_scale]),
    ];
    let there = HostTensor::f32(&[1], &[before]);
    let empty = HostTensor::output(DType::F32, &[tokens, experts]);
    let outputs = [there.clone(), empty];
    let got = gpu.run(RouterLossGrad { forward: op.clone() }, &inputs, &outputs, accumulate, 1);
    let alone = gpu.run(op, &inputs, &[there], accumulate, 1);
    assert_eq!(alone[0].bytes, got[0].bytes, "without gradient, {what}");
    // Both are FP64 until one rounding to FP32, of the gradient below its largest.
    let within = |what: &str, got: &HostTensor, expected: &[f32]| {
        let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
        let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let bound = |x: &f64| 2f64.powi(-22) * x.abs() + 2f64.powi(-45) * largest;
        let bounds: Vec<f64> = expected.iter().map(bound).collect();
        assert_within(what, &got.to_f64(), &expected, &bounds);
    };
    within(&format!("loss {what}"), &got[0], &[loss]);
    within(&format!("dlogits {what}"), &got[1], &dlogits);
}

fn check_hard(gpu: &mut Gpu) {
    for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
        for (index, mixture) in HARD.into_iter().enumerate() {
            check(gpu, score, mixture, index % 2 == 0);
        }
    }
}

trial!(losses_are_those_of_the_definition);
fn losses_are_those_of_the_definition() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        let large = Mixture { tokens: 20_000, experts: 128, top_k: 8, ..HARD[1] };
        check(&mut gpu, RouteScore::Softmax, large, false);
    }
}

// Four CTAs that count 1024 pairs each.
emulated! {
    router_loss on Sm90a: |gpu| {
        check_hard(gpu);
        let mixture =
            Mixture { tokens: 800, experts: 8, top_k: 5, choice: Choice::Spread, align: 32 };
        check(gpu, RouteScore::Softmax, mixture, false);
    }
}
