//! The op family `add`.

pub mod cpu;
pub(crate) mod cuda;
pub mod oracle;
