//! `head_rms_norm.cu` and `head_rms_norm_backward.cu` against the f64 oracle of RMSNorm: heads of
//! all tokens are its rows.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::rms_norm::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};
use crate::rms_norm::{f32_error, rows_of};

const EPS: f64 = 1e-6;

/// Tokens, heads of one, elements of a head.
pub(crate) type Sizes = (usize, usize, usize);

/// Nothing, one, heads of one lane to 32, of lanes beyond the last element, one tile of heads and
/// one more or less, and widths that are rows of the other kernels.
const SIZES: [Sizes; 16] = [
    (0, 4, 64),
    (1, 1, 8),
    (3, 5, 16),
    (5, 3, 24),
    (7, 2, 32),
    (127, 1, 64),
    (64, 2, 64),
    (43, 3, 64),
    (21, 3, 128),
    (16, 4, 128),
    (13, 5, 128),
    (9, 7, 96),
    (33, 1, 256),
    (3, 2, 264),
    (4, 3, 12),
    (2, 2, 1),
];

pub(crate) fn check_forward(gpu: &mut Gpu, sizes: Sizes) {
    let (tokens, heads, head_dim) = sizes;
    let what = format!("{sizes:?}");
    let shape = [tokens, heads * head_dim];
    let x = HostTensor::bf16(&shape, &rows_of(tokens * heads, head_dim, 1));
    let weight = HostTensor::bf16(&[head_dim], &uniform(head_dim, 2, 2.0));
    let y = HostTensor::output(DType::Bf16, &shape);
    let rstd = HostTensor::output(DType::F32, &[tokens * heads]);
    let inputs = [x.clone(), weight.clone()];
    let got = gpu.run(ops::HeadRmsNorm { eps: EPS }, &inputs, &[y, rstd], false, 1);
    let expected = oracle::forward(&x.to_f64(), &weight.to_f64(), EPS);
    let close = Tolerance { absolute: 0.0, relative: f32_error(head_dim) };
    assert_close(&format!("{what} rstd"), &got[1].to_f64(), &expected.rstd, close);
    // One rounding to BF16; half its smallest subnormal.
    let close = Tolerance::bf16(2f64.powi(-134));
    assert_close(&format!("{what} y"), &got[0].to_f64(), &expected.y, close);
}

pub(crate) fn check_backward(gpu: &mut Gpu, sizes: Sizes, accumulate: bool) {
    let (tokens, heads, head_dim) = sizes;
    let rows = tokens * heads;
    let what = format!("{sizes:?} accumulate={accumulate}");
    let shape = [tokens, heads * head_dim];
    let matrix = |seed, scale| HostTensor::bf16(&shape, &uniform(rows * head_dim, seed, scale));
    let (dy, x) = (matrix(1, 1.0), matrix(2, 3.0));
    let weight = HostTensor::bf16(&[head_dim], &uniform(head_dim, 4, 2.0));
    let forward = oracle::forward(&x.to_f64(), &weight.to_f64(), EPS);
    let rstd: Vec<f32> = forward.rstd.iter().map(|&rstd| rstd as f32).collect();
    let rstd = HostTensor::f32(&[rows], &rstd);
    let before = uniform(head_dim, 5, 1.0);
    let inputs = [dy.clone(), x.clone(), weight.clone(), rstd.clone()];
    let dx = HostTensor::output(DType::Bf16, &shape);
    let dweight = HostTensor::f32(&[head_dim], &before);
    let got = gpu.run(ops::HeadRmsNormBackward {}, &inputs, &[dx, dweight], accumulate, 1);

    let rstd = rstd.to_f64();
    let mut expected = oracle::backward(&dy.to_f64(), &x.to_f64(), &weight.to_f64(), &rstd);
    if accumulate {
        expected.dweight.iter_mut().zip(&before).for_each(|(dw, &b)| *dw += f64::from(b));
    }
    // Terms of dx may cancel: they are at most rstd * |dy * weight| <= 2 rstd and, as n^2 averages
    // to one and n <= sqrt(head_dim), some 4 rstd more.
    let largest = rstd.iter().fold(0.0, |a: f64, &b| a.max(b));
    let close = Tolerance::bf16(6.0 * largest * f32_error(head_dim));
    assert_close(&format!("{what} dx"), &got[0].to_f64(), &expected.dx, close).must_tell();
    // |dy * n| <= 2 for these numbers, added in runs of rows / 16 at most (one SM of the emulator,
    // heads of a warp each, 16 warps), five levels of lanes, 16 warps and two short levels. Errors
    // of so many roundings add like a walk: three times their root times the size of a sum.
    let roundings = rows as f64 / 16.0 + 48.0;
    let size = 2.0 * (rows as f64).sqrt() + 2.0;
    let close = Tolerance { absolute: 3.0 * roundings.sqrt() * size * EPSILON, relative: 0.0 };
    assert_close(&format!("{what} dweight"), &got[1].to_f64(), &expected.dweight, close)
        .must_tell();
}

/// Half a unit in the last place of FP32.
const EPSILON: f64 = 1.0 / (1u64 << 24) as f64;

trial!(matches_the_oracle);
fn matches_the_oracle() {
    let mut gpu = Gpu::open();
    for sizes in SIZES {
        check_forward(&mut gpu, sizes);
    }
}

trial!(gradients_match_the_oracle);
fn gradients_match_the_oracle() {
    let mut gpu = Gpu::open();
    for sizes in SIZES {
        check_backward(&mut gpu, sizes, false);
        check_backward(&mut gpu, sizes, true);
    }
}

trial!(many_heads_for_each_group);
fn many_heads_for_each_group() {
    let mut gpu = Gpu::open();
    for (tokens, heads, head_dim) in [(4096, 16, 128), (3001, 7, 64), (2048, 8, 96), (501, 3, 256)]
    {
        let tokens = gpu.pick(tokens, tokens / 24);
        check_forward(&mut gpu, (tokens, heads, head_dim));
        check_backward(&mut gpu, (tokens, heads, head_dim), true);
    }
}

trial!(what_is_not_finite_stays_in_its_head);
fn what_is_not_finite_stays_in_its_head() {
    let mut gpu = Gpu::open();
    let (tokens, heads, head_dim) = (3, 2, 64);
    let shape = [tokens, heads * head_dim];
    for value in [f32::NAN, f32::INFINITY] {
        let mut x = uniform(tokens * heads * head_dim, 4, 1.0);
        let (bad, place) = (3, 17);
        x[bad * head_dim + place] = value;
        let x = HostTensor::bf16(&shape, &x);
        let weight = HostTensor::bf16(&[head_dim], &vec![1.0; head_dim]);
        let y = HostTensor::output(DType::Bf16, &shape);
        let rstd = HostTensor::output(DType::F32, &[tokens * heads]);
        let inputs = [x.clone(), weight.clone()];
        let got = gpu.run(ops::HeadRmsNorm { eps: EPS }, &inputs, &[y.clone(), rstd], false, 1);
        let dy = HostTensor::bf16(&shape, &vec![1.0; tokens * heads * head_dim]);
        let dweight = HostTensor::output(DType::F32, &[head_dim]);
        let inputs = [dy, x, weight, got[1].clone()];
        let gradients = gpu.run(ops::HeadRmsNormBackward {}, &inputs, &[y, dweight], false, 1);
        for (what, matrix) in [("y", got[0].to_f64()), ("dx", gradients[0].to_f64())] {
            for (head, numbers) in matrix.chunks_exact(head_dim).enumerate() {
                let not_finite = numbers.iter().filter(|number| !number.is_finite()).count();
                // rstd of a head with an infinity is zero: only the infinity itself is NaN in y.
                let expected = match head == bad {
                    true if what == "y" && value.is_infinite() => 1,
                    true => head_dim,
                    false => 0,
                };
                assert_eq!(not_finite, expected, "{what} of head {head} with {value}");
            }
        }
        let not_finite = gradients[1].to_f64().iter().filter(|sum| !sum.is_finite()).count();
        assert_eq!(not_finite, if value.is_nan() { head_dim } else { 1 }, "dweight with {value}");
    }
}

/// Tokens, heads and their widths: three turns of four CTAs and more, for groups of 16 lanes, of
/// which some have nothing, and of four.
const HEADS_OF_TILES: [(usize, usize, usize); 3] = [(320, 5, 128), (320, 5, 96), (1600, 4, 32)];

emulated! {
    head_rms_norm on Sm100a: |gpu| {
        HEADS_OF_TILES.into_iter().for_each(|sizes| check_forward(gpu, sizes));
    }
}

emulated! {
    head_rms_norm_backward on Sm100a: |gpu| {
        HEADS_OF_TILES.into_iter().for_each(|sizes| check_backward(gpu, sizes, true));
    }
}
