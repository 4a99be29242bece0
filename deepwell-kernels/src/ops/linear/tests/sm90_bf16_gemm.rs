//! `sm90_bf16_gemm.cu`: the three GEMMs of a linear layer on wgmma against their definition in f64.

use deepwell_ir::Tile;
use deepwell_kernels::cuda::Architecture;
use deepwell_trials::skip;

use crate::bf16_gemm::{check_not_finite, check_with};
use crate::gemm_operands::Kind;
use crate::harness::{Gpu, RunOptions};

/// All that the kernel has.
const TILES: [Tile; 4] = [
    Tile::new(128, 128, 64),
    Tile::new(256, 128, 64),
    Tile::new(128, 256, 64),
    Tile { cluster: [2, 1], ..Tile::new(128, 256, 64) },
];

/// Tokens, outputs, inputs for each tile: single, odd numbers of tokens, around the boxes of 64 and
/// the tiles of 128 and 256, and more K-blocks than the pipelines have stages.
const SIZES: &[(usize, usize, usize)] = &[
    (1, 8, 8),
    (3, 16, 24),
    (63, 72, 136),
    (127, 128, 64),
    (130, 264, 248),
    (257, 120, 520),
    (641, 136, 72),
    (72, 648, 640),
];

fn options(tile: Tile) -> RunOptions<'static> {
    RunOptions { kernel: Some("cuda_sm90_bf16_gemm"), tile: Some(tile), ..RunOptions::default() }
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = open();
    for tile in TILES {
        for &sizes in SIZES {
            check_with(&mut gpu, options(tile), sizes, Kind::Uniform);
        }
    }
}

trial!(gemms_of_large_matrices);
/// What no emulator runs: every SM has several tiles of long sums.
fn gemms_of_large_matrices() {
    let mut gpu = open();
    for (index, tile) in TILES.into_iter().enumerate() {
        let sizes = gpu.pick((1032, 2048 + 136 * index, 1096), (140, 136, 272));
        check_with(&mut gpu, options(tile), sizes, Kind::Integers);
    }
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = open();
    for tile in TILES {
        for kind in [Kind::Integers, Kind::Cancelling, Kind::WideRange] {
            check_with(&mut gpu, options(tile), (130, 136, 200), kind);
        }
        check_not_finite(&mut gpu, options(tile), 72);
    }
}

// Three tiles for each SM, whose stages are used more than twice in each of the three GEMMs: every
// wait sees both parities. The second tile of some clusters is beyond the result.
emulated! {
    sm90_bf16_gemm on Sm90a: |gpu| {
        for (tile, sizes) in TILES.into_iter().zip([
            (392, 392, 424),
            (776, 776, 328),
            (520, 520, 648),
            (520, 520, 648),
        ]) {
            check_with(gpu, options(tile), sizes, Kind::Uniform);
        }
    }
}
