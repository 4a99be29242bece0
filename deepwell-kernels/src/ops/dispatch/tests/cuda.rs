//! `dispatch.cu`: every number of its maps is that of the definition.

use deepwell_ir::{DType, ops};

use crate::harness::{Gpu, HostTensor};
use crate::mixture::{Choice, HARD, Mixture, to_i32};

fn check(gpu: &mut Gpu, mixture: Mixture, capacity_factor: Option<f64>) {
    let Mixture { tokens, experts, top_k, .. } = mixture;
    let op = ops::Dispatch { grouped: mixture.grouped_rows(), capacity_factor, from_ranks: false };
    let chosen = HostTensor::i32(&[tokens, top_k], &mixture.chosen());
    let i32s = |shape: &[usize]| HostTensor::output(DType::I32, shape);
    let outputs = [
        i32s(&[experts + 1]),
        i32s(&[2, experts]),
        i32s(&[tokens, top_k]),
        i32s(&[mixture.rows()]),
    ];
    let got = gpu.run(op, &[chosen], &outputs, false, 1);
    let share = |factor: f64| (factor * (tokens * top_k) as f64 / experts as f64).ceil() as usize;
    let expected = mixture.grouped(capacity_factor.map_or(usize::MAX, share));
    let expected = [expected.offsets, expected.load, expected.rows, expected.pairs];
    for ((name, got), expected) in
        ["offsets", "load", "rows", "pairs"].iter().zip(&got).zip(&expected)
    {
        assert_eq!(to_i32(got), *expected, "{name} of {mixture:?}, {capacity_factor:?}");
    }
}

fn check_hard(gpu: &mut Gpu) {
    for mixture in HARD {
        for factor in [None, Some(0.3), Some(1.0)] {
            check(gpu, mixture, factor);
        }
    }
}

trial!(maps_are_those_of_the_definition);
fn maps_are_those_of_the_definition() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        for tokens in [4095, 16_384] {
            let large = Mixture { tokens, experts: 300, top_k: 8, ..HARD[1] };
            check(&mut gpu, large, None);
            check(&mut gpu, large, Some(0.9));
        }
    }
}

// Runs of 256 pairs: five of them, the last of which is not whole.
emulated! {
    dispatch on Sm90a: |gpu| {
        check_hard(gpu);
        for (choice, experts) in [(Choice::Spread, 40), (Choice::AllOn(3), 8)] {
            let mixture = Mixture { tokens: 361, experts, top_k: 3, choice, align: 32 };
            for factor in [None, Some(0.8)] {
                check(gpu, mixture, factor);
            }
        }
    }
}
