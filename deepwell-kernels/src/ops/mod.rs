//! The ops: one folder per op, or per family of ops that share a kernel.
//!
//! In a folder, `oracle.rs` is the reference: plain loops in `f64`, forward and backward, written
//! from the formulas. Kernels of every backend are compared with the oracle on their actual inputs
//! (BF16 rounded, MXFP8 dequantized), so that only a kernel's own arithmetic is measured. Each
//! backward oracle is compared with finite differences of its forward. Oracles are not optimized,
//! except that large ones use all cores; lengths that do not fit the shapes panic.
//!
//! `cpu.rs` is the CPU kernel, a `.cu` file a CUDA kernel, `cuda*.rs` or a file with the kernel's
//! name its launcher, `tests/` the tests on a GPU or the emulator (included by
//! `tests/cuda/main.rs`). `mod.rs` defines `KERNELS`: the CPU kernels with their scratch, and the
//! specs of the launchers.

pub mod adamw;
pub mod add;
pub mod add_bias;
pub mod add_positions;
mod amax;
pub mod attention;
pub mod bias_grad;
pub mod cast;
pub mod collective;
pub mod dequantize;
pub mod dispatch;
pub mod embedding;
pub mod expert_swiglu;
pub mod finite_difference;
pub mod gelu;
pub mod grad_norm;
pub mod grouped_bias;
pub mod grouped_gemm;
pub mod head_rms_norm;
mod host_copy;
pub mod join_parts;
pub mod latent_key_value;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod permute;
pub mod product_error;
pub mod quantize;
pub mod relu;
pub mod rms_norm;
pub mod rope;
pub mod route;
pub mod router_logits;
pub mod router_loss;
pub mod scaled_gemm;
pub mod selection_bias;
pub mod split_columns;
pub mod stochastic_round;
pub mod swiglu;
pub mod vocab_parallel;

use crate::runtime::cpu::CpuKernel;
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Kernels that an op's folder registers.
pub(crate) struct OpKernels {
    /// Kernels of the CPU backend.
    pub(crate) cpu: &'static [CpuKernel],
    /// Kernels of the CUDA backend by launcher, preferred kernels first.
    pub(crate) cuda: &'static [&'static [CudaKernelSpec]],
}

/// Every op. All lists of kernels are derived from this list.
pub(crate) const OPS: &[OpKernels] = &[
    adamw::KERNELS,
    add::KERNELS,
    add_bias::KERNELS,
    add_positions::KERNELS,
    amax::KERNELS,
    attention::KERNELS,
    bias_grad::KERNELS,
    cast::KERNELS,
    collective::KERNELS,
    dequantize::KERNELS,
    dispatch::KERNELS,
    embedding::KERNELS,
    expert_swiglu::KERNELS,
    gelu::KERNELS,
    grad_norm::KERNELS,
    grouped_bias::KERNELS,
    grouped_gemm::KERNELS,
    head_rms_norm::KERNELS,
    host_copy::KERNELS,
    join_parts::KERNELS,
    latent_key_value::KERNELS,
    layer_norm::KERNELS,
    linear::KERNELS,
    linear_cross_entropy::KERNELS,
    permute::KERNELS,
    product_error::KERNELS,
    scaled_gemm::KERNELS,
    selection_bias::KERNELS,
    split_columns::KERNELS,
    quantize::KERNELS,
    relu::KERNELS,
    rms_norm::KERNELS,
    rope::KERNELS,
    route::KERNELS,
    router_logits::KERNELS,
    router_loss::KERNELS,
    stochastic_round::KERNELS,
    swiglu::KERNELS,
    vocab_parallel::KERNELS,
];
