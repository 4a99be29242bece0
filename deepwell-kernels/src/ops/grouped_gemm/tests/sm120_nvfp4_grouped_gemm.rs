//! `sm120_nvfp4_grouped_gemm.cu`: the GEMMs of groups on tensor cores that apply scales of blocks,
//! with a tensor scale for each group.

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
    // With the rows that no group has, a row of wgrad's operands ends within a vector.
    case(&[130, 0, 100], 72).check_wgrad(&mut gpu, [136, 129]);
}

// More stages of K than the pipeline has; for wgrad, a group ends within a stage.
emulated! {
    sm120_nvfp4_grouped_gemm on Sm120a: |gpu| {
        for (behind, k) in [(128, 544), (72, 601)] {
            let case = case(&[130, 0, 580], behind);
            case.check_rows(gpu, GemmKind::Fprop, [264, k]);
            case.check_wgrad(gpu, [136, 264]);
        }
    }
}
