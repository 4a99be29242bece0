//! The op family `quantize`.

pub(crate) mod cuda;
