//! The op family `cast`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
