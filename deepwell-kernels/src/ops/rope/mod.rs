//! The op family `rope`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
