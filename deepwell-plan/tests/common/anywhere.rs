//! Kernels that a plan for a GPU may choose where there is none.

use deepwell_ir::{Call, KernelCatalog, KernelRequest, NoKernel, Selection, Target};

use crate::common::{Kernels, target};

/// The kernels of a processor for a device.
pub(crate) struct Anywhere;

impl KernelCatalog for Anywhere {
    fn select(&self, request: &KernelRequest<'_>, _: &Target) -> Result<Selection, NoKernel> {
        Kernels.select(request, &target())
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        Kernels.predicted_s(request, target)
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        Kernels.fixed_overhead_bytes(target, calls)
    }
}
