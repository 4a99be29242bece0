//! `sm100_attention_backward.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::AttentionBackward;
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, ORDERS, cases, document_cases, extended_cases};
use crate::attention_backward::check_backward_with;
use crate::harness::{Gpu, HostTensor, RunOptions};

const KERNEL: &str = "cuda_sm100_attention_backward";
/// Rows of a tile.
const TILE_ROWS: usize = 128;

fn check(gpu: &mut Gpu, case: &Case) {
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    check_backward_with(gpu, case, options);
}

/// The same with a workspace for the score gradients of `key_heads` key heads: each pair of
/// launches is for so many heads.
fn check_by_turns(gpu: &mut Gpu, case: &Case, key_heads: usize) {
    let shape = &case.shape;
    let tiles = shape.seq.div_ceil(TILE_ROWS);
    let statistics = shape.batch * shape.heads * tiles * TILE_ROWS * 2 * size_of::<f32>();
    let stored = if shape.causal { tiles * (tiles + 1) / 2 } else { tiles * tiles };
    let head_bytes = stored * TILE_ROWS * TILE_ROWS * 2 * (shape.heads / shape.kv_heads);
    let workspace_bytes = Some(statistics + key_heads * head_bytes);
    let options = RunOptions { kernel: Some(KERNEL), workspace_bytes, ..RunOptions::default() };
    check_backward_with(gpu, case, options);
}

/// The GPU, if it has tcgen05; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    let has = [Architecture::Sm100a, Architecture::Sm103a]
        .iter()
        .any(|architecture| gpu.target().arch == architecture.target_name());
    if !has {
        skip("of sm_100");
    }
    gpu
}

trial!(gradients_on_tcgen05_of_any_size);
fn gradients_on_tcgen05_of_any_size() {
    let mut gpu = open();
    for case in cases() {
        // Where one row is NaN, which gradients are depends on how keys are cut into tiles.
        if !matches!(case.data, Data::Nan) && gpu.runs(case.work(), EMULATED_WORK / 2) {
            check(&mut gpu, &case);
        }
    }
}

trial!(gradients_on_tcgen05_with_windows_sinks_and_documents);
fn gradients_on_tcgen05_with_windows_sinks_and_documents() {
    let mut gpu = open();
    let is_taken = |case: &Case| case.shape.value_dim() == case.shape.head_dim;
    let extended = extended_cases().into_iter().filter(is_taken);
    for case in extended.chain(document_cases(&[16, 64, 96, 128])) {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            check(&mut gpu, &case);
        }
    }
}

trial!(gradients_on_tcgen05_are_the_same_each_time);
/// To the bit: each gradient is summed by one CTA.
fn gradients_on_tcgen05_are_the_same_each_time() {
    let mut gpu = open();
    for case in every_kernel().filter(|case| case.extra_inputs().is_empty()) {
        if !gpu.runs(case.work(), EMULATED_WORK / 16) {
            continue;
        }
        let [q, k, v, dout] = case.inputs();
        // Any output does.
        let out = dout.clone();
        let lse = HostTensor::f32(&case.lse_shape(), &vec![4.0; case.lse_shape().iter().product()]);
        let inputs = [dout, q, k, v, out, lse];
        let mut run = || {
            let outputs = [case.query_shape(), case.key_shape(), case.key_shape()]
                .map(|shape| HostTensor::output(DType::Bf16, &shape));
            let options =
                RunOptions { kernel: Some(KERNEL), seq: case.shape.seq, ..RunOptions::default() };
            gpu.run_with(AttentionBackward { heads: case.heads() }, &inputs, &outputs, options)
        };
        let first: Vec<_> = run().iter().map(HostTensor::to_f64).collect();
        for _ in 0..8 {
            let again: Vec<_> = run().iter().map(HostTensor::to_f64).collect();
            assert!(first == again, "{}: differs from the first time", case.name());
        }
    }
}

/// Every kernel, with tiles for each SM and stages that are used more than twice, so that every
/// wait sees both parities: 12 blocks of queries for a tile of keys, and 12 stages for a pair of
/// tiles of queries; windows and documents that begin within tiles and skip some, and windows whose
/// stored tiles wrap around.
fn every_kernel() -> impl Iterator<Item = Case> {
    [64, 96, 128].into_iter().flat_map(|head_dim| {
        let of = |sizes: [usize; 4], causal| {
            let [batch, seq, heads, kv_heads] = sizes;
            Case::new([batch, seq, heads, kv_heads, head_dim], causal, Data::Uniform(1.0))
        };
        [
            of([1, 700, 2, 1], true),
            of([1, 270, 6, 2], false),
            of([1, 400, 4, 2], true).documents(&[130, 70, 1, 199]),
            of([1, 700, 2, 1], true).documents(&[250, 450]).window(140).sinks(2.0),
            of([1, 900, 2, 1], true).window(130),
            of([2, 260, 2, 2], false).sinks(1.0),
        ]
    })
}

/// Lengths around tiles, their halves and stages, windows around tiles, and heads narrower than a
/// kernel.
fn edges() -> impl Iterator<Item = Case> {
    let lengths = [0, 1, 2, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257];
    let of_length = lengths.into_iter().enumerate().map(|(index, seq)| {
        let head_dim = [64, 128, 96][index % 3];
        Case::new([2, seq, 4, 2, head_dim], index % 2 == 0, Data::Uniform(1.0))
    });
    let windows = [1, 2, 63, 64, 65, 127, 128, 129].into_iter().enumerate();
    let of_window = windows.map(|(index, window)| {
        let head_dim = [128, 64, 96][index % 3];
        Case::new([1, 520, 2, 1, head_dim], true, Data::Uniform(1.0)).window(window)
    });
    let narrow = [8, 56, 72, 88, 104, 120]
        .map(|head_dim| Case::new([1, 130, 2, 1, head_dim], true, Data::Uniform(1.0)));
    // Empty tiles in a row beside tiles with keys of one document.
    let documents = [&[1, 127, 300, 1, 91][..], &[128, 128, 264], &[390, 130]];
    let of_documents = documents.into_iter().enumerate().map(|(index, lengths)| {
        let head_dim = [128, 64, 96][index];
        Case::new([1, 520, 2, 1, head_dim], true, Data::Uniform(1.0)).documents(lengths)
    });
    of_length.chain(of_window).chain(narrow).chain(of_documents)
}

/// Equal scores, scores far apart, and scores of a standard deviation of 8 and above.
fn hard_scores() -> impl Iterator<Item = Case> {
    let data = [Data::Flat, Data::Rising, Data::Falling, Data::Uniform(24.0), Data::Uniform(64.0)];
    let around = data.into_iter().enumerate().flat_map(|(index, data)| {
        [64, 128].map(|head_dim| Case::new([1, 300, 2, 1, head_dim], index % 2 == 0, data))
    });
    // A single key, of scores so low that weights of keys beyond the sequence would be infinite.
    let low =
        [64, 128].map(|head_dim| Case::new([2, 1, 8, 2, head_dim], false, Data::Uniform(800.0)));
    around.chain(low)
}

emulated! {
    sm100_attention_backward on Sm100a: |gpu| {
        every_kernel().chain(edges()).chain(hard_scores()).for_each(|case| check(gpu, &case));
        for (order, head_dim) in ORDERS.into_iter().zip([64, 128, 96]) {
            let case = Case::new([2, 70, 4, 2, head_dim], true, Data::Uniform(1.0));
            check(gpu, &case.heads_first(order));
        }
        for (sizes, causal, key_heads) in [
            ([2, 200, 3, 3, 128], true, 1),
            ([2, 200, 3, 3, 64], false, 4),
            ([1, 257, 8, 4, 96], true, 3),
        ] {
            check_by_turns(gpu, &Case::new(sizes, causal, Data::Uniform(1.0)), key_heads);
        }
    }
}
