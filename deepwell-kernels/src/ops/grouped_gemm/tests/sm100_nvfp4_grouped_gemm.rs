//! `sm100_nvfp4_grouped_gemm.cu`: the GEMMs of groups on tcgen05, with a tensor scale for each
//! group.

use deepwell_ir::{GemmKind, Tile};

use crate::nvfp4_grouped_gemm::{Case, block_scaled_share, check_all};
use crate::tcgen05;

fn case(groups: &[usize], (m, n): (usize, usize)) -> Case<'_> {
    Case {
        kernel: "cuda_sm100_nvfp4_grouped_gemm",
        groups,
        behind: 128,
        tile: Some(Tile::new(m, n, 256)),
        share: block_scaled_share,
    }
}

trial!(gemms_of_groups);
fn gemms_of_groups() {
    let mut gpu = tcgen05::open();
    for tile in [(128, 128), (128, 256), (256, 128), (256, 256)] {
        check_all(&mut gpu, case(&[], tile), 32);
    }
}

// Stages and accumulators are used again; groups have all rows of a tile, of a part of a pair's
// tile, or none; their K begins and ends within stages.
emulated! {
    sm100_nvfp4_grouped_gemm on Sm100a: |gpu| {
        for (tile, groups, [columns, k]) in [
            ((128, 128), &[384, 0, 512, 128][..], [264, 416]),
            ((128, 256), &[384, 0, 512, 128], [520, 672]),
            ((256, 128), &[384, 0, 768, 128], [264, 544]),
            ((256, 256), &[384, 0, 768, 128], [520, 800]),
        ] {
            let case = case(groups, tile);
            case.check_rows(gpu, GemmKind::Fprop, [columns, k]);
            case.check_rows(gpu, GemmKind::Dgrad, [columns - 1, 96]);
            case.check_wgrad(gpu, [columns, 264]);
        }
    }
}
