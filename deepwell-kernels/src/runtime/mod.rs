//! Building blocks of kernels and their launchers: the ops are written with them.
//!
//! [`cpu`] has the views of the arena, the loops and the GEMM of CPU kernels; [`cuda`] has the
//! driver's interface, specs, and the launches that several ops share. No module here knows an op.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod epilogue;
pub(crate) mod predict;
