//! What the tests of kernels on tcgen05 share.

use crate::harness::Gpu;

/// Whether the GPU has tcgen05; a line on stderr where not.
pub(crate) fn is_served(gpu: &Gpu) -> bool {
    let served = ["blackwell-sm100", "blackwell-sm103"].contains(&gpu.target().arch.as_str());
    if !served {
        eprintln!("skipped: of sm_100 and sm_103");
    }
    served
}
