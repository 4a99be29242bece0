//! The op family `gelu`.

pub mod cpu;
pub(crate) mod cuda;
pub(crate) mod cuda_quantize;
pub mod oracle;
