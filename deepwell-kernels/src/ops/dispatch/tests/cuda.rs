//! `dispatch.cu` and `dispatch_to_ranks.cu`: every number of their maps is that of the definition.

use deepwell_ir::ops::RowsOf;
use deepwell_ir::{DType, Dim, ops};
use deepwell_kernels::ops::dispatch::oracle;

use crate::harness::{Gpu, HostTensor};
use crate::mixture::{Choice, HARD, Mixture, to_i32};

fn check(gpu: &mut Gpu, mixture: Mixture, capacity_factor: Option<f64>) {
    let Mixture { tokens, experts, top_k, .. } = mixture;
    let grouped = mixture.grouped_rows();
    let op = ops::Dispatch { grouped, capacity_factor, rows_of: RowsOf::All };
    let buffer = op.buffer_rows(Dim::fixed(tokens), top_k).and_then(|rows| rows.as_fixed());
    let buffer = buffer.expect("fixed sizes");
    let chosen = HostTensor::i32(&[tokens, top_k], &mixture.chosen());
    let i32s = |shape: &[usize]| HostTensor::output(DType::I32, shape);
    let outputs =
        [i32s(&[experts + 1]), i32s(&[2, experts]), i32s(&[tokens, top_k]), i32s(&[buffer])];
    let got = gpu.run(op, &[chosen], &outputs, false, 1);
    let share = |factor: f64| (factor * (tokens * top_k) as f64 / experts as f64).ceil() as usize;
    let capacity = capacity_factor.map_or(usize::MAX, share);
    let expected = oracle::forward(&mixture.chosen(), experts, mixture.align, capacity, buffer);
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

/// What ranks with equally many experts are sent, and how the first of them sorts what would come
/// from ranks that all have these tokens.
fn check_ranks(gpu: &mut Gpu, mixture: Mixture, ranks: usize, capacity_factor: Option<f64>) {
    let Mixture { tokens, experts, top_k, align, .. } = mixture;
    let what = format!("{mixture:?}, {capacity_factor:?}, {ranks} ranks");
    let to_ranks = ops::DispatchToRanks { experts, ranks, capacity_factor };
    let rows = to_ranks.rows(Dim::fixed(tokens), top_k).as_fixed().expect("fixed sizes");
    let chosen = HostTensor::i32(&[tokens, top_k], &mixture.chosen());
    let i32s = |shape: &[usize]| HostTensor::output(DType::I32, shape);
    let outputs =
        [i32s(&[tokens, top_k]), i32s(&[2, experts]), i32s(&[rows]), i32s(&[rows, top_k])];
    let got = gpu.run(to_ranks.clone(), &[chosen], &outputs, false, 1);
    let share = |factor: f64| (factor * (tokens * top_k) as f64 / experts as f64).ceil() as usize;
    let capacity = capacity_factor.map_or(usize::MAX, share);
    let slab = rows / ranks;
    let sent = oracle::to_ranks(&mixture.chosen(), top_k, experts, ranks, capacity, slab);
    let expected = [&sent.rows, &sent.load, &sent.pairs, &sent.wanted];
    for ((name, got), expected) in
        ["rows", "load", "pairs", "wanted"].iter().zip(&got).zip(expected)
    {
        assert_eq!(to_i32(got), *expected, "{name} of {what}");
    }

    let local_experts = experts / ranks;
    let grouped = ops::GroupedRows::new(local_experts, align);
    let of_expert = to_ranks.capacity(Dim::fixed(tokens), top_k).times(ranks);
    let rows_of = RowsOf::Sent { of_expert };
    let op = ops::Dispatch { grouped, capacity_factor: None, rows_of };
    let received = sent.wanted[..slab * top_k].repeat(ranks);
    let buffer = op.buffer_rows(Dim::fixed(rows), top_k).and_then(|rows| rows.as_fixed());
    let buffer = buffer.expect("fixed sizes");
    let outputs = [
        i32s(&[local_experts + 1]),
        i32s(&[2, local_experts]),
        i32s(&[rows, top_k]),
        i32s(&[buffer]),
    ];
    let wanted = HostTensor::i32(&[rows, top_k], &received);
    let got = gpu.run(op, &[wanted], &outputs, false, 1);
    let expected = oracle::forward(&received, local_experts, align, usize::MAX, buffer);
    let expected = [expected.offsets, expected.load, expected.rows, expected.pairs];
    for ((name, got), expected) in
        ["offsets", "load", "rows", "pairs"].iter().zip(&got).zip(&expected)
    {
        assert_eq!(to_i32(got), *expected, "received {name} of {what}");
    }
}

/// How each of ranks with equally many experts sorts the tokens of all.
fn check_here(gpu: &mut Gpu, mixture: Mixture, ranks: usize) {
    let Mixture { tokens, experts, top_k, align, .. } = mixture;
    let grouped = ops::GroupedRows::new(experts / ranks, align);
    let rows = grouped.rows(Dim::fixed(tokens * top_k.min(grouped.groups)));
    let rows = rows.and_then(|rows| rows.as_fixed()).expect("fixed sizes");
    for first in (0..experts).step_by(grouped.groups) {
        let rows_of = RowsOf::Here { first, experts };
        let op = ops::Dispatch { grouped, capacity_factor: None, rows_of };
        let here = op.here();
        let chosen = HostTensor::i32(&[tokens, top_k], &mixture.chosen());
        let i32s = |shape: &[usize]| HostTensor::output(DType::I32, shape);
        let outputs =
            [i32s(&[here.len() + 1]), i32s(&[2, experts]), i32s(&[tokens, top_k]), i32s(&[rows])];
        let got = gpu.run(op, &[chosen], &outputs, false, 1);
        let expected = oracle::here(&mixture.chosen(), experts, here.clone(), align, rows);
        let expected = [expected.offsets, expected.load, expected.rows, expected.pairs];
        for ((name, got), expected) in
            ["offsets", "load", "rows", "pairs"].iter().zip(&got).zip(&expected)
        {
            assert_eq!(to_i32(got), *expected, "{name} of {mixture:?}, {here:?}");
        }
    }
}

fn check_hard_ranks(gpu: &mut Gpu) {
    for mixture in HARD {
        let Mixture { experts, .. } = mixture;
        for ranks in [1, 2, 4].into_iter().filter(|&ranks| experts.is_multiple_of(ranks)) {
            for factor in [None, Some(0.3)] {
                check_ranks(gpu, mixture, ranks, factor);
            }
            check_here(gpu, mixture, ranks);
        }
    }
}

trial!(maps_for_ranks_are_those_of_the_definition);
fn maps_for_ranks_are_those_of_the_definition() {
    check_hard_ranks(&mut Gpu::open());
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

emulated! {
    dispatch_to_ranks on Sm90a: |gpu| {
        check_hard_ranks(gpu);
        let mixture =
            Mixture { tokens: 361, experts: 40, top_k: 3, choice: Choice::Spread, align: 32 };
        for ranks in [4, 40] {
            check_ranks(gpu, mixture, ranks, None);
            check_here(gpu, mixture, ranks);
        }
    }
}
