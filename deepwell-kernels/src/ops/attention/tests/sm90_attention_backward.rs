//! `sm90_attention_backward.cu`.

use deepwell_ir::Tile;
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::attention::{Case, Data, EMULATED_WORK, ORDERS, cases, document_cases, extended_cases};
use crate::attention_backward::check_backward_with;
use crate::harness::{Gpu, RunOptions};

const KERNEL: &str = "cuda_sm90_attention_backward";

/// Queries that are streamed past keys, keys past queries, and elements of a head: what there is
/// beside the preferred tiles.
const OTHER_TILES: [(usize, usize, usize); 2] = [(64, 64, 64), (64, 128, 128)];

fn check(gpu: &mut Gpu, case: &Case) {
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    check_backward_with(gpu, case, options);
}

fn check_tile(gpu: &mut Gpu, case: &Case, (queries, keys, head_dim): (usize, usize, usize)) {
    let tile = Some(Tile::new(queries, keys, head_dim));
    let options = RunOptions { kernel: Some(KERNEL), tile, ..RunOptions::default() };
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

trial!(gradients_of_any_size);
fn gradients_of_any_size() {
    let mut gpu = open();
    for case in cases() {
        // Where one row is NaN, which gradients are depends on how keys are cut into tiles.
        if !matches!(case.data, Data::Nan) && gpu.runs(case.work(), EMULATED_WORK / 2) {
            check(&mut gpu, &case);
        }
    }
}

trial!(gradients_with_windows_sinks_and_documents);
fn gradients_with_windows_sinks_and_documents() {
    let mut gpu = open();
    let is_taken = |case: &Case| case.shape.value_dim() == case.shape.head_dim;
    let extended = extended_cases().into_iter().filter(is_taken);
    for case in extended.chain(document_cases(&[16, 64, 96, 128])) {
        if gpu.runs(case.work(), EMULATED_WORK / 2) {
            check(&mut gpu, &case);
        }
    }
}

trial!(gradients_by_every_tile);
fn gradients_by_every_tile() {
    let mut gpu = open();
    for tile in OTHER_TILES {
        for seq in [1, 63, 65, 129, 200, 257] {
            for causal in [true, false] {
                let case = Case::new([2, seq, 4, 2, tile.2], causal, Data::Uniform(1.0));
                if gpu.runs(case.work(), EMULATED_WORK / 4) {
                    check_tile(&mut gpu, &case, tile);
                }
            }
        }
    }
}

trial!(gradients_of_many_tiles);
/// What no emulator runs: every SM has several tiles, of which it takes one when it is done with
/// another, and stages are used many times.
fn gradients_of_many_tiles() {
    let mut gpu = open();
    for (sizes, causal) in [
        ([8, 300, 24, 12, 64], true),
        ([6, 270, 16, 16, 128], true),
        ([4, 257, 24, 24, 96], false),
        ([1, 1031, 2, 1, 128], true),
    ] {
        let case = Case::new(sizes, causal, Data::Uniform(2.0));
        if gpu.runs(case.work(), EMULATED_WORK) {
            check(&mut gpu, &case);
        }
    }
}

// Tiles for each SM, whose stages are used more than twice: every wait sees both parities.
emulated! {
    sm90_attention_backward on Sm90a: |gpu| {
        for (sizes, causal) in [
            ([1, 400, 3, 1, 64], true),
            ([2, 330, 2, 2, 48], false),
            ([1, 400, 4, 2, 96], true),
            ([1, 400, 4, 2, 128], true),
            ([2, 270, 2, 1, 128], false),
        ] {
            check(gpu, &Case::new(sizes, causal, Data::Uniform(1.0)));
        }
        for head_dim in [64, 96, 128] {
            let case = || Case::new([1, 400, 4, 2, head_dim], true, Data::Uniform(1.0));
            check(gpu, &case().documents(&[130, 70, 1, 199]));
            check(gpu, &case().documents(&[250, 150]).window(140).sinks(2.0));
        }
        for (order, head_dim) in ORDERS.into_iter().zip([64, 128, 96]) {
            let case = || Case::new([2, 70, 4, 2, head_dim], true, Data::Uniform(1.0));
            check(gpu, &case().heads_first(order));
            check(gpu, &case().heads_first(order).documents(&[30, 40]).sinks(1.0));
        }
        for tile in OTHER_TILES {
            let case = || Case::new([1, 400, 4, 1, tile.2], true, Data::Uniform(1.0));
            check_tile(gpu, &case(), tile);
            check_tile(gpu, &case().documents(&[130, 200]), tile);
        }
    }
}
