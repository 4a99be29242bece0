//! What tests on emulated GPUs need: kernels that were compiled.

use deepwell_kernels::cuda::KernelImages;
use deepwell_trials::skip;

/// Skips the test where an architecture's kernels were not compiled.
pub(crate) fn need_kernels(capability: (u32, u32)) {
    if let Err(error) = KernelImages::discover().into_ptx().image("add", capability) {
        let required = std::env::var_os("DEEPWELL_REQUIRE_PTX").is_some();
        assert!(!required, "DEEPWELL_REQUIRE_PTX is set: {error}");
        skip(error.to_string());
    }
}
