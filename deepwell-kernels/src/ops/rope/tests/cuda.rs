//! `rope.cu`.

use std::slice;

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{DType, Op, ops};
use deepwell_kernels::ops::rope::cpu;
use deepwell_kernels::ops::rope::oracle;
use deepwell_precision::{Granularity, QuantFormat};
use half::bf16;

use crate::compare::{Tolerance, assert_close};
use crate::fused_quantize::check_fused_of_sequences;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::quantize::specs;

/// Frequencies of few bits: their products with positions are exact in FP32, as in the oracle.
fn short_frequencies(half: usize) -> Vec<f32> {
    (0..half).map(|i| [1.0, 0.75, 0.625][i % 3] * 0.5f32.powi((i / 3) as i32 % 12)).collect()
}

pub(crate) struct Case {
    rows: usize,
    heads: usize,
    head_dim: usize,
    seq: usize,
    attention_factor: f32,
    frequencies: Vec<f32>,
    /// Radians by which an angle may be off.
    angle_error: f64,
}

impl Case {
    pub(crate) fn new(rows: usize, heads: usize, head_dim: usize, seq: usize) -> Case {
        let frequencies = short_frequencies(head_dim / 2);
        Case { rows, heads, head_dim, seq, attention_factor: 1.0, frequencies, angle_error: 0.0 }
    }
}

pub(crate) fn check(gpu: &mut Gpu, case: &Case) {
    let &Case { rows, heads, head_dim, seq, attention_factor, angle_error, .. } = case;
    let what = format!("{rows} rows, {heads} heads of {head_dim}, seq {seq}");
    let shape = [rows, heads * head_dim];
    let largest = 4.0;
    let x = HostTensor::bf16(&shape, &uniform(rows * heads * head_dim, 7, largest));
    let rope = ops::Rope {
        heads,
        head_dim,
        inverse_frequencies: case.frequencies.clone(),
        attention_factor,
        ..ops::Rope::default()
    };
    let of = oracle::Shape { heads, head_dim, seq, ..oracle::Shape::default() };
    let wide: Vec<f64> = case.frequencies.iter().map(|&f| f64::from(f)).collect();
    let factor = f64::from(attention_factor);
    let scaled = |values: Vec<f64>| -> Vec<f64> { values.iter().map(|x| x * factor).collect() };
    // Two products and a sum in FP32 with sines rounded to it, where they may cancel; what an
    // angle is off moves the result by that much of the pair's length.
    let length = f64::from(largest) * 1.5 * factor.abs();
    let tolerance = Tolerance::bf16(length * (2f64.powi(-21) + angle_error));
    let output = [HostTensor::output(DType::Bf16, &shape)];

    let got = gpu.run(rope.clone(), slice::from_ref(&x), &output, false, seq);
    let expected = scaled(oracle::forward(&x.to_f64(), &of, &wide));
    assert_close(&format!("forward, {what}"), &got[0].to_f64(), &expected, tolerance);

    let got =
        gpu.run(ops::RopeBackward { forward: rope }, slice::from_ref(&x), &output, false, seq);
    let expected = scaled(oracle::backward(&x.to_f64(), &of, &wide));
    assert_close(&format!("backward, {what}"), &got[0].to_f64(), &expected, tolerance);
}

/// What ranks turn of their parts of sequences is what one rank turns of whole ones.
pub(crate) fn check_parts(gpu: &mut Gpu, rope: &ops::Rope, ranks: usize, own: usize) {
    const BATCH: usize = 2;
    let (seq, width) = (ranks * own, rope.heads * rope.head_dim);
    let of = oracle::Shape {
        heads: rope.heads,
        head_dim: rope.head_dim,
        plain_dim: rope.plain_dim,
        interleaved: rope.interleaved,
        seq,
    };
    let frequencies: Vec<f64> = rope.inverse_frequencies.iter().map(|&f| f.into()).collect();
    let x = HostTensor::bf16(&[BATCH * seq, width], &uniform(BATCH * seq * width, 8, 4.0)).to_f64();
    let turns = [
        (false, oracle::forward(&x, &of, &frequencies)),
        (true, oracle::backward(&x, &of, &frequencies)),
    ];
    for place in 0..ranks {
        let part = ops::Zigzag { place, ranks };
        let rows = |whole: &[f64]| {
            part.part_of(&whole.chunks_exact(width).collect::<Vec<_>>(), seq).concat()
        };
        let shape = [BATCH * own, width];
        let own_x: Vec<f32> = rows(&x).iter().map(|&x| x as f32).collect();
        let x = HostTensor::bf16(&shape, &own_x);
        for (back, whole) in &turns {
            let op = ops::RopeOfPart { rope: rope.clone(), back: *back, part };
            let output = [HostTensor::output(DType::Bf16, &shape)];
            let got = gpu.run(op, slice::from_ref(&x), &output, false, own);
            let what = format!("{place} of {ranks}, {own} tokens, back {back}, {rope:?}");
            let tolerance = Tolerance::bf16(6.0 * 2f64.powi(-21));
            assert_close(&what, &got[0].to_f64(), &rows(whole), tolerance);
        }
    }
}

trial!(parts_of_sequences_turn_by_their_places);
fn parts_of_sequences_turn_by_their_places() {
    let mut gpu = Gpu::open();
    // Whole heads, and those of `rope_partial.cu`.
    for (heads, head_dim, plain_dim, interleaved) in
        [(1, 2, 0, false), (3, 6, 0, false), (5, 64, 0, false), (2, 24, 8, false), (2, 16, 0, true)]
    {
        let rope = ops::Rope {
            heads,
            head_dim,
            plain_dim,
            interleaved,
            inverse_frequencies: short_frequencies((head_dim - plain_dim) / 2),
            attention_factor: 1.0,
        };
        for (ranks, own) in [(1, 6), (2, 2), (2, 34), (3, 10), (4, 6)] {
            check_parts(&mut gpu, &rope, ranks, own);
        }
    }
}

/// Rows of a table that are positions of sequences, in order and not, give what the op of sequences
/// gives.
pub(crate) fn check_by_table(gpu: &mut Gpu, heads: usize, head_dim: usize, rows: usize) {
    let half = head_dim / 2;
    let frequencies = short_frequencies(half);
    let wide: Vec<f64> = frequencies.iter().map(|&f| f.into()).collect();
    let shape = [rows, heads * head_dim];
    let x = HostTensor::bf16(&shape, &uniform(rows * heads * head_dim, 7, 4.0));
    for (positions, step) in [(rows, 1), (rows.div_ceil(2), 1), (rows, 5)] {
        let angles = |position: usize, of: fn(f64) -> f64| -> Vec<f32> {
            wide.iter().map(|&f| of((position * step % 31) as f64 * f) as f32).collect()
        };
        let rows_of = |row| [angles(row, f64::cos), angles(row, f64::sin)].concat();
        let table: Vec<f32> = (0..positions).flat_map(rows_of).collect();
        let inputs = [x.clone(), HostTensor::f32(&[positions, head_dim], &table)];
        for back in [false, true] {
            let op = ops::RopeByTable { heads, head_dim, back };
            let output = [HostTensor::output(DType::Bf16, &shape)];
            let got = gpu.run(op, &inputs, &output, false, 1);
            // Each row by itself, at its own position of a sequence of 31.
            let of = oracle::Shape { heads, head_dim, seq: 31, ..oracle::Shape::default() };
            let expected: Vec<f64> = (x.to_f64().chunks_exact(heads * head_dim).enumerate())
                .flat_map(|(row, values)| {
                    let position = row % positions * step % 31;
                    let turn = if back { oracle::backward } else { oracle::forward };
                    let turned = turn(&values.repeat(31), &of, &wide);
                    turned[position * values.len()..][..values.len()].to_vec()
                })
                .collect();
            let what = format!("{rows} rows, {heads} heads of {head_dim}, {positions} positions");
            let tolerance = Tolerance::bf16(6.0 * 2f64.powi(-21));
            assert_close(&what, &got[0].to_f64(), &expected, tolerance);
        }
    }
}

trial!(a_table_has_a_row_for_each_token_or_each_position);
fn a_table_has_a_row_for_each_token_or_each_position() {
    let mut gpu = Gpu::open();
    for (heads, head_dim, rows) in [(1, 2, 1), (3, 6, 10), (5, 64, 34), (2, 128, 62)] {
        check_by_table(&mut gpu, heads, head_dim, rows);
    }
}

trial!(has_the_bits_of_the_cpu);
fn has_the_bits_of_the_cpu() {
    let mut gpu = Gpu::open();
    // Heads that fill their threads, and not; sequences of 48; an angle that is rounded.
    for (heads, head_dim, attention_factor) in
        [(1, 2, 1.0), (3, 6, 1.0), (4, 64, 1.25), (5, 64, 1.0), (8, 128, 1.0), (13, 80, 0.7)]
    {
        let (rows, seq) = (144, 48);
        let inverse_frequencies: Vec<f32> = (0..head_dim / 2)
            .map(|i| 10_000f64.powf(-2.0 * i as f64 / head_dim as f64) as f32)
            .collect();
        let rope = ops::Rope {
            heads,
            head_dim,
            inverse_frequencies,
            attention_factor,
            ..ops::Rope::default()
        };
        let shape = [rows, heads * head_dim];
        let x = HostTensor::bf16(&shape, &uniform(rows * heads * head_dim, 9, 4.0));
        let numbers: Vec<bf16> = bytemuck::pod_collect_to_vec(&x.bytes);
        let (mut cosines, mut sines) =
            (vec![0.0; seq * head_dim / 2], vec![0.0; seq * head_dim / 2]);
        cpu::rope_tables(&rope.inverse_frequencies, seq, &mut cosines, &mut sines);
        cosines.iter_mut().chain(&mut sines).for_each(|value| *value *= attention_factor);
        let of_rows = cpu::RopeShape { heads, head_dim, seq, ..cpu::RopeShape::default() };
        let output = [HostTensor::output(DType::Bf16, &shape)];
        let mut expected = vec![bf16::ZERO; numbers.len()];
        let what = format!("{heads} heads of {head_dim}");

        cpu::rope_forward(&numbers, of_rows, &cosines, &sines, &mut expected);
        let got = gpu.run(rope.clone(), slice::from_ref(&x), &output, false, seq);
        assert_eq!(got[0].bytes, bytemuck::cast_slice::<_, u8>(&expected), "forward, {what}");

        cpu::rope_backward(&numbers, of_rows, &cosines, &sines, &mut expected);
        let op = ops::RopeBackward { forward: rope };
        let got = gpu.run(op, slice::from_ref(&x), &output, false, seq);
        assert_eq!(got[0].bytes, bytemuck::cast_slice::<_, u8>(&expected), "backward, {what}");
    }
}

trial!(turns_as_the_oracle);
fn turns_as_the_oracle() {
    let mut gpu = Gpu::open();
    for (rows, heads, head_dim, seq) in [
        (0, 2, 16, 4),
        (1, 1, 2, 1),
        (5, 3, 6, 5),
        (7, 2, 10, 7),
        (12, 1, 16, 4),
        (63, 4, 64, 21),
        (65, 4, 64, 13),
        (130, 12, 64, 65),
        (128, 32, 128, 64),
        (33, 8, 128, 11),
        (9, 5, 256, 3),
        (2, 1, 4096, 2),
        (2, 3, 4094, 1),
        (3000, 2, 32, 1000),
    ] {
        check(&mut gpu, &Case::new(rows, heads, head_dim, seq));
    }
}

trial!(factors_scale_and_frequencies_are_those_given);
fn factors_scale_and_frequencies_are_those_given() {
    let mut gpu = Gpu::open();
    check(&mut gpu, &Case { attention_factor: 1.375, ..Case::new(40, 2, 64, 20) });
    let (head_dim, seq) = (128, 2048);
    let frequencies = (0..head_dim / 2)
        .map(|i| 500_000f64.powf(-2.0 * f64::from(i) / f64::from(head_dim)) as f32)
        .collect();
    // The angle is rounded to FP32: half a unit of the last place of the largest.
    let angle_error = f64::from(seq) * 2f64.powi(-24);
    let case = Case::new(seq as usize, 4, head_dim as usize, seq as usize);
    check(&mut gpu, &Case { frequencies, angle_error, ..case });
}

trial!(late_positions_are_as_good_as_early_ones);
fn late_positions_are_as_good_as_early_ones() {
    let mut gpu = Gpu::open();
    let rows = gpu.pick(1_000_000, 100_000);
    check(&mut gpu, &Case::new(rows, 1, 2, rows));
}

trial!(what_is_not_finite_stays_with_its_pair);
fn what_is_not_finite_stays_with_its_pair() {
    let mut gpu = Gpu::open();
    let rope = ops::Rope {
        heads: 1,
        head_dim: 16,
        inverse_frequencies: short_frequencies(8),
        attention_factor: 1.0,
        ..ops::Rope::default()
    };
    let mut x = vec![1.0; 48];
    x[16] = f32::NAN;
    x[34] = f32::INFINITY;
    let x = HostTensor::bf16(&[3, 16], &x);
    let got = gpu.run(rope, &[x], &[HostTensor::output(DType::Bf16, &[3, 16])], false, 3);
    let lost: Vec<usize> = got[0]
        .to_f64()
        .iter()
        .enumerate()
        .filter(|(_, x)| !x.is_finite())
        .map(|(i, _)| i)
        .collect();
    assert_eq!(lost, [16, 24, 34, 42]);
}

emulated! {
    rope on Sm100a: |gpu| {
        check(gpu, &Case::new(600, 5, 64, 48));
        check(gpu, &Case::new(400, 3, 6, 48));
        check_by_table(gpu, 3, 16, 20);
    }
}

/// Both directions of a case and the quantization of the result.
fn check_quantized(gpu: &mut Gpu, case: &Case, quantize: &Quantize) {
    let &Case { rows, heads, head_dim, seq, attention_factor, .. } = case;
    let forward = ops::Rope {
        heads,
        head_dim,
        inverse_frequencies: case.frequencies.clone(),
        attention_factor,
        ..ops::Rope::default()
    };
    let shape = [rows, heads * head_dim];
    let mut x = uniform(rows * heads * head_dim, 7, 4.0);
    // Nothing of a row that is not finite reaches others.
    if rows > 2 {
        x[heads * head_dim + 1] = f32::NAN;
        x[2 * heads * head_dim] = f32::INFINITY;
    }
    let x = [HostTensor::bf16(&shape, &x)];
    let of_core = [HostTensor::output(DType::Bf16, &shape)];
    let how = slice::from_ref(quantize);
    let what = format!("{shape:?}, heads of {head_dim}, seq {seq}");
    let backward: Op = ops::RopeBackward { forward: forward.clone() }.into();
    for (op, name) in [(Op::from(forward), "rope_quantize"), (backward, "rope_backward_quantize")] {
        check_fused_of_sequences(gpu, seq, &op, name, &x, &of_core, how, &what);
    }
}

/// Whole tiles and not, heads within a tile, across tiles and wider than one, every way to share
/// exponents along each axis.
fn check_all_quantized(gpu: &mut Gpu) {
    let format = |granularity| QuantFormat::MXFP8.with_granularity(granularity);
    let (fine, wide) = (format(Granularity::G32), format(Granularity::G128));
    for (rows, heads, head_dim, seq) in [
        (0, 2, 16, 4),
        (1, 1, 16, 1),
        (65, 3, 16, 13),
        (127, 3, 80, 127),
        (129, 1, 272, 43),
        (256, 4, 64, 64),
        (384, 3, 128, 96),
    ] {
        for format in [fine, wide] {
            let quantize = Quantize { format, axis: Axis::Both };
            check_quantized(gpu, &Case::new(rows, heads, head_dim, seq), &quantize);
        }
    }
    for (index, format) in specs().into_iter().enumerate() {
        let axis = [Axis::Row, Axis::Column, Axis::Both][index % 3];
        check_quantized(gpu, &Case::new(40, 2, 48, 20), &Quantize { format, axis });
    }
    for axis in [Axis::Row, Axis::Column] {
        for format in [fine, wide] {
            check_quantized(gpu, &Case::new(256, 4, 64, 128), &Quantize { format, axis });
        }
    }
}

trial!(turned_rows_are_quantized_on_their_way);
fn turned_rows_are_quantized_on_their_way() {
    let mut gpu = Gpu::open();
    check_all_quantized(&mut gpu);
    if gpu.runs(1, 0) {
        for (heads, head_dim) in [(32, 64), (4, 64), (32, 128)] {
            let format = QuantFormat::MXFP8.with_granularity(Granularity::G128);
            let quantize = Quantize { format, axis: Axis::Both };
            check_quantized(&mut gpu, &Case::new(4096, heads, head_dim, 2048), &quantize);
        }
    }
}

emulated! {
    rope_quantize on Sm90a: check_all_quantized
}
