//! The CPU backend's kernels: plain functions on slices, parallel over rayon's pool.

pub mod adamw;
pub mod add;
mod arena;
pub mod attention;
mod backend;
mod calls;
pub mod cast;
pub mod dequantize;
pub mod element;
pub mod embedding;
pub mod gelu;
pub mod gemm;
pub mod grad_norm;
pub mod layer_norm;
pub mod linear_cross_entropy;
mod parallel;
pub mod positions;
pub mod rms_norm;
pub mod rope;
mod softmax;
mod specs;
pub mod stochastic_round;
pub mod swiglu;
#[cfg(test)]
pub(crate) mod test_support;
pub mod vector_math;

pub use backend::CpuBackend;
pub use calls::decode_statistics;
pub(crate) use specs::serves;
pub use specs::{CpuCatalog, CpuKernelSpec, cpu_kernels, cpu_target, tier_feature};
