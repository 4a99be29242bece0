//! The op family `embedding`.

pub mod cpu;
pub(crate) mod cuda;
pub(crate) mod cuda_backward;
pub mod oracle;
