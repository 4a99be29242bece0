//! `attention_part.cu`, `attention_part_backward.cu` and `merge_attention.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::{
    AttentionPart, AttentionPartBackward, KeySource, MergeAttention, PartPlaces, Zigzag,
};
use deepwell_kernels::ops::attention::oracle::{self, Forward, Shape};
use deepwell_kernels::ops::attention::oracle_part::{
    Part, backward, forward, merge, probabilities,
};
use rayon::prelude::*;

use crate::attention::{Case, Data, EMULATED_WORK, HALF_ULP, SLACK};
use crate::attention_backward::{backward_bounds, backward_bounds_of};
use crate::compare::assert_within;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// Origin of keys, and the places of queries and keys for a window.
pub(crate) type Keys = (KeySource, Option<PartPlaces>);

pub(crate) const SOURCES: [Keys; 3] =
    [(KeySource::Own, None), (KeySource::Earlier, None), (KeySource::Later, None)];

/// The keys of place `of` for queries of `place`, with places for windows.
fn keys_of(of: usize, place: usize, ranks: usize) -> Keys {
    let source = match of.cmp(&place) {
        std::cmp::Ordering::Equal => KeySource::Own,
        std::cmp::Ordering::Less => KeySource::Earlier,
        std::cmp::Ordering::Greater => KeySource::Later,
    };
    (source, Some(PartPlaces { queries: Zigzag { place, ranks }, keys: of }))
}

/// Chunks around tiles of keys (32, 64) and of queries (128), which begin and end within them.
pub(crate) fn cases() -> Vec<Case> {
    let random = Data::Uniform(1.0);
    let mut cases = vec![
        Case::new([1, 700, 4, 2, 128], true, random),
        Case::new([1, 1026, 4, 1, 64], true, Data::Uniform(4.0)),
        Case::new([3, 514, 6, 2, 64], true, random),
    ];
    for head_dim in [16, 32, 64, 128] {
        for seq in [2, 30, 62, 64, 66, 126, 128, 130, 194, 256, 258] {
            cases.push(Case::new([2, seq, 4, 2, head_dim], true, random));
        }
        cases.push(Case::new([1, 140, 3, 1, head_dim], true, Data::Rising));
        cases.push(Case::new([1, 140, 3, 1, head_dim], true, Data::Falling));
    }
    // In tiles of 64 and 128 elements.
    for head_dim in [8, 24, 72, 96] {
        for seq in [2, 66, 130, 258] {
            cases.push(Case::new([2, seq, 4, 2, head_dim], true, random));
        }
    }
    // Keys, values.
    for (head_dim, value_dim) in [(24, 16), (64, 128), (128, 64), (192, 128), (136, 72)] {
        for seq in [66, 130, 200] {
            cases.push(Case::new([2, seq, 4, 2, head_dim], true, random).values(value_dim));
        }
    }
    cases
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

/// The part with the sinks of a case, if the case has any: keys with these scores and zeros as
/// values.
fn with_sinks(case: &Case, part: Forward) -> Forward {
    let sinks = case.sink_scores();
    if sinks.is_empty() {
        return part;
    }
    let lse = case.shape.rows().map(|(_, head, _)| f64::from(sinks[head])).collect();
    let of_sinks = Forward { out: vec![0.0; part.out.len()], lse };
    merge(&case.shape, &[part, of_sinks])
}

fn check_forward(gpu: &mut Gpu, case: &Case, keys: Keys) {
    check_forward_with(gpu, case, keys, None);
}

/// By a kernel, if one is named.
pub(crate) fn check_forward_with(
    gpu: &mut Gpu,
    case: &Case,
    (keys, places): Keys,
    kernel: Option<&str>,
) {
    let [q, k, v, _] = case.inputs();
    let [q64, k64, v64] = [&q, &k, &v].map(HostTensor::to_f64);
    let of: Part<'_> = (&case.shape, keys, places);
    let expected = with_sinks(case, forward(of, &q64, &k64, &v64));
    let magnitudes: Vec<f64> = v64.iter().map(|v| v.abs()).collect();
    // Weights are rounded to BF16 before they are multiplied; the result is not.
    let weighted = with_sinks(case, forward(of, &q64, &k64, &magnitudes)).out;
    let bounds: Vec<f64> = weighted.iter().map(|weighted| SLACK * HALF_ULP * weighted).collect();
    let outputs = [
        HostTensor::output(DType::F32, &case.out_shape()),
        HostTensor::output(DType::F32, &case.lse_shape()),
    ];
    let options = RunOptions { kernel, seq: case.shape.seq, ..RunOptions::default() };
    let op = AttentionPart { heads: case.heads(), keys, places };
    let inputs: Vec<HostTensor> = [q, k, v].into_iter().chain(case.extra_inputs()).collect();
    let got = gpu.run_with(op, &inputs, &outputs, options);
    let name = format!("{keys:?} {places:?} {}", case.name());
    // Scores that follow from the place alone have the same few probabilities, see attention.rs.
    let bias = if matches!(case.data, Data::Uniform(_)) { 0.0 } else { 2f64.powi(-9) };
    let got_out = got[0].to_f64();
    let what = format!("{name}: out");
    crate::compare::assert_biased_within(&what, &got_out, &expected.out, &bounds, bias);
    let most = |x: &[f64]| x.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    let scores = case.shape.scale * case.shape.head_dim as f64 * most(&q64) * most(&k64)
        + f64::from(case.sinks.unwrap_or(0.0));
    let bounds = vec![(1.0 + scores) * 2f64.powi(-20); expected.lse.len()];
    assert_within(&format!("{name}: lse"), &got[1].to_f64(), &expected.lse, &bounds);
}

fn check_backward(gpu: &mut Gpu, case: &Case, keys: Keys) {
    check_backward_with(gpu, case, keys, RunOptions::default());
}

/// out and lse are those of attention to all keys of the case, without a mask.
pub(crate) fn check_backward_with(
    gpu: &mut Gpu,
    case: &Case,
    (keys, places): Keys,
    options: RunOptions<'_>,
) {
    let [q, k, v, dout] = case.inputs();
    let [q64, k64, v64, dout64] = [&q, &k, &v, &dout].map(HostTensor::to_f64);
    let sinks64: Vec<f64> = case.sink_scores().iter().map(|&x| x.into()).collect();
    let all = Case { shape: Shape { causal: false, window: None, ..case.shape }, ..*case };
    let whole = oracle::forward(&all.shape, &q64, &k64, &v64, &sinks64);
    let of: Part<'_> = (&case.shape, keys, places);
    let expected = backward(of, &dout64, [&q64, &k64, &v64], &whole);
    let rows: Vec<_> = case.shape.rows().zip(whole.lse.iter().copied()).collect();
    let bounds = backward_bounds_of(
        case,
        &whole.out,
        [&dout64, &q64, &k64, &v64, &[]],
        rows.par_iter().map(|&(row, lse)| (row, probabilities(of, &q64, &k64, lse, row), lse)),
    );
    let out = HostTensor::bf16(&case.out_shape(), &narrow(&whole.out));
    let lse = HostTensor::f32(&case.lse_shape(), &narrow(&whole.lse));
    let mut outputs = [case.query_shape(), case.key_shape(), case.value_shape()]
        .map(|shape| HostTensor::output(DType::F32, &shape))
        .to_vec();
    let options = RunOptions { seq: case.shape.seq, ..options };
    let op = AttentionPartBackward { heads: case.heads(), keys, places };
    let of_sinks = [case.shape.heads];
    let mut inputs = vec![dout, q, k, v, out, lse];
    inputs.extend(case.extra_inputs());
    if case.sinks.is_some() {
        outputs.push(HostTensor::output(DType::F32, &of_sinks));
    }
    let got = gpu.run_with(op, &inputs, &outputs, options);
    if case.sinks.is_some() {
        // Gradients of sinks follow from out and lse of all keys.
        let inputs = [&dout64[..], &q64, &k64, &v64];
        let [dout, q, k, v] = inputs;
        let dsinks = oracle::backward(&all.shape, dout, q, k, v, &sinks64).dsinks;
        let bounds = backward_bounds(&all, &whole.out, [dout, q, k, v, &sinks64]);
        let [.., bounds] = bounds;
        let bounds: Vec<f64> = bounds.iter().map(|bound| SLACK * bound + 1e-5).collect();
        assert_within(&format!("{}: dsinks", case.name()), &got[3].to_f64(), &dsinks, &bounds);
    }
    for (index, (what, expected)) in
        [("dq", expected.dq), ("dk", expected.dk), ("dv", expected.dv)].into_iter().enumerate()
    {
        // What nothing is seen of is zero to the bit.
        let bounds: Vec<f64> = bounds[index]
            .iter()
            .zip(&expected)
            .map(|(bound, value)| if *value == 0.0 { 0.0 } else { SLACK * bound + 1e-5 })
            .collect();
        let name = format!("{keys:?} {places:?} {}: {what}", case.name());
        assert_within(&name, &got[index].to_f64(), &expected, &bounds);
    }
}

trial!(attention_to_a_part_of_any_size);
fn attention_to_a_part_of_any_size() {
    let mut gpu = Gpu::open();
    for case in cases() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            SOURCES.into_iter().for_each(|keys| check_forward(&mut gpu, &case, keys));
        }
    }
}

trial!(gradients_of_a_part_of_any_size);
fn gradients_of_a_part_of_any_size() {
    let mut gpu = Gpu::open();
    for case in cases() {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            SOURCES.into_iter().for_each(|keys| check_backward(&mut gpu, &case, keys));
        }
    }
}

/// Windows within a chunk, over chunks of several ranks, and beyond the sequence; a rank's own
/// keys also with sinks. The first ranks of a ring see keys far behind and near.
fn windowed_cases() -> Vec<(Case, Keys)> {
    let mut cases = Vec::new();
    for (head_dim, seq, ranks, windows) in [
        (64, 66, 3, &[1, 20, 33, 40, 70, 1000][..]),
        (128, 130, 2, &[1, 30, 65, 100][..]),
        (192, 68, 2, &[20, 50][..]),
        (24, 30, 4, &[4, 31][..]),
    ] {
        for &window in windows {
            for (place, of) in (0..ranks).flat_map(|at| (0..ranks).map(move |of| (at, of))) {
                let case = Case::new([1, seq, 2, 1, head_dim], true, Data::Uniform(1.0));
                let case = case.values(if head_dim == 192 { 128 } else { head_dim });
                cases.push((case.window(window), keys_of(of, place, ranks)));
            }
        }
        let sunk = |window: Option<usize>| {
            let values = if head_dim == 192 { 128 } else { head_dim };
            let mut case = Case::new([2, seq, 4, 2, head_dim], true, Data::Uniform(1.0));
            case.shape.window = window;
            case.values(values).sinks(2.0)
        };
        cases.push((sunk(None), (KeySource::Own, None)));
        cases.push((sunk(Some(windows[1])), keys_of(1, 1, ranks)));
    }
    cases
}

trial!(parts_with_windows_and_sinks);
fn parts_with_windows_and_sinks() {
    let mut gpu = Gpu::open();
    for (case, keys) in windowed_cases() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_forward(&mut gpu, &case, keys);
        }
    }
}

trial!(gradients_of_parts_with_windows_and_sinks);
fn gradients_of_parts_with_windows_and_sinks() {
    let mut gpu = Gpu::open();
    for (case, keys) in windowed_cases() {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            check_backward(&mut gpu, &case, keys);
        }
    }
}

trial!(keys_that_are_not_seen_may_be_nan);
fn keys_that_are_not_seen_may_be_nan() {
    let mut gpu = Gpu::open();
    for head_dim in [16, 64, 96, 128] {
        for seq in [70, 130, 200] {
            // The first key of the second half is NaN, and a query of the first half.
            let case = Case::new([1, seq, 2, 1, head_dim], true, Data::Nan);
            check_forward(&mut gpu, &case, (KeySource::Earlier, None));
            check_forward(&mut gpu, &case, (KeySource::Own, None));
        }
    }
}

/// Parts of `count` sets of keys: lse uniform but for rows that see nothing, of every second part,
/// of all, and of all but the last.
fn parts(shape: &Shape, count: usize, size: f32) -> Vec<Forward> {
    let out = shape.batch * shape.seq * shape.heads * shape.value_dim();
    let rows = shape.batch * shape.heads * shape.seq;
    let part = |part: usize| {
        let wide = |values: Vec<f32>| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
        let mut lse = wide(uniform(rows, 10 + part as u64, size));
        for (row, lse) in lse.iter_mut().enumerate() {
            let is_blind = match row % 7 {
                1 => part % 2 == 1,
                3 => true,
                5 => part + 1 < count,
                _ => false,
            };
            if is_blind {
                *lse = f64::NEG_INFINITY;
            }
        }
        Forward { out: wide(uniform(out, 20 + part as u64, 1.0)), lse }
    };
    (0..count).map(part).collect()
}

fn check_merge(gpu: &mut Gpu, shape: &Shape, parts: &[Forward], dtype: DType) {
    let out_shape = [shape.batch * shape.seq, shape.heads * shape.value_dim()];
    let lse_shape = [shape.batch, shape.heads, shape.seq];
    let expected = merge(shape, parts);
    let inputs: Vec<HostTensor> = parts
        .iter()
        .flat_map(|part| {
            let out = HostTensor::f32(&out_shape, &narrow(&part.out));
            [out, HostTensor::f32(&lse_shape, &narrow(&part.lse))]
        })
        .collect();
    let outputs =
        [HostTensor::output(dtype, &out_shape), HostTensor::output(DType::F32, &lse_shape)];
    let options = RunOptions { seq: shape.seq, ..RunOptions::default() };
    let op = MergeAttention { heads: shape.heads, dtype };
    let got = gpu.run_with(op, &inputs, &outputs, options);
    let name = format!("{} parts, {shape:?}", parts.len());
    // Exponents up to 100 rounded to FP32, exponentials to two units, sums of so many terms.
    let relative = 2f64.powi(-17) * parts.len() as f64;
    let last = if dtype == DType::F32 { 0.0 } else { HALF_ULP };
    let bounds: Vec<f64> = expected.out.iter().map(|x| relative + last * x.abs()).collect();
    assert_within(&format!("{name}: out"), &got[0].to_f64(), &expected.out, &bounds);
    let bounds: Vec<f64> =
        expected.lse.iter().map(|x| 2f64.powi(-20) * (1.0 + x.abs().min(1e3))).collect();
    assert_within(&format!("{name}: lse"), &got[1].to_f64(), &expected.lse, &bounds);
}

trial!(parts_are_merged);
fn parts_are_merged() {
    let mut gpu = Gpu::open();
    for (batch, seq, heads, value_dim) in
        [(1, 0, 2, 8), (1, 1, 1, 4), (2, 6, 3, 12), (3, 34, 4, 64), (2, 130, 2, 128)]
    {
        let shape = Shape { batch, seq, heads, head_dim: value_dim, ..Shape::default() };
        for (count, size) in [(1, 1.0), (2, 4.0), (3, 30.0), (8, 50.0)] {
            for dtype in [DType::F32, DType::Bf16] {
                check_merge(&mut gpu, &shape, &parts(&shape, count, size), dtype);
            }
        }
    }
}

trial!(a_part_that_is_nan_is_not_lost);
fn a_part_that_is_nan_is_not_lost() {
    let mut gpu = Gpu::open();
    let shape = Shape { batch: 1, seq: 14, heads: 2, head_dim: 8, ..Shape::default() };
    for which in [0, 1] {
        let mut parts = parts(&shape, 2, 1.0);
        parts[which].lse[7] = f64::NAN;
        parts[which].out[shape.out(0, 7, 0)..][..8].fill(f64::NAN);
        check_merge(&mut gpu, &shape, &parts, DType::F32);
    }
}

/// Every width: twelve tiles of queries and more, some of which are not whole, five stages of keys.
fn emulated_cases() -> Vec<Case> {
    let case = |head_dim| Case::new([1, 264, 4, 1, head_dim], true, Data::Uniform(1.0));
    let mut cases: Vec<Case> = [16, 32, 48, 64, 96, 128].into_iter().map(case).collect();
    cases.extend([(64, 40), (128, 96), (192, 128)].map(|(keys, values)| case(keys).values(values)));
    cases
}

emulated! {
    attention_part on Sm100a: |gpu| {
        for case in emulated_cases() {
            SOURCES.into_iter().for_each(|keys| check_forward(gpu, &case, keys));
        }
    }
}

emulated! {
    attention_part_backward on Sm100a: |gpu| {
        for case in emulated_cases() {
            SOURCES.into_iter().for_each(|keys| check_backward(gpu, &case, keys));
        }
    }
}

emulated! {
    merge_attention on Sm100a: |gpu| {
        let shape = Shape { batch: 2, seq: 40, heads: 4, head_dim: 64, ..Shape::default() };
        for dtype in [DType::F32, DType::Bf16] {
            check_merge(gpu, &shape, &parts(&shape, 3, 8.0), dtype);
        }
    }
}
