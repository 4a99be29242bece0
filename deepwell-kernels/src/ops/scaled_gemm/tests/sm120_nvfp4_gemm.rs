//! `sm120_nvfp4_gemm.cu`: NVFP4 GEMMs on tensor cores that apply scales of blocks, against f64 sums
//! of the numbers that the operands stand for and, where sums are exact, to the bit.

use deepwell_trials::skip;

use crate::harness::Gpu;
use crate::sm90_dequantized_nvfp4_gemm::{FORMS, check_forms};
use crate::sm100_nvfp4_gemm::{case_of, check_bits};

const KERNEL: &str = "cuda_sm120_nvfp4_gemm";

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = Gpu::open();
    if gpu.target().arch != "blackwell-sm120" {
        skip("of sm_120");
    }
    for sizes in [
        [1, 1, 1],
        [3, 5, 31],
        [5, 3, 33],
        [127, 128, 127],
        [128, 129, 256],
        [129, 127, 288],
        [257, 40, 1056],
        [136, 264, 509],
    ] {
        check_forms(&mut gpu, case_of(KERNEL, None, sizes[2]), sizes, false, &FORMS);
    }
    // A scale that is NaN makes its row NaN, and no other.
    check_forms(&mut gpu, case_of(KERNEL, None, 45), [150, 24, 45], true, &FORMS);
    check_bits(&mut gpu, KERNEL, None, [130, 136, 288]);
}

// Three stages of K: the last is the first of the pipeline, which the result overwrites.
emulated! {
    sm120_nvfp4_gemm on Sm120a: |gpu| {
        for sizes in [[390, 264, 544], [260, 264, 601]] {
            check_forms(gpu, case_of(KERNEL, None, sizes[2]), sizes, true, &FORMS);
        }
    }
}
