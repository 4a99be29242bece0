//! `sm90_attention_backward_wide.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::AttentionBackward;
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, ORDERS};
use crate::attention_backward::check_backward_with;
use crate::harness::{Gpu, HostTensor, RunOptions};

const KERNEL: &str = "cuda_sm90_attention_backward_wide";

/// Widths of keys and values of each kernel.
const OWN_WIDTHS: [(usize, usize); 3] = [(192, 128), (192, 192), (256, 256)];
/// Narrower heads of each kernel, and heads whose keys and values are far apart.
const OTHER_WIDTHS: [(usize, usize); 5] = [(136, 8), (136, 136), (200, 200), (256, 64), (64, 200)];

/// Largest [`Case::work`] on the emulator: a head of 256 elements and 200 tokens.
const WIDE_WORK: usize = 3 * EMULATED_WORK;

fn options() -> RunOptions<'static> {
    RunOptions { kernel: Some(KERNEL), ..RunOptions::default() }
}

fn check(gpu: &mut Gpu, case: &Case) {
    check_backward_with(gpu, case, options());
}

fn random(sizes: [usize; 4], (head_dim, value_dim): (usize, usize), causal: bool) -> Case {
    let [batch, seq, heads, kv_heads] = sizes;
    let case = Case::new([batch, seq, heads, kv_heads, head_dim], causal, Data::Uniform(1.0));
    if value_dim == head_dim { case } else { case.values(value_dim) }
}

/// The same with a workspace for the score gradients of `key_heads` key heads: each pair of
/// launches is for so many heads.
fn check_by_turns(gpu: &mut Gpu, case: &Case, key_heads: usize) {
    const TILE_ROWS: usize = 128;
    let shape = &case.shape;
    let tiles = shape.seq.div_ceil(TILE_ROWS);
    let statistics = shape.batch * shape.heads * tiles * TILE_ROWS * 2 * size_of::<f32>();
    let stored = if shape.causal { tiles * (tiles + 1) / 2 } else { tiles * tiles };
    let head_bytes = stored * TILE_ROWS * TILE_ROWS * 2 * (shape.heads / shape.kv_heads);
    let workspace_bytes = Some(statistics + key_heads * head_bytes);
    check_backward_with(gpu, case, RunOptions { workspace_bytes, ..options() });
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

trial!(gradients_of_wide_heads_of_any_size);
/// Around tiles of 64 keys and 128 queries.
fn gradients_of_wide_heads_of_any_size() {
    let mut gpu = open();
    for widths in OWN_WIDTHS.into_iter().chain(OTHER_WIDTHS) {
        let most = if OWN_WIDTHS.contains(&widths) { WIDE_WORK } else { EMULATED_WORK };
        let mut cases = Vec::new();
        for seq in [1, 63, 64, 65, 127, 129, 200, 257] {
            cases.push(random([1, seq, 1, 1], widths, true));
            cases.push(random([2, seq, 4, 2], widths, true));
        }
        for seq in [1, 64, 65, 130, 200] {
            cases.push(random([1, seq, 1, 1], widths, false));
            cases.push(random([2, seq, 3, 1], widths, false));
        }
        for case in cases {
            if gpu.runs(case.work(), most) {
                check(&mut gpu, &case);
            }
        }
    }
}

trial!(keys_beyond_a_sequence_have_no_gradients);
/// All scores are so low that a key beyond the sequence, with a score of zero, would have an
/// infinite weight.
fn keys_beyond_a_sequence_have_no_gradients() {
    let mut gpu = open();
    for (widths, causal) in [((256, 256), false), ((192, 128), true)] {
        let case = random([1, 70, 1, 1], widths, causal);
        let filled = |shape: [usize; 2], value: f32| {
            HostTensor::bf16(&shape, &vec![value; shape.iter().product()])
        };
        let [q, k] = [8.0, -8.0].map(|value| filled(case.query_shape(), value));
        let [_, _, v, dout] = case.inputs();
        // A score is -64 sqrt(D), which exceeds what the logarithm of the number of keys adds.
        let lse = -64.0 * (widths.0 as f32).sqrt();
        let count = |row: usize| if causal { row + 1 } else { case.shape.seq };
        let lse: Vec<f32> = (0..case.shape.seq).map(|row| lse + (count(row) as f32).ln()).collect();
        let inputs =
            [dout.clone(), q, k, v, dout.clone(), HostTensor::f32(&case.lse_shape(), &lse)];
        let outputs = [case.query_shape(), case.key_shape(), case.value_shape()]
            .map(|shape| HostTensor::output(DType::Bf16, &shape));
        let options = RunOptions { seq: case.shape.seq, ..options() };
        let op = AttentionBackward { heads: case.heads() };
        let got = gpu.run_with(op, &inputs, &outputs, options);
        let name = case.name();
        for gradient in &got {
            assert!(gradient.to_f64().iter().all(|value| value.is_finite()), "{name}");
        }
        let sizes: f64 = got[2].to_f64().iter().map(|value| value.abs()).sum();
        assert!(sizes > 0.0, "{name}: dv is zero");
    }
}

trial!(gradients_of_wide_heads_with_hard_scores);
fn gradients_of_wide_heads_with_hard_scores() {
    let mut gpu = open();
    for head_dim in [192, 256] {
        for (causal, data) in [
            (true, Data::Flat),
            (false, Data::Rising),
            (true, Data::Falling),
            (false, Data::Uniform(64.0)),
        ] {
            let case = Case::new([1, 200, 2, 1, head_dim], causal, data);
            if gpu.runs(case.work(), 5 * WIDE_WORK / 3) {
                check(&mut gpu, &case);
            }
        }
    }
}

trial!(gradients_of_wide_heads_with_windows_sinks_and_documents);
fn gradients_of_wide_heads_with_windows_sinks_and_documents() {
    let mut gpu = open();
    for widths in [(256, 256), (192, 128), (144, 144)] {
        let of = |sizes| random(sizes, widths, true);
        let mut cases = Vec::new();
        // A token alone, and windows around tiles of keys and queries. Windows of a short part of
        // a sequence have bands of tiles in place of the triangle.
        for (seq, window) in [
            (1, 1),
            (130, 1),
            (200, 63),
            (200, 64),
            (200, 65),
            (260, 129),
            (260, 130),
            (257, 1000),
            (600, 33),
            (600, 130),
        ] {
            cases.push(of([1, seq, 1, 1]).window(window));
        }
        cases.push(of([2, 129, 4, 2]).sinks(2.0));
        cases.push(of([1, 133, 5, 1]).sinks(40.0));
        cases.push(random([1, 100, 2, 2], widths, false).sinks(1.0));
        cases.push(of([1, 200, 2, 1]).window(70).sinks(1.0));
        for documents in [&[1][..], &[63], &[64], &[65], &[1, 31, 96], &[130, 70]] {
            let leaked: &'static [usize] = documents.to_vec().leak();
            cases.push(of([1, 200, 1, 1]).documents(leaked));
        }
        cases.push(of([2, 100, 2, 2]).documents(&[5, 70]).window(20).sinks(1.0));
        for case in cases {
            if gpu.runs(case.work(), 5 * WIDE_WORK / 3) {
                check(&mut gpu, &case);
            }
        }
    }
}

/// What no emulator runs: every SM has several tiles, of which it takes one when it is done with
/// another, and stages are used many times.
fn many_tiles() -> Vec<Case> {
    vec![
        random([6, 270, 16, 16], (256, 256), true),
        random([4, 257, 24, 24], (192, 128), false),
        random([8, 300, 24, 12], (200, 200), true),
        random([1, 1031, 8, 1], (256, 256), true),
        random([1, 1031, 2, 2], (192, 128), true),
        random([1, 2100, 2, 2], (192, 192), false),
        random([2, 1500, 8, 2], (256, 256), true).window(300).sinks(1.0),
        random([1, 900, 8, 8], (192, 128), true).documents(&[250, 31, 1, 400]),
    ]
}

trial!(gradients_of_wide_heads_of_many_tiles);
fn gradients_of_wide_heads_of_many_tiles() {
    let mut gpu = open();
    for case in many_tiles() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

trial!(gradients_of_wide_heads_by_turns_of_heads);
fn gradients_of_wide_heads_by_turns_of_heads() {
    let mut gpu = open();
    for (sizes, widths, causal, key_heads) in [
        ([2, 130, 3, 3], (256, 256), true, 1),
        ([2, 130, 3, 3], (192, 128), false, 4),
        ([1, 200, 4, 2], (136, 136), true, 1),
    ] {
        let case = random(sizes, widths, causal);
        if gpu.runs(case.work(), 10 * WIDE_WORK) {
            check_by_turns(&mut gpu, &case, key_heads);
        }
    }
}

trial!(gradients_of_wide_heads_are_the_same_each_time);
/// To the bit: each gradient is summed by one CTA.
fn gradients_of_wide_heads_are_the_same_each_time() {
    let mut gpu = open();
    let small = random([1, 130, 2, 1], (256, 256), true);
    for case in many_tiles().into_iter().chain([small]) {
        if case.sinks.is_some() || !gpu.runs(case.work(), 3 * WIDE_WORK) {
            continue;
        }
        let [q, k, v, dout] = case.inputs();
        // Any output does.
        let out = dout.clone();
        let lse = HostTensor::f32(&case.lse_shape(), &vec![4.0; case.lse_shape().iter().product()]);
        let mut inputs = vec![dout, q, k, v, out, lse];
        inputs.extend(case.extra_inputs());
        let mut run = || {
            let outputs = [case.query_shape(), case.key_shape(), case.value_shape()]
                .map(|shape| HostTensor::output(DType::Bf16, &shape));
            let options = RunOptions { seq: case.shape.seq, ..options() };
            gpu.run_with(AttentionBackward { heads: case.heads() }, &inputs, &outputs, options)
        };
        let first: Vec<_> = run().iter().map(HostTensor::to_f64).collect();
        for _ in 0..8 {
            let again: Vec<_> = run().iter().map(HostTensor::to_f64).collect();
            assert!(first == again, "{}: differs from the first time", case.name());
        }
    }
}

// Tiles for each SM, whose stages are used more than twice: every wait sees both parities. The last
// queries of 700 tokens have eleven stages of keys.
emulated! {
    sm90_attention_backward_wide on Sm90a: |gpu| {
        for widths in OWN_WIDTHS {
            check(gpu, &random([1, 700, 2, 1], widths, true));
            check(gpu, &random([2, 130, 2, 2], widths, false));
            check(gpu, &random([1, 700, 1, 1], widths, true).documents(&[670, 30]));
            check(gpu, &random([1, 330, 4, 2], widths, true).window(100).sinks(2.0));
        }
        for (order, widths) in ORDERS.into_iter().zip(OWN_WIDTHS) {
            check(gpu, &random([2, 70, 4, 2], widths, true).heads_first(order));
        }
        check_by_turns(gpu, &random([1, 150, 4, 4], (256, 256), true), 3);
    }
}
