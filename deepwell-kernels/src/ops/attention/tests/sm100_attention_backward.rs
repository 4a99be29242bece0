//! `sm100_attention_backward.cu`.

use deepwell_ir::DType;
use deepwell_ir::ops::AttentionBackward;
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, cases, document_cases, extended_cases};
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

emulated! {
    sm100_attention_backward on Sm100a: |gpu| {
        check(gpu, &Case::new([1, 400, 4, 2, 128], true, Data::Uniform(1.0)));
    }
}
