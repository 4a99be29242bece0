//! `sm100_bf16_gemm.cu`: the three GEMMs of a linear layer on tcgen05 against their definition in
//! f64.

use deepwell_ir::Tile;

use crate::bf16_gemm::{check_not_finite, check_with};
use crate::gemm_operands::Kind;
use crate::harness::{Gpu, RunOptions};
use crate::tcgen05;

/// All that the kernel has.
const TILES: [Tile; 6] = [
    Tile::new(128, 128, 64),
    Tile::new(128, 256, 64),
    Tile::new(256, 128, 64),
    Tile::new(256, 256, 64),
    // Of two CTA pairs that share rows of `a`, or of `b`.
    Tile { cluster: [1, 2], ..Tile::new(256, 128, 64) },
    Tile { cluster: [2, 1], ..Tile::new(256, 256, 64) },
];

const KERNEL: &str = "cuda_sm100_bf16_gemm";

fn options(kernel: &'static str, tile: Tile) -> RunOptions<'static> {
    RunOptions { kernel: Some(kernel), tile: Some(tile), ..RunOptions::default() }
}

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

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = tcgen05::open();
    for tile in TILES {
        // Where tiles share, every other one: what lies beyond the result is computed, too.
        let step = tile.cluster.iter().product();
        for &sizes in SIZES.iter().step_by(step) {
            check_with(&mut gpu, options(KERNEL, tile), sizes, Kind::Uniform);
        }
    }
}

trial!(blocks_of_several_tiles);
/// Three tiles and more for each CTA of an emulated device with four SMs: accumulators and stages
/// are used again. Clusters of two tiles: the second of some is beyond the result.
fn blocks_of_several_tiles() {
    let mut gpu = tcgen05::open();
    // Of the emulator they are a row of the table.
    if gpu.runs(1, 0) {
        check_several_tiles(&mut gpu);
    }
}

pub(crate) fn check_several_tiles(gpu: &mut Gpu) {
    let sizes = [
        (392, 264, 392),
        (392, 520, 520),
        (520, 264, 392),
        (520, 520, 264),
        (264, 264, 520),
        // Each wait of all three GEMMs sees both parities, whoever hands out the tiles.
        (584, 264, 776),
    ];
    for (tile, sizes) in TILES.into_iter().zip(sizes) {
        check_with(gpu, options(KERNEL, tile), sizes, Kind::Uniform);
    }
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = tcgen05::open();
    for tile in TILES {
        for kind in [Kind::Integers, Kind::Cancelling, Kind::WideRange] {
            check_with(&mut gpu, options(KERNEL, tile), (130, 136, 200), kind);
        }
        check_not_finite(&mut gpu, options(KERNEL, tile), 72);
    }
}

emulated! {
    sm100_bf16_gemm on Sm100a: check_several_tiles
}

emulated! {
    sm100_bf16_gemm_fused on Sm100a: |gpu| {
        use crate::fused_gemm::{Operands, check_several_tiles};
        let [even, wide, tiny] = [Kind::Uniform, Kind::WideRange, Kind::Tiny].map(Operands::Bf16);
        check_several_tiles(gpu, even, &[wide, tiny, Operands::Bf16Infinite]);
    }
}
