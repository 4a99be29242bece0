//! `add_positions.cu` and `add_positions_backward.cu` against the f64 oracle.

use deepwell_ir::{DType, ops};
use deepwell_kernels::ops::add_bias::oracle::forward as add_bias;
use deepwell_kernels::ops::embedding::oracle;

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, uniform};

/// Sequences, tokens of one, positions of the table, width.
pub(crate) type Sizes = (usize, usize, usize, usize);

/// Nothing, one, broken and whole units, a table that is longer than the sequences, tiles that end
/// in the middle of a row, more sequences than are read at a time, and one less.
const SIZES: [Sizes; 12] = [
    (0, 3, 4, 8),
    (1, 1, 1, 1),
    (1, 1, 1, 8),
    (2, 3, 5, 7),
    (7, 5, 5, 9),
    (8, 5, 6, 16),
    (9, 1, 3, 8),
    (3, 33, 64, 33),
    (3, 127, 128, 64),
    (2, 128, 128, 64),
    (17, 129, 200, 768),
    (4, 1024, 1024, 768),
];

/// Position of each token.
fn positions((batch, seq, ..): Sizes) -> Vec<i32> {
    (0..batch * seq).map(|token| (token % seq) as i32).collect()
}

pub(crate) fn check_forward(gpu: &mut Gpu, sizes: Sizes) {
    let (batch, seq, rows, width) = sizes;
    let shape = [batch * seq, width];
    let x = HostTensor::bf16(&shape, &uniform(batch * seq * width, 1, 4.0));
    let table = HostTensor::bf16(&[rows, width], &uniform(rows * width, 2, 4.0));
    let terms = oracle::forward(&positions(sizes), &table.to_f64(), width);
    let expected: Vec<f64> = x.to_f64().iter().zip(terms).map(|(x, term)| x + term).collect();
    let out = HostTensor::output(DType::Bf16, &shape);
    let got = gpu.run(ops::AddPositions {}, &[x, table], &[out], false, seq);
    // One rounding of an exact FP32 sum.
    assert_close(&format!("{sizes:?}"), &got[0].to_f64(), &expected, Tolerance::bf16(0.0));
}

pub(crate) fn check_backward(gpu: &mut Gpu, sizes: Sizes, values: &[f32], tolerance: Tolerance) {
    let (batch, seq, rows, width) = sizes;
    let dout = HostTensor::bf16(&[batch * seq, width], values);
    let before: Vec<f32> = (0..rows * width).map(|index| (index % 17) as f32 - 8.0).collect();
    let sums = oracle::backward(&positions(sizes), &dout.to_f64(), rows, width, None);
    for accumulate in [false, true] {
        let dtable = [HostTensor::f32(&[rows, width], &before)];
        let op = ops::AddPositionsBackward { positions: Some(rows) };
        let got = gpu.run(op, std::slice::from_ref(&dout), &dtable, accumulate, seq);
        let from = |index: usize| if accumulate { f64::from(before[index]) } else { 0.0 };
        let expected: Vec<f64> =
            sums.iter().enumerate().map(|(index, sum)| sum + from(index)).collect();
        let what = format!("{sizes:?}, accumulate {accumulate}");
        assert_close(&what, &got[0].to_f64(), &expected, tolerance);
    }
}

/// Parts of the tokens: of whole sequences, within one, and such that begin and end in the middle.
fn check_parts(gpu: &mut Gpu) {
    for (ranks, tokens, seq, rows, width) in
        [(2, 6, 3, 5, 8), (3, 5, 15, 20, 9), (4, 33, 44, 44, 24), (2, 75, 50, 64, 7)]
    {
        for position in 0..ranks {
            let what = format!("part {position} of {ranks}: {tokens} of {seq}, {width}");
            let at = |token: usize| ((position * tokens + token) % seq) as i32;
            let positions: Vec<i32> = (0..tokens).map(at).collect();
            let values = uniform(tokens * width, 3 + position as u64, 8.0);
            let values: Vec<f32> = values.iter().map(|value| value.trunc()).collect();
            let x = HostTensor::bf16(&[tokens, width], &values);
            let table = HostTensor::bf16(&[rows, width], &uniform(rows * width, 2, 4.0));
            let terms = oracle::forward(&positions, &table.to_f64(), width);
            let expected: Vec<f64> = x.to_f64().iter().zip(terms).map(|(x, it)| x + it).collect();
            let out = HostTensor::output(DType::Bf16, &[tokens, width]);
            let op = ops::AddPositionsOfPart { place: position, ranks };
            let got = gpu.run(op, &[x.clone(), table], &[out], false, seq);
            assert_close(&what, &got[0].to_f64(), &expected, Tolerance::bf16(0.0));

            let sums = oracle::backward(&positions, &x.to_f64(), rows, width, None);
            let dtable = HostTensor::output(DType::F32, &[rows, width]);
            let op =
                ops::AddPositionsOfPartBackward { positions: Some(rows), place: position, ranks };
            let got = gpu.run(op, &[x], &[dtable], false, seq);
            let exact = Tolerance { absolute: 0.0, relative: 0.0 };
            assert_close(&what, &got[0].to_f64(), &sums, exact);
        }
    }
}

trial!(parts_begin_where_the_one_before_ends);
fn parts_begin_where_the_one_before_ends() {
    check_parts(&mut Gpu::open());
}

/// A bias is added as the one row of a table.
fn check_bias(gpu: &mut Gpu) {
    for (tokens, width) in [(0, 8), (1, 1), (3, 7), (5, 8), (65, 24), (129, 264), (33, 1000)] {
        let x = HostTensor::bf16(&[tokens, width], &uniform(tokens * width, 1, 4.0));
        let bias = HostTensor::bf16(&[width], &uniform(width, 2, 4.0));
        let expected = add_bias(&x.to_f64(), &bias.to_f64());
        let out = HostTensor::output(DType::Bf16, &[tokens, width]);
        let got = gpu.run(ops::AddBias {}, &[x, bias], &[out], false, 1);
        let what = format!("{tokens} x {width}");
        assert_close(&what, &got[0].to_f64(), &expected, Tolerance::bf16(0.0));
    }
}

trial!(a_bias_is_added_to_each_row);
fn a_bias_is_added_to_each_row() {
    check_bias(&mut Gpu::open());
}

/// All on a GPU, those of little work on the emulator.
fn sizes_for(gpu: &Gpu) -> Vec<Sizes> {
    SIZES.into_iter().filter(|&sizes| gpu.runs(elements(sizes), 500_000)).collect()
}

/// Elements of x.
pub(crate) fn elements((batch, seq, _, width): Sizes) -> usize {
    batch * seq * width
}

trial!(positions_repeat_with_every_sequence);
fn positions_repeat_with_every_sequence() {
    let mut gpu = Gpu::open();
    for sizes in sizes_for(&gpu) {
        check_forward(&mut gpu, sizes);
    }
}

trial!(integers_are_summed_exactly);
fn integers_are_summed_exactly() {
    let mut gpu = Gpu::open();
    for sizes in sizes_for(&gpu) {
        let values: Vec<f32> =
            uniform(elements(sizes), 3, 8.0).iter().map(|value| value.trunc()).collect();
        let exact = Tolerance { absolute: 0.0, relative: 0.0 };
        check_backward(&mut gpu, sizes, &values, exact);
    }
}

trial!(any_numbers_are_summed_in_fp32);
fn any_numbers_are_summed_in_fp32() {
    let mut gpu = Gpu::open();
    for sizes in sizes_for(&gpu) {
        // Each of the additions rounds a sum of at most all magnitudes.
        let batch = sizes.0 as f64;
        let absolute = (batch + 1.0) * 2f64.powi(-24) * (4.0 * batch + 8.0);
        let values = uniform(elements(sizes), 5, 4.0);
        check_backward(&mut gpu, sizes, &values, Tolerance { absolute, relative: 0.0 });
    }
}

trial!(what_is_not_finite_stays_in_its_place);
fn what_is_not_finite_stays_in_its_place() {
    let mut gpu = Gpu::open();
    let (batch, seq, rows, width) = (5, 3, 4, 24);
    for (value, token) in [(f32::NAN, 4), (f32::INFINITY, 14)] {
        let mut values = vec![1.0; batch * seq * width];
        let place = token * width + 7;
        values[place] = value;
        let x = HostTensor::bf16(&[batch * seq, width], &values);
        let table = HostTensor::bf16(&[rows, width], &vec![1.0; rows * width]);
        let out = HostTensor::output(DType::Bf16, &[batch * seq, width]);
        let got = gpu.run(ops::AddPositions {}, &[x.clone(), table], &[out], false, seq);
        let dtable = HostTensor::output(DType::F32, &[rows, width]);
        let op = ops::AddPositionsBackward { positions: Some(rows) };
        let sums = gpu.run(op, &[x], &[dtable], false, seq);
        let in_table = token % seq * width + 7;
        for (what, got, place) in [("out", &got, place), ("dtable", &sums, in_table)] {
            let not_finite: Vec<usize> = got[0]
                .to_f64()
                .iter()
                .enumerate()
                .filter_map(|(index, number)| (!number.is_finite()).then_some(index))
                .collect();
            assert_eq!(not_finite, [place], "{what}");
        }
    }
}

emulated! {
    add_positions on Sm100a: |gpu| {
        check_forward(gpu, (3, 130, 140, 256));
        check_forward(gpu, (3, 67, 70, 63));
        check_bias(gpu);
    }
}

emulated! {
    add_positions_backward on Sm100a: |gpu| {
        for sizes in [(9, 20, 25, 512), (9, 25, 26, 63)] {
            let count = elements(sizes);
            let values: Vec<f32> =
                uniform(count, 3, 8.0).iter().map(|value| value.trunc()).collect();
            check_backward(gpu, sizes, &values, crate::compare::EXACT);
        }
        check_parts(gpu);
    }
}
