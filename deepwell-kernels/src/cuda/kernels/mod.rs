//! The kernels: one file here for each `.cu` file, and one for each use of a library.

mod add;
mod attention;
mod bf16_gemm;
mod cast;
mod embedding;
mod mx;
mod products;
mod quantize;
mod rope;
mod support;
mod swiglu;

use super::spec::CudaKernelSpec;

/// Every kernel, preferred ones first within an op.
pub fn cuda_kernels() -> impl Iterator<Item = &'static CudaKernelSpec> {
    [
        add::SPECS,
        attention::SPECS,
        bf16_gemm::SPECS,
        cast::SPECS,
        embedding::SPECS,
        quantize::SPECS,
        rope::SPECS,
        swiglu::SPECS,
    ]
    .into_iter()
    .flatten()
}
