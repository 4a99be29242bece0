//! `embedding_backward.cu`.

use std::slice;

use deepwell_ir::ops;
use deepwell_kernels::ops::embedding::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

/// Which tokens a text has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tokens {
    Uniform,
    /// Half of them the first, a quarter the second, and so on; and the last one now and then.
    Skewed,
    OneOnly,
    Sorted,
    /// Few of the table's, as of a text's bytes, some of them rare.
    Bytes,
    /// One in five is not in the table.
    Outside,
}

impl Tokens {
    fn list(self, len: usize, vocab: usize) -> Vec<i32> {
        let unit: Vec<f32> = uniform(len, 11, 0.5).iter().map(|x| x + 0.5).collect();
        let scaled = |x: f32| ((x * vocab as f32) as usize).min(vocab - 1);
        let mut tokens: Vec<usize> = match self {
            Tokens::OneOnly => vec![vocab / 2; len],
            Tokens::Skewed => unit
                .iter()
                .enumerate()
                .map(|(i, x)| if i % 97 == 0 { vocab - 1 } else { (-x.log2()) as usize % vocab })
                .collect(),
            Tokens::Bytes => {
                unit.iter().map(|x| (x * x * x * vocab.min(256) as f32) as usize % vocab).collect()
            }
            Tokens::Outside => unit
                .iter()
                .enumerate()
                .map(|(i, &x)| if i % 5 == 3 { vocab + i } else { scaled(x) })
                .collect(),
            _ => unit.iter().map(|&x| scaled(x)).collect(),
        };
        if matches!(self, Tokens::Sorted) {
            tokens.sort_unstable();
        }
        tokens.into_iter().map(|token| token as i32).collect()
    }
}

pub(crate) fn check(
    gpu: &mut Gpu,
    (len, vocab, width): (usize, usize, usize),
    kind: Tokens,
    values: &[f32],
    tolerance: Tolerance,
) {
    let tokens = kind.list(len, vocab);
    let dout = HostTensor::bf16(&[len, width], values);
    let before: Vec<f32> = (0..vocab * width).map(|index| (index % 13) as f32 - 6.0).collect();
    let before = HostTensor::f32(&[vocab, width], &before);
    let (mut known, mut of_known) = (tokens.clone(), dout.to_f64());
    for (token, row) in known.iter_mut().zip(of_known.chunks_exact_mut(width)) {
        if *token as usize >= vocab {
            *token = 0;
            row.fill(0.0);
        }
    }
    let inputs = [HostTensor::i32(&[len], &tokens), dout];
    let first = Some(0);
    for (accumulate, padding) in [(false, None), (true, None), (false, first), (true, first)] {
        let sums = oracle::backward(&known, &of_known, vocab, width, padding);
        let op = ops::EmbeddingBackward { vocab: Some(vocab), padding };
        let got = gpu.run(op, &inputs, slice::from_ref(&before), accumulate, 1);
        let expected: Vec<f64> = sums
            .iter()
            .zip(before.to_f64())
            .map(|(sum, before)| if accumulate { sum + before } else { *sum })
            .collect();
        let what =
            format!("{len} of {vocab}x{width}, {kind:?}, accumulate {accumulate}, {padding:?}");
        assert_close(&what, &got[0].to_f64(), &expected, tolerance);
    }
}

const KINDS: [Tokens; 6] = [
    Tokens::Uniform,
    Tokens::Skewed,
    Tokens::OneOnly,
    Tokens::Sorted,
    Tokens::Bytes,
    Tokens::Outside,
];

trial!(integers_are_summed_exactly);
fn integers_are_summed_exactly() {
    let mut gpu = Gpu::open();
    // One chunk of 64 sorted positions, several, rows of many chunks; rows and columns that do
    // not fill their CTAs.
    for size in [
        (0, 5, 8),
        (0, 3, 3),
        (1, 1, 1),
        (5, 7, 3),
        (33, 64, 8),
        (63, 2, 128),
        (64, 3, 132),
        (65, 3, 124),
        (128, 1, 4),
        (100, 65, 255),
        (1000, 300, 257),
        (2047, 50, 264),
        (2048, 257, 64),
        (2049, 1000, 40),
        (5003, 4, 136),
        (7000, 5000, 33),
        (4096, 9000, 512),
        (3000, 33_000, 24),
        (20_000, 32_000, 36),
        (40_001, 260, 20),
    ] {
        if !gpu.runs(size.0 * size.2 + size.1 * size.2, 1 << 17) {
            continue;
        }
        for kind in KINDS {
            // Sums of up to 40001 integers below 8 are whole numbers below 2^24.
            let values = uniform(size.0 * size.2, 3, 8.0);
            let values: Vec<f32> = values.iter().map(|value| value.trunc()).collect();
            let tolerance = Tolerance { absolute: 0.0, relative: 0.0 };
            check(&mut gpu, size, kind, &values, tolerance);
        }
    }
}

trial!(any_numbers_are_summed_in_fp32);
fn any_numbers_are_summed_in_fp32() {
    let mut gpu = Gpu::open();
    for size in [(31, 5, 7), (500, 100, 64), (3000, 20, 72)] {
        for kind in KINDS {
            let largest = 4.0;
            let values = uniform(size.0 * size.2, 5, largest);
            // A row has at most all positions; each addition rounds a sum of at most all
            // magnitudes.
            let terms = size.0 as f64;
            let absolute = terms * 2f64.powi(-24) * (terms * f64::from(largest) + 6.0);
            check(&mut gpu, size, kind, &values, Tolerance { absolute, relative: 0.0 });
        }
    }
}

trial!(tokens_outside_of_the_table_count_nowhere);
fn tokens_outside_of_the_table_count_nowhere() {
    let mut gpu = Gpu::open();
    let tokens = [2, -1, 3, i32::MAX, 0, i32::MIN, 4];
    for width in [3, 8] {
        let dout = HostTensor::bf16(&[7, width], &vec![1.0; 7 * width]);
        let inputs = [HostTensor::i32(&[7], &tokens), dout];
        let before = HostTensor::f32(&[3, width], &vec![5.0; 3 * width]);
        let op = ops::EmbeddingBackward { vocab: Some(3), padding: None };
        let got = gpu.run(op, &inputs, &[before], false, 1)[0].to_f64();
        let expected: Vec<f64> = [1.0, 0.0, 1.0].iter().flat_map(|&sum| vec![sum; width]).collect();
        assert_eq!(got, expected);
    }
}

emulated! {
    embedding_backward on Sm100a: |gpu| {
        for size in [(1000, 300, 257), (2048, 257, 64)] {
            let values: Vec<f32> =
                uniform(size.0 * size.2, 3, 8.0).iter().map(|value| value.trunc()).collect();
            check(gpu, size, Tokens::Skewed, &values, crate::compare::EXACT);
        }
    }
}
