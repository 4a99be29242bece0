//! CUDA devices: kernels compiled ahead of time, run through a [`Driver`].
//!
//! A call is selected by its [`CudaKernelSpec`] (plain data, so that planning works without the
//! GPU), prepared into [`Step`]s by the spec's launcher, and enqueued by [`CudaBackend`] on the
//! streams of a [`Driver`].

mod backend;
pub(crate) mod blas;
pub(crate) mod catalog;
pub(crate) mod comm;
#[cfg(feature = "cuda")]
mod cudarc_driver;
pub(crate) mod driver;
#[cfg(feature = "emulated")]
mod emulated_driver;
mod fake_driver;
mod host_driver;
mod images;
pub(crate) mod launch;
mod pinned;
pub(crate) mod prepare;
pub(crate) mod spec;
pub mod tuned;

#[cfg(feature = "emulated")]
pub use deepwell_emulator as emulator;

pub use backend::CudaBackend;
pub use blas::{Blas, BlockScales, Matmul, MatmulPlan, Matrix};
pub use catalog::{COLLECTIVES, CUBLASLT, CudaCatalog, cuda_kernels, cuda_target};
pub use comm::{DeviceComm, DeviceExchange, ExchangePlan};
#[cfg(feature = "cuda")]
pub use cudarc_driver::{
    AllReduce, CublasLt, CudarcDriver, DeviceGroup, NCCL_VARIABLE, NcclDevice, NcclHost, NcclId,
    NcclLimits, NcclMonitor, NcclRank, PeerCopy, nccl_version,
};
pub use driver::{
    Argument, CapturedGraph, DeviceProperties, DevicePtr, Driver, DriverError, DriverResult, Event,
    Function, Launch, Module, Priority, Stream, TensorMap, TensorMapElement, TensorMapSpec,
    TensorMapSwizzle,
};
#[cfg(feature = "emulated")]
pub use emulated_driver::{
    COMPLETION_VARIABLE, CTAS_VARIABLE, EmulatedDriver, EmulatedLaunch, EmulatedLaunches,
    EmulatedMachine, EmulatedTracker, LOG_VARIABLE, LaunchOutcome, RECORD_VARIABLE,
    RESULTS_VARIABLE, TRACKER_VARIABLE, emulator_settings,
};
pub use fake_driver::{FakeBlas, FakeDriver, FakeMachine};
pub use host_driver::{Counts, FakeCounts, FakeNode, HostBlas, HostComm, HostDriver, Machine};
pub use images::{KERNELS_DIR_VARIABLE, KernelImages};
pub use pinned::PinnedBuffer;
pub use prepare::{CallView, Constants, Device, DeviceTensor, RESERVED_BYTES, Step};
pub use spec::{
    Architecture, CudaKernelSpec, Prepare, SelectTile, TileSelection, no_workspace, takes_all,
};
