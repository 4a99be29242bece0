//! CUDA devices: kernels compiled ahead of time, run through a [`Driver`].
//!
//! A call is selected by its [`CudaKernelSpec`] (plain data, so that planning works without the
//! GPU), prepared into [`Step`]s by the spec's launcher, and enqueued by [`CudaBackend`] on the
//! streams of a [`Driver`].

mod backend;
#[cfg(feature = "cuda")]
mod cudarc_driver;
#[cfg(feature = "emulated")]
mod emulated_driver;
mod fake_driver;
mod host_driver;

#[cfg(feature = "emulated")]
pub use deepwell_emulator as emulator;

pub use crate::registry::cuda::{CudaCatalog, cuda_kernels};
pub use crate::registry::tuned;
pub use crate::runtime::cuda::architecture::{Architecture, COLLECTIVES, CUBLASLT, cuda_target};
pub use crate::runtime::cuda::blas::{Blas, BlockScales, Matmul, MatmulPlan, Matrix};
pub use crate::runtime::cuda::comm::{DeviceComm, DeviceExchange, ExchangePlan};
pub use crate::runtime::cuda::device_tensor::DeviceTensor;
pub use crate::runtime::cuda::driver::{
    Argument, CapturedGraph, DeviceProperties, DevicePtr, Driver, DriverError, DriverResult, Event,
    Function, Launch, Module, Priority, Stream, TensorMap, TensorMapElement, TensorMapSpec,
    TensorMapSwizzle,
};
pub use crate::runtime::cuda::images::{KERNELS_DIR_VARIABLE, KernelImages};
pub use crate::runtime::cuda::pinned::PinnedBuffer;
pub use crate::runtime::cuda::prepare::{
    ArenaAddress, CallView, Constants, Device, RESERVED_BYTES, Step,
};
pub use crate::runtime::cuda::spec::{
    CudaKernelSpec, Prepare, SelectTile, TileSelection, no_workspace, takes_all,
};
pub use backend::CudaBackend;
#[cfg(feature = "cuda")]
pub use cudarc_driver::{
    AllReduce, CublasLt, CudarcDriver, DeviceGroup, NCCL_VARIABLE, NcclDevice, NcclHost, NcclId,
    NcclLimits, NcclMonitor, NcclRank, PeerCopy, nccl_version,
};
#[cfg(feature = "emulated")]
pub use emulated_driver::{
    COMPLETION_VARIABLE, CTAS_VARIABLE, EmulatedDriver, EmulatedLaunch, EmulatedLaunches,
    EmulatedMachine, EmulatedTracker, LOG_VARIABLE, LaunchOutcome, RECORD_VARIABLE,
    RESULTS_VARIABLE, TRACKER_VARIABLE, WARNINGS_VARIABLE, emulator_settings,
};
pub use fake_driver::{FakeBlas, FakeDriver, FakeMachine};
pub use host_driver::{Counts, FakeCounts, FakeNode, HostBlas, HostComm, HostDriver, Machine};
