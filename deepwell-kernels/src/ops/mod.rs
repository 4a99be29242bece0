//! The ops: a folder for each, or for each family that shares a kernel.
//!
//! In a folder, `oracle.rs` is the reference: plain loops in `f64`, forward and backward, written
//! from the formulas. Kernels of every backend are compared with it on the numbers they were really
//! given (BF16 rounded, MXFP8 dequantized), so that only the kernel's own arithmetic is measured.
//! Each backward is itself compared with finite differences of its forward. Nothing in an oracle is
//! meant for speed, and lengths that do not fit the shapes panic.
//!
//! `cpu.rs` is the CPU kernel, a `.cu` file a CUDA kernel, `cuda*.rs` or one of the kernel's name
//! its launcher, `tests/` what runs on a GPU or the emulator (`tests/cuda/main.rs` includes it).

pub mod adamw;
pub mod add;
pub mod add_positions;
pub mod attention;
pub mod bias_grad;
pub mod cast;
pub mod dequantize;
pub mod embedding;
pub mod finite_difference;
pub mod gelu;
pub mod grad_norm;
pub mod head_rms_norm;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod mx_gemm;
pub mod quantize;
pub mod rms_norm;
pub mod rope;
pub mod stochastic_round;
pub mod swiglu;
