//! Shared by the CPU kernels: views, element types, loops over rows, the GEMM.

pub(crate) mod add_bias;
pub(crate) mod arena;
pub mod element;
pub mod gemm;
pub(crate) mod gemm_output;
pub(crate) mod kernel;
pub(crate) mod operands;
pub(crate) mod parallel;
pub(crate) mod softmax;
#[cfg(test)]
pub(crate) mod test_support;
pub mod vector_math;

pub(crate) use kernel::CpuKernel;
