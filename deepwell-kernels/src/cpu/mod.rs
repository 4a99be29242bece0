//! The CPU backend and the code that its kernels share; each kernel is in the folder of its op.

pub(crate) mod arena;
mod backend;
pub(crate) mod calls;
pub mod element;
pub mod gemm;
pub(crate) mod parallel;
pub(crate) mod softmax;
mod specs;
#[cfg(test)]
pub(crate) mod test_support;
pub mod vector_math;

pub use backend::CpuBackend;
pub use specs::{CpuCatalog, CpuKernelSpec, cpu_kernels, cpu_target, tier_feature};
pub(crate) use specs::{CpuKernel, serves};
