//! The op family `grad_norm`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
