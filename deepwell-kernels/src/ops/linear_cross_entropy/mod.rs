//! The op family `linear_cross_entropy`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
