//! `sm120_nvfp4_grouped_gemm.cu`: the GEMMs of groups on tensor cores that apply scales of blocks in
//! `mma.sync`, with a tensor scale for each group.

use deepwell_ir::GemmKind;
use deepwell_trials::skip;

use crate::harness::Gpu;
use crate::nvfp4_grouped_gemm::{Case, block_scaled_share, check_all};

fn case(groups: &[usize], behind: usize) -> Case<'_> {
    let kernel = "cuda_sm120_nvfp4_grouped_gemm";
    Case { kernel, groups, behind, tile: None, share: block_scaled_share }
}

trial!(gemms_of_groups);
fn gemms_of_groups() {
    let mut gpu = Gpu::open();
    if gpu.target().arch != "blackwell-sm120" {
        skip("of sm_120");
    }
    check_all(&mut gpu, case(&[], 0), 1);
    // Rows that no group has make rows of gradients' operands of no whole vectors.
    case(&[130, 0, 100], 72).check_wgrad(&mut gpu, [136, 129]);
}

// More steps of K than stages, of which the first and the last belong to other groups.
emulated! {
    sm120_nvfp4_grouped_gemm on Sm120a: |gpu| {
        for (behind, k) in [(128, 544), (72, 601)] {
            let case = case(&[130, 0, 580], behind);
            case.check_rows(gpu, GemmKind::Fprop, [264, k]);
            case.check_wgrad(gpu, [136, 264]);
        }
    }
}
