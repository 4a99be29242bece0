//! The op family `dequantize`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
