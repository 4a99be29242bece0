//! The op family `adamw`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
