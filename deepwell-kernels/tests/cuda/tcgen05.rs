//! What the tests of kernels on tcgen05 share.

use deepwell_trials::skip;

use crate::harness::Gpu;

/// The GPU, if it has tcgen05; other tests are skipped.
pub(crate) fn open() -> Gpu {
    let gpu = Gpu::open();
    if !["blackwell-sm100", "blackwell-sm103"].contains(&gpu.target().arch.as_str()) {
        skip("of sm_100 and sm_103");
    }
    gpu
}
