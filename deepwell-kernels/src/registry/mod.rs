//! All kernels, and the choice among the kernels that serve a request.

pub(crate) mod composed;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod selection;
pub(crate) mod targets;
pub mod tuned;
