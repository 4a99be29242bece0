//! Embedding and head of ranks that have some rows of the vocabulary each: kernels of
//! `embedding.cu`, `embedding_backward.cu` and `cross_entropy.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::{self, IGNORED_TARGET, VocabSlice};
use deepwell_kernels::ops::{linear_cross_entropy, vocab_parallel::oracle};
use half::bf16;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

/// Tokens, width of x and w, rows of w, and how many ranks there are.
type Sizes = (usize, usize, usize, usize);

/// Tokens of all ranks; every fifth is left out as a target.
fn tokens_of(count: usize, vocab: usize, ignore: bool) -> Vec<i32> {
    let token = |(at, x): (usize, f32)| match ignore && at % 5 == 3 {
        true => IGNORED_TARGET,
        false => (((x + 0.5) * vocab as f32) as usize).min(vocab - 1) as i32,
    };
    uniform(count, 5, 0.5).into_iter().enumerate().map(token).collect()
}

fn rows_of(table: &HostTensor, slice: &VocabSlice, width: usize) -> HostTensor {
    let values: Vec<f32> = table.to_f64().iter().map(|&x| x as f32).collect();
    HostTensor::bf16(&[slice.rows, width], &values[slice.first * width..][..slice.rows * width])
}

pub(crate) fn check_embedding(gpu: &mut Gpu, (count, width, vocab, parts): Sizes) {
    let table = HostTensor::bf16(&[vocab, width], &uniform(vocab * width, 1, 3.0));
    let dout = HostTensor::bf16(&[count, width], &uniform(count * width, 2, 1.0));
    let tokens = tokens_of(count, vocab, false);
    let given = HostTensor::i32(&[count], &tokens);
    for rank in 0..parts {
        let slice = VocabSlice::of(vocab, rank, parts).expect("equal parts");
        let slice_rows = rows_of(&table, &slice, width);
        let expected = oracle::embedding(&tokens, &slice_rows.to_f64(), &slice, width);
        let output = [HostTensor::output(DType::Bf16, &[count, width])];
        let op = ops::VocabParallelEmbedding { slice, padding: None };
        let got = gpu.run(op, &[given.clone(), slice_rows], &output, false, 1);
        assert_eq!(got[0].to_f64(), expected, "{rank} of {parts}");
        let mut expected = oracle::embedding_backward(&tokens, &dout.to_f64(), &slice, width);
        // The first row of the second rank, whose gradient the others do not have.
        let padding = Some(slice.vocab / parts);
        if let Some(row) = slice.row_of((vocab / parts) as i32) {
            expected[row * width..][..width].fill(0.0);
        }
        let output = [HostTensor::output(DType::F32, &[slice.rows, width])];
        let op = ops::VocabParallelEmbeddingBackward { slice, padding };
        let got = gpu.run(op, &[given.clone(), dout.clone()], &output, false, 1);
        // A rounding for each of the tokens that add to a row.
        let relative = count as f64 * f64::from(f32::EPSILON) / 2.0;
        let tolerance = Tolerance { absolute: relative * 2.0, relative };
        assert_close(&format!("dtable {rank}"), &got[0].to_f64(), &expected, tolerance);
    }
}

/// Each rank's sums, then its part of the gradients by the sums of all, beside those of one rank.
pub(crate) fn check_head(gpu: &mut Gpu, (count, hidden, vocab, parts): Sizes) {
    let x = HostTensor::bf16(&[count, hidden], &uniform(count * hidden, 1, 1.0));
    let w = HostTensor::bf16(&[vocab, hidden], &uniform(vocab * hidden, 2, 1.0));
    let targets = tokens_of(count, vocab, true);
    let given = HostTensor::i32(&[count], &targets);
    let scale = 1.0 / count as f32;
    let slices: Vec<VocabSlice> =
        (0..parts).map(|rank| VocabSlice::of(vocab, rank, parts).expect("equal")).collect();
    // Sums of `hidden` terms in FP32, of which some are rounded to 2^-22 by ex2.approx.
    let relative = (hidden as f64 + 8.0) * f64::from(f32::EPSILON);
    let near = Tolerance { absolute: relative * hidden as f64, relative: relative * hidden as f64 };
    let mut all = Vec::new();
    for slice in &slices {
        let slice_rows = rows_of(&w, slice, hidden);
        let expected = oracle::sums(&x.to_f64(), &slice_rows.to_f64(), &targets, slice, hidden);
        let output = [HostTensor::output(DType::F32, &[count, 3])];
        let op = ops::VocabParallelSums { slice: *slice };
        let got =
            gpu.run(op, &[x.clone(), slice_rows, given.clone()], &output, false, 1)[0].to_f64();
        assert_close("sums", &got, &expected.concat(), near);
        all.extend(got.into_iter().map(|sum| sum as f32));
    }
    let sums = HostTensor::f32(&[parts * count, 3], &all);
    let (wide_x, wide_w) = (x.to_f64(), w.to_f64());
    let one = linear_cross_entropy::oracle::backward(
        &wide_x,
        &wide_w,
        &targets,
        hidden,
        f64::from(scale),
    );
    let loss =
        linear_cross_entropy::oracle::forward(&wide_x, &wide_w, &targets, hidden, f64::from(scale));
    let mut dx = vec![0.0; count * hidden];
    for slice in &slices {
        let slice_rows = rows_of(&w, slice, hidden);
        let inputs =
            [x.clone(), slice_rows, given.clone(), HostTensor::f32(&[1], &[scale]), sums.clone()];
        let ranks = parts;
        let output = [HostTensor::output(DType::F32, &[1])];
        let op = ops::VocabParallelCrossEntropy { slice: *slice, ranks };
        let alone = gpu.run(op, &inputs, &output, false, 1)[0].to_f64();
        let outputs = [
            HostTensor::output(DType::F32, &[1]),
            HostTensor::output(DType::Bf16, &[count, hidden]),
            HostTensor::output(DType::F32, &[slice.rows, hidden]),
        ];
        let op = ops::VocabParallelCrossEntropyGrad { slice: *slice, ranks };
        let got = gpu.run(op, &inputs, &outputs, false, 1);
        assert_eq!(got[0].to_f64(), alone, "one loss, with gradients or without");
        assert_close("loss", &alone, &[loss], near);
        dx.iter_mut().zip(got[1].to_f64()).for_each(|(sum, part)| *sum += part);
        // The logits' gradient is rounded to BF16: of `count` terms each is off by 2^-9.
        let of_one = &one.dw[slice.first * hidden..][..slice.rows * hidden];
        let rounding = f64::from(f32::from(bf16::EPSILON));
        let largest = of_one.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let tolerance =
            Tolerance { absolute: rounding * largest.max(f64::from(scale)), relative: rounding };
        assert_close("dw", &got[2].to_f64(), of_one, tolerance);
    }
    let rounding = f64::from(f32::from(bf16::EPSILON));
    let largest = one.dx.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let tolerance = Tolerance { absolute: parts as f64 * rounding * largest, relative: rounding };
    assert_close("dx", &dx, &one.dx, tolerance);
}

trial!(ranks_embed_their_rows);
fn ranks_embed_their_rows() {
    let mut gpu = Gpu::open();
    for sizes in [(1, 8, 2, 2), (65, 33, 6, 3), (300, 136, 256, 4)] {
        check_embedding(&mut gpu, sizes);
    }
}

trial!(ranks_have_the_loss_of_all_rows);
fn ranks_have_the_loss_of_all_rows() {
    let mut gpu = Gpu::open();
    for sizes in [(5, 8, 16, 2), (130, 72, 300, 3), (257, 64, 512, 4)] {
        check_head(&mut gpu, sizes);
    }
}
