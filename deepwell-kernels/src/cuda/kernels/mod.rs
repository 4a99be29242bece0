//! The kernels: one file here for each `.cu` file, and one for each use of a library.

mod add;
mod support;

use super::spec::CudaKernelSpec;

/// Every kernel, preferred ones first within an op.
pub fn cuda_kernels() -> impl Iterator<Item = &'static CudaKernelSpec> {
    [add::SPECS].into_iter().flatten()
}
