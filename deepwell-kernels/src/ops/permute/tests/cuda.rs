//! `permute.cu`, `permute_f32.cu` and `permute_quantize.cu`.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::permute::oracle;
use deepwell_precision::{Granularity, QuantFormat};

use crate::compare::{EXACT, assert_close, assert_within};
use crate::fused_quantize::{check_fused, each_mixture};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mixture::{Choice, HARD, Mixture};
use crate::quantize::numbers;

fn check(gpu: &mut Gpu, mixture: Mixture, columns: usize, capacity: usize) {
    let what = format!("{mixture:?} of {columns}, capacity {capacity}");
    let (tokens, rows) = (mixture.tokens, mixture.rows());
    let grouped = mixture.grouped(capacity);
    let maps = mixture.maps(&grouped);
    let x = HostTensor::bf16(&[tokens, columns], &uniform(tokens * columns, 1, 4.0));
    let inputs = [&[x.clone()][..], &maps].concat();
    let out = HostTensor::output(DType::Bf16, &[rows, columns]);
    let got = gpu.run(ops::Permute {}, &inputs, &[out], false, 1)[0].to_f64();
    let expected = oracle::permute(&x.to_f64(), &grouped.pairs, mixture.top_k, columns);
    assert_close(&format!("permute {what}"), &got, &expected, EXACT);

    // What no pair has is not read.
    let mut y = uniform(rows * columns, 2, 4.0);
    for (row, _) in grouped.pairs.iter().enumerate().filter(|(_, pair)| **pair < 0) {
        y[row * columns..][..columns].fill(f32::NAN);
    }
    let y = HostTensor::bf16(&[rows, columns], &y);
    let wide = y.to_f64();
    let expected = oracle::unpermute(&wide, &grouped.rows, mixture.top_k, columns);
    let sizes: Vec<f64> = wide.iter().map(|y| y.abs()).collect();
    let sizes = oracle::unpermute(&sizes, &grouped.rows, mixture.top_k, columns);
    // An addition for each choice, each rounded by 2^-24 of the magnitudes, and one rounding.
    let additions = mixture.top_k as f64 * 2f64.powi(-24);
    let bounds: Vec<f64> =
        expected.iter().zip(&sizes).map(|(y, size)| y.abs() / 256.0 + additions * size).collect();
    let inputs = [&[y.clone()][..], &maps].concat();
    let out = HostTensor::output(DType::Bf16, &[tokens, columns]);
    let got = gpu.run(ops::Unpermute {}, &inputs, std::slice::from_ref(&out), false, 1);
    assert_within(&format!("unpermute {what}"), &got[0].to_f64(), &expected, &bounds);

    // Of a sum: the bits of the sum, stored, and of its rows brought back.
    let z = HostTensor::bf16(&[rows, columns], &uniform(rows * columns, 3, 4.0));
    let sum_output = HostTensor::output(DType::Bf16, &[rows, columns]);
    let sum = gpu.run(ops::Add {}, &[y.clone(), z.clone()], &[sum_output], false, 1);
    let inputs = [&sum[..], &maps].concat();
    let apart = gpu.run(ops::Unpermute {}, &inputs, std::slice::from_ref(&out), false, 1);
    let inputs = [&[y, z][..], &maps].concat();
    let got = gpu.run(ops::AddUnpermute {}, &inputs, &[out], false, 1);
    assert!(got == apart, "the sum brought back differs: {what}");
}

/// Gates, as many of a row as a token has experts, and what nobody wants of them.
fn check_f32(gpu: &mut Gpu, mixture: Mixture, columns: usize, capacity: usize) {
    let what = format!("{mixture:?} of {columns} in f32, capacity {capacity}");
    let (tokens, rows) = (mixture.tokens, mixture.rows());
    let grouped = mixture.grouped(capacity);
    let maps = mixture.maps(&grouped);
    let x = HostTensor::f32(&[tokens, columns], &uniform(tokens * columns, 1, 4.0));
    let inputs = [&[x.clone()][..], &maps].concat();
    let out = HostTensor::output(DType::F32, &[rows, columns]);
    let got = gpu.run(ops::Permute {}, &inputs, &[out], false, 1)[0].to_f64();
    let expected = oracle::permute(&x.to_f64(), &grouped.pairs, mixture.top_k, columns);
    assert_close(&format!("permute {what}"), &got, &expected, EXACT);

    let mut y: Vec<f32> =
        uniform(rows * columns, 2, 4.0).iter().map(|y| (y * 64.0).trunc()).collect();
    for (row, _) in grouped.pairs.iter().enumerate().filter(|(_, pair)| **pair < 0) {
        y[row * columns..][..columns].fill(f32::NAN);
    }
    let y = HostTensor::f32(&[rows, columns], &y);
    // Whole numbers, whose sums are exact.
    let expected = oracle::unpermute(&y.to_f64(), &grouped.rows, mixture.top_k, columns);
    let inputs = [&[y][..], &maps].concat();
    let out = HostTensor::output(DType::F32, &[tokens, columns]);
    let got = gpu.run(ops::Unpermute {}, &inputs, &[out], false, 1)[0].to_f64();
    assert_close(&format!("unpermute {what}"), &got, &expected, EXACT);
}

/// Few columns and many, whole vectors and not, rows of one lane and of several turns of a warp.
fn check_hard(gpu: &mut Gpu) {
    for (mixture, columns) in HARD.into_iter().zip([8, 64, 3, 24, 33, 512, 64, 9, 40, 1]) {
        for capacity in [usize::MAX, 7, 0] {
            check(gpu, mixture, columns, capacity);
        }
    }
}

/// Fused with the quantization of what comes out: the same bits.
fn check_quantized(
    gpu: &mut Gpu,
    mixture: Mixture,
    columns: usize,
    capacity: usize,
    how: &Quantize,
) {
    let grouped = mixture.grouped(capacity);
    let kind = if columns == 64 { "special" } else { "wide" };
    let x = HostTensor::bf16(&[mixture.tokens, columns], &numbers(kind, mixture.tokens, columns));
    let inputs = [&[x][..], &mixture.maps(&grouped)].concat();
    let out = HostTensor::output(DType::Bf16, &[mixture.rows(), columns]);
    let what = format!("{mixture:?} of {columns}, capacity {capacity}");
    let (op, how) = (ops::Permute {}.into(), std::slice::from_ref(how));
    check_fused(gpu, &op, "permute_quantize", &inputs, &[out], how, &what);
}

fn check_all_quantized(gpu: &mut Gpu) {
    each_mixture(|mixture, columns, capacity, [how, _]| {
        check_quantized(gpu, mixture, columns, capacity, how);
    });
}

trial!(rows_are_quantized_on_their_way);
fn rows_are_quantized_on_their_way() {
    let mut gpu = Gpu::open();
    check_all_quantized(&mut gpu);
    if gpu.runs(1, 0) {
        // More tiles than a GPU holds at a time, once without dropped pairs and once with some.
        let large = Mixture { tokens: 2000, experts: 64, top_k: 8, ..HARD[8] };
        let of = |granularity| Quantize {
            format: QuantFormat::MXFP8.with_granularity(granularity),
            axis: Axis::Both,
        };
        check_quantized(&mut gpu, large, 2048, usize::MAX, &of(Granularity::G32));
        check_quantized(&mut gpu, large, 2048, 200, &of(Granularity::G128));
    }
}

trial!(rows_go_there_and_back);
fn rows_go_there_and_back() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    for mixture in HARD {
        check_f32(&mut gpu, mixture, mixture.top_k, 7);
    }
    if gpu.runs(1, 0) {
        let large = Mixture { tokens: 2000, experts: 64, top_k: 8, ..HARD[1] };
        check(&mut gpu, large, 2048, usize::MAX);
    }
}

emulated! {
    permute on Sm90a: |gpu| {
        check_hard(gpu);
        let mixture =
            Mixture { tokens: 200, experts: 8, top_k: 2, choice: Choice::Spread, align: 32 };
        for columns in [264, 33] {
            check(gpu, mixture, columns, 60);
        }
    }
}

emulated! {
    permute_f32 on Sm90a: |gpu| {
        for mixture in HARD {
            check_f32(gpu, mixture, mixture.top_k, usize::MAX);
            check_f32(gpu, mixture, 3, 7);
        }
        let mixture =
            Mixture { tokens: 400, experts: 8, top_k: 3, choice: Choice::Spread, align: 32 };
        check_f32(gpu, mixture, 3, 60);
    }
}

emulated! {
    permute_quantize on Sm90a: check_all_quantized
}
