//! `sm90_attention_part.cu`, `sm90_attention_part_backward.cu` and
//! `sm90_attention_part_backward_stored.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::{AttentionPartBackward, KeySource};
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK};
use crate::attention_part::{self, SOURCES, check_backward_with, check_forward_with};
use crate::harness::{Gpu, HostTensor, RunOptions};

const FORWARD: &str = "cuda_sm90_attention_part";
const BACKWARD: &str = "cuda_sm90_attention_part_backward";
const STORED: &str = "cuda_sm90_attention_part_backward_stored";
/// Heads of at most this width are not for the kernel that stores score gradients.
const NARROW: usize = 64;

fn check_forward(gpu: &mut Gpu, case: &Case) {
    SOURCES.into_iter().for_each(|keys| check_forward_with(gpu, case, keys, Some(FORWARD)));
}

fn check_backward(gpu: &mut Gpu, case: &Case, kernel: &str) {
    for keys in SOURCES {
        let options = RunOptions { kernel: Some(kernel), ..RunOptions::default() };
        check_backward_with(gpu, case, keys, options);
    }
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

/// Odd lengths, and chunks that begin and end in every place of tiles of 64, 128 and 192.
fn cases() -> Vec<Case> {
    let mut cases = attention_part::cases();
    cases
        .retain(|case| case.shape.head_dim <= 128 && case.shape.value_dim() == case.shape.head_dim);
    for head_dim in [64, 96, 128] {
        for seq in [3, 67, 127, 129, 255, 257, 383, 385] {
            cases.push(Case::new([2, seq, 4, 2, head_dim], true, Data::Uniform(1.0)));
        }
    }
    cases
}

trial!(parts_on_wgmma_of_any_size);
fn parts_on_wgmma_of_any_size() {
    let mut gpu = open();
    for case in cases() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_forward(&mut gpu, &case);
        }
    }
}

trial!(gradients_of_parts_on_wgmma_of_any_size);
fn gradients_of_parts_on_wgmma_of_any_size() {
    let mut gpu = open();
    for case in cases() {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            check_backward(&mut gpu, &case, BACKWARD);
            if case.shape.head_dim > NARROW {
                check_backward(&mut gpu, &case, STORED);
            }
        }
    }
}

trial!(half_of_a_single_token_is_no_key);
fn half_of_a_single_token_is_no_key() {
    let mut gpu = open();
    for head_dim in [64, 96, 128] {
        let case = Case::new([2, 1, 4, 2, head_dim], true, Data::Uniform(1.0));
        let keys = (KeySource::Earlier, None);
        check_forward_with(&mut gpu, &case, keys, Some(FORWARD));
        for kernel in [BACKWARD, STORED] {
            if kernel == BACKWARD || head_dim > NARROW {
                let options = RunOptions { kernel: Some(kernel), ..RunOptions::default() };
                check_backward_with(&mut gpu, &case, keys, options);
            }
        }
    }
}

trial!(unseen_keys_of_parts_on_wgmma_may_be_nan);
fn unseen_keys_of_parts_on_wgmma_may_be_nan() {
    let mut gpu = open();
    for head_dim in [16, 64, 96, 128] {
        for seq in [70, 130, 200] {
            // The first key of the second half is NaN, and a query of the first half.
            let case = Case::new([1, seq, 2, 1, head_dim], true, Data::Nan);
            check_forward_with(&mut gpu, &case, (KeySource::Earlier, None), Some(FORWARD));
            check_forward_with(&mut gpu, &case, (KeySource::Own, None), Some(FORWARD));
        }
    }
}

/// What no emulator runs: every SM has several tiles, and stages are used many times.
fn many_tiles() -> Vec<Case> {
    [
        [8, 300, 24, 12, 64],
        [6, 270, 16, 16, 128],
        [4, 257, 24, 24, 96],
        [1, 1031, 2, 1, 128],
        [2, 2100, 8, 1, 64],
    ]
    .map(|sizes| Case::new(sizes, true, Data::Uniform(2.0)))
    .into()
}

trial!(parts_of_many_tiles);
fn parts_of_many_tiles() {
    let mut gpu = open();
    for case in many_tiles() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_forward(&mut gpu, &case);
            check_backward(&mut gpu, &case, BACKWARD);
            if case.shape.head_dim > NARROW {
                check_backward(&mut gpu, &case, STORED);
            }
        }
    }
}

trial!(gradients_of_parts_are_the_same_each_time);
/// To the bit: each gradient is summed by one CTA.
fn gradients_of_parts_are_the_same_each_time() {
    let mut gpu = open();
    for case in many_tiles() {
        if !gpu.runs(case.work(), EMULATED_WORK) {
            continue;
        }
        let [q, k, v, dout] = case.inputs();
        // Any output does.
        let out = dout.clone();
        let lse = HostTensor::f32(&case.lse_shape(), &vec![4.0; case.lse_shape().iter().product()]);
        let inputs = [dout, q, k, v, out, lse];
        let is_wide = case.shape.head_dim > NARROW;
        for (kernel, keys) in [BACKWARD, STORED]
            .into_iter()
            .filter(|kernel| is_wide || *kernel == BACKWARD)
            .flat_map(|kernel| SOURCES.map(|keys| (kernel, keys)))
        {
            let mut run = || {
                let outputs = [case.query_shape(), case.key_shape(), case.key_shape()]
                    .map(|shape| HostTensor::output(DType::F32, &shape));
                let seq = case.shape.seq;
                let options = RunOptions { kernel: Some(kernel), seq, ..RunOptions::default() };
                let op = AttentionPartBackward { heads: case.heads(), keys: keys.0, places: None };
                gpu.run_with(op, &inputs, &outputs, options)
            };
            let first: Vec<_> = run().iter().map(HostTensor::to_f64).collect();
            for _ in 0..8 {
                let again: Vec<_> = run().iter().map(HostTensor::to_f64).collect();
                assert!(first == again, "{kernel} {keys:?} {}: differs", case.name());
            }
        }
    }
}

/// Bytes of a workspace for the score gradients of `key_heads` key heads.
fn stored_bytes(case: &Case, keys: KeySource, key_heads: usize) -> usize {
    const TILE_ROWS: usize = 128;
    let shape = &case.shape;
    let half = shape.seq / 2;
    let (queries, seen) = match keys {
        KeySource::Own => (shape.seq, shape.seq),
        KeySource::Earlier => (shape.seq, half),
        KeySource::Later => (shape.seq - half, shape.seq),
    };
    let [queries, seen] = [queries, seen].map(|tokens: usize| tokens.div_ceil(TILE_ROWS));
    let tiles = if keys == KeySource::Own { seen * (seen + 1) / 2 } else { queries * seen };
    let statistics = shape.batch * shape.heads * queries * TILE_ROWS * 2 * size_of::<f32>();
    let group = shape.heads / shape.kv_heads;
    statistics + key_heads * tiles * TILE_ROWS * TILE_ROWS * 2 * group
}

fn check_by_turns(gpu: &mut Gpu, case: &Case, key_heads: usize) {
    for keys in SOURCES {
        let workspace_bytes = Some(stored_bytes(case, keys.0, key_heads));
        let options = RunOptions { kernel: Some(STORED), workspace_bytes, ..RunOptions::default() };
        check_backward_with(gpu, case, keys, options);
    }
}

trial!(gradients_of_parts_by_turns_of_heads);
fn gradients_of_parts_by_turns_of_heads() {
    let mut gpu = open();
    for (sizes, key_heads) in
        [([2, 200, 3, 3, 128], 1), ([2, 200, 3, 3, 128], 4), ([1, 257, 4, 2, 96], 1)]
    {
        let case = Case::new(sizes, true, Data::Uniform(1.0));
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_by_turns(&mut gpu, &case, key_heads);
        }
    }
}

// Tiles for each SM, whose stages are used more than twice: every wait sees both parities. Halves
// end within tiles.
emulated! {
    sm90_attention_part on Sm90a: |gpu| {
        for head_dim in [64, 88, 128] {
            check_forward(gpu, &Case::new([1, 530, 4, 1, head_dim], true, Data::Uniform(4.0)));
        }
    }
}

emulated! {
    sm90_attention_part_backward on Sm90a: |gpu| {
        let case = |sizes| Case::new(sizes, true, Data::Uniform(1.0));
        check_backward(gpu, &case([1, 530, 4, 2, 64]), BACKWARD);
        check_backward(gpu, &case([2, 393, 2, 1, 48]), BACKWARD);
        check_backward(gpu, &case([1, 530, 4, 2, 96]), BACKWARD);
        check_backward(gpu, &case([1, 530, 3, 3, 128]), BACKWARD);
    }
}

emulated! {
    sm90_attention_part_backward_stored on Sm90a: |gpu| {
        for sizes in [[1, 530, 4, 2, 128], [2, 393, 2, 1, 88]] {
            check_backward(gpu, &Case::new(sizes, true, Data::Uniform(1.0)), STORED);
        }
        check_by_turns(gpu, &Case::new([1, 270, 4, 4, 128], true, Data::Uniform(1.0)), 3);
    }
}
