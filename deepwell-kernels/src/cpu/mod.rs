//! The CPU backend. Its kernels are in the folders of their ops.

mod backend;

pub use crate::registry::cpu::{CpuCatalog, cpu_kernels, cpu_target};
pub use crate::runtime::cpu::kernel::{CpuKernelSpec, tier_feature};
pub use crate::runtime::cpu::{element, gemm, vector_math};
pub use backend::CpuBackend;
