//! `sm90_attention_backward_ordered.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::AttentionBackward;
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, ORDERS, cases};
use crate::attention_backward::check_backward_with;
use crate::harness::{Gpu, HostTensor, RunOptions};

const KERNEL: &str = "cuda_sm90_attention_backward_ordered";

fn check(gpu: &mut Gpu, case: &Case) {
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    check_backward_with(gpu, case, options);
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

trial!(ordered_gradients_of_any_size);
fn ordered_gradients_of_any_size() {
    let mut gpu = open();
    for case in cases().into_iter().filter(|case| case.shape.head_dim <= 64) {
        // Where one row is NaN, which gradients are depends on how keys are cut into tiles.
        if !matches!(case.data, Data::Nan) && gpu.runs(case.work(), EMULATED_WORK / 2) {
            check(&mut gpu, &case);
        }
    }
}

/// What no emulator runs: every SM has several tiles, of which it takes one when it is done with
/// another, and stages are used many times. Heads enough for both orders of tiles.
fn many_tiles() -> Vec<Case> {
    [
        ([8, 300, 24, 12, 64], true),
        ([4, 257, 24, 24, 48], false),
        ([1, 1031, 2, 1, 64], true),
        ([1, 2100, 2, 2, 64], true),
    ]
    .map(|(sizes, causal)| Case::new(sizes, causal, Data::Uniform(2.0)))
    .into()
}

trial!(ordered_gradients_of_many_tiles);
fn ordered_gradients_of_many_tiles() {
    let mut gpu = open();
    for case in many_tiles() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

trial!(ordered_gradients_are_the_same_each_time);
/// To the bit: the order in which CTAs add does not depend on when they come.
fn ordered_gradients_are_the_same_each_time() {
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

// Tiles for each SM, whose stages are used more than twice: every wait sees both parities. Both
// orders of tiles, and chains of four tiles.
emulated! {
    sm90_attention_backward_ordered on Sm90a: |gpu| {
        for (sizes, causal) in [
            ([1, 400, 3, 1, 64], true),
            ([1, 270, 2, 2, 64], true),
            ([2, 330, 2, 2, 48], false),
            ([2, 270, 2, 1, 64], false),
        ] {
            check(gpu, &Case::new(sizes, causal, Data::Uniform(1.0)));
        }
        for order in ORDERS {
            let case = Case::new([2, 70, 4, 2, 64], true, Data::Uniform(1.0));
            check(gpu, &case.heads_first(order));
        }
    }
}
