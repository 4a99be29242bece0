//! The op family `rms_norm`.

pub mod cpu;
pub(crate) mod cuda;
pub(crate) mod cuda_backward;
pub(crate) mod cuda_quantize;
pub mod oracle;
