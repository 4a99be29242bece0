//! The part that differs between drivers over host memory.

use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    DevicePtr, DriverResult, Function, Launch, Module, TensorMap, TensorMapSpec,
};

/// Device memory and the execution of launches, under the streams of a
/// [`HostDriver`](super::HostDriver).
///
/// A range must be within a single allocation; any other range is an error of the call.
pub trait Machine: Send {
    /// Free and total bytes.
    fn memory(&self) -> (u64, u64);

    /// Allocates device memory, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Frees memory.
    ///
    /// # Errors
    /// An address that was not allocated.
    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()>;

    /// Rejects a range outside of all allocations; an empty range is valid anywhere.
    ///
    /// # Errors
    /// A range outside of all allocations.
    fn check(&self, at: DevicePtr, bytes: usize) -> DriverResult<()>;

    /// Copies from the device.
    ///
    /// # Errors
    /// A range outside of all allocations.
    fn read(&mut self, target: &mut [u8], source: DevicePtr) -> DriverResult<()>;

    /// Copies to the device.
    ///
    /// # Errors
    /// A range outside of all allocations.
    fn write(&mut self, target: DevicePtr, source: &[u8]) -> DriverResult<()>;

    /// Fills with one byte.
    ///
    /// # Errors
    /// A range outside of all allocations.
    fn fill(&mut self, target: DevicePtr, byte: u8, bytes: usize) -> DriverResult<()>;

    /// Copies within the device.
    ///
    /// # Errors
    /// A range outside of all allocations.
    fn copy(&mut self, target: DevicePtr, source: DevicePtr, bytes: usize) -> DriverResult<()>;

    /// Loads a cubin or PTX.
    ///
    /// # Errors
    /// An image that this machine cannot run.
    fn load_module(&mut self, image: &[u8]) -> DriverResult<Module>;

    /// Looks up a kernel of a module.
    ///
    /// # Errors
    /// No such module or kernel.
    fn function(&mut self, module: Module, name: &str) -> DriverResult<Function>;

    /// The name of a kernel.
    ///
    /// # Errors
    /// A function of another machine.
    fn kernel_name(&self, function: Function) -> DriverResult<&str>;

    /// Number of CTAs of `threads` threads that an SM can hold at a time.
    ///
    /// # Errors
    /// A function of another machine.
    fn ctas_per_sm(&self, function: Function, threads: u32, shared_bytes: u32)
    -> DriverResult<u32>;

    /// Encodes a tensor map.
    ///
    /// # Errors
    /// Sizes, strides or boxes that the hardware does not support.
    fn tensor_map(&self, spec: &TensorMapSpec) -> DriverResult<TensorMap>;

    /// Announces the outputs of the next kernels.
    fn expect_outputs(&mut self, outputs: &[DeviceTensor]) {
        let _ = outputs;
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// An error of the kernel.
    fn launch(&mut self, launch: &Launch) -> DriverResult<()>;
}
