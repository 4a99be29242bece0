//! Shared by the CUDA kernels' launchers: the driver's interface, specs, calls on a device, and
//! launches that several ops have in common.

pub(crate) mod architecture;
pub(crate) mod blas;
pub(crate) mod comm;
pub(crate) mod device_tensor;
pub(crate) mod driver;
pub(crate) mod images;
pub(crate) mod launch;
#[cfg(feature = "cuda")]
pub(crate) mod packs;
pub(crate) mod pinned;
pub(crate) mod prepare;
pub(crate) mod spec;
