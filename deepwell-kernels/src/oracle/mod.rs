//! One reference per op: plain loops in `f64`, forward and backward, written from the formulas.
//!
//! Kernels of every backend are compared with these on the numbers they were really given (BF16
//! rounded, MXFP8 dequantized), so that only the kernel's own arithmetic is measured. Each
//! backward here is itself compared with finite differences of its forward.
//!
//! Nothing here is meant for speed, and lengths that do not fit the shapes panic.

pub mod adamw;
pub mod add;
pub mod attention;
pub mod cast;
pub mod embedding;
pub mod finite_difference;
pub mod gelu;
pub mod grad_norm;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod mx;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;
