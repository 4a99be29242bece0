//! What differs between drivers over host memory.

use crate::cuda::driver::{
    DevicePtr, DriverResult, Function, Launch, Module, TensorMap, TensorMapSpec,
};
use crate::cuda::prepare::DeviceTensor;

/// Device memory and what a launch does to it, under the streams of a
/// [`HostDriver`](super::HostDriver).
///
/// Ranges lie within one allocation; what does not is an error of every call that takes one.
pub trait Machine: Send {
    /// Free and total bytes.
    fn memory(&self) -> (u64, u64);

    /// Device memory, aligned to 256 bytes at least.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Gives memory back.
    ///
    /// # Errors
    /// An address that was not given.
    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()>;

    /// Refuses a range that lies in no allocation; an empty one lies anywhere.
    ///
    /// # Errors
    /// Such a range.
    fn check(&self, at: DevicePtr, bytes: usize) -> DriverResult<()>;

    /// Copies from the device.
    ///
    /// # Errors
    /// A range that lies in no allocation.
    fn read(&mut self, target: &mut [u8], source: DevicePtr) -> DriverResult<()>;

    /// Copies to the device.
    ///
    /// # Errors
    /// A range that lies in no allocation.
    fn write(&mut self, target: DevicePtr, source: &[u8]) -> DriverResult<()>;

    /// Fills with one byte.
    ///
    /// # Errors
    /// A range that lies in no allocation.
    fn fill(&mut self, target: DevicePtr, byte: u8, bytes: usize) -> DriverResult<()>;

    /// Copies within the device.
    ///
    /// # Errors
    /// A range that lies in no allocation.
    fn copy(&mut self, target: DevicePtr, source: DevicePtr, bytes: usize) -> DriverResult<()>;

    /// Loads a binary, or PTX.
    ///
    /// # Errors
    /// An image that this machine does not run.
    fn load_module(&mut self, image: &[u8]) -> DriverResult<Module>;

    /// A kernel of a module.
    ///
    /// # Errors
    /// No such module or kernel.
    fn function(&mut self, module: Module, name: &str) -> DriverResult<Function>;

    /// The name of a kernel.
    ///
    /// # Errors
    /// A function of another machine.
    fn kernel_name(&self, function: Function) -> DriverResult<&str>;

    /// CTAs of `threads` threads that one SM holds at a time.
    ///
    /// # Errors
    /// A function of another machine.
    fn ctas_per_sm(&self, function: Function, threads: u32, shared_bytes: u32)
    -> DriverResult<u32>;

    /// Encodes a tensor map.
    ///
    /// # Errors
    /// Sizes, strides or boxes that the hardware does not take.
    fn tensor_map(&self, spec: &TensorMapSpec) -> DriverResult<TensorMap>;

    /// Tells what the kernels write that run next.
    fn expect_outputs(&mut self, outputs: &[DeviceTensor]) {
        let _ = outputs;
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// What the kernel did wrong.
    fn launch(&mut self, launch: &Launch) -> DriverResult<()>;
}
