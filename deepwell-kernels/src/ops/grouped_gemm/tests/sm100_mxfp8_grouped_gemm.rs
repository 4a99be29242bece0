//! `sm100_mxfp8_grouped_gemm.cu`: the GEMMs of groups on tcgen05 against f64 sums of the values of
//! their operands, by the cases of `mxfp8_grouped_gemm.cu`.

use deepwell_ir::Tile;
use deepwell_precision::QuantFormat;

use crate::mx::MxKind;
use crate::mxfp8_grouped_gemm::{Case, check_hard};
use crate::tcgen05;

const KERNEL: &str = "cuda_sm100_mxfp8_grouped_gemm";

/// Outputs and inputs, each a contraction, too, which tensor copies take in multiples of 16.
const SIZES: [[usize; 2]; 4] = [[48, 96], [32, 48], [144, 272], [48, 160]];

trial!(gemms_of_groups);
fn gemms_of_groups() {
    let mut gpu = tcgen05::open();
    for (m, n) in [(128, 128), (128, 256), (256, 128), (256, 256)] {
        // Tensor copies take no empty matrix.
        check_hard(&mut gpu, KERNEL, Some(Tile::new(m, n, 128)), SIZES, 32);
    }
}

// Stages and accumulators are used again; groups begin and end anywhere within tiles and stages,
// have all rows of one, or none.
emulated! {
    sm100_mxfp8_grouped_gemm on Sm100a: |gpu| {
        for ((m, n), groups, sizes) in [
            ((128, 128), &[416, 0, 544, 32][..], [272, 400]),
            ((128, 256), &[416, 0, 544, 32], [528, 656]),
            ((256, 128), &[416, 0, 736, 32], [272, 528]),
            ((256, 256), &[416, 0, 736, 32], [528, 656]),
        ] {
            let (spec, kind) = (QuantFormat::MXFP8, MxKind::Even);
            let tile = Some(Tile::new(m, n, 128));
            Case { groups, behind: 96, sizes, spec, kind, kernel: KERNEL, tile }.check(gpu);
        }
    }
}
