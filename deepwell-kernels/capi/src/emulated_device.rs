//! An emulated GPU for memory of the host: `emulated:sm90`. Each call runs on copies of its
//! operands, by the same steps as on a GPU.

use std::ffi::c_void;

use deepwell_ir::{Access, Program};
use deepwell_kernels::KernelError;
use deepwell_kernels::cuda::DevicePtr;
#[cfg(feature = "emulated")]
use deepwell_kernels::cuda::{
    Architecture, EmulatedDriver, KernelImages, cuda_target, emulator::launch::Settings,
};

use crate::cuda_device::{CudaDevice, Workspace};
use crate::status::Failure;

/// Opens an emulated device of an architecture's short name.
#[cfg(feature = "emulated")]
pub(crate) fn open(architecture: &str) -> Result<CudaDevice, Failure> {
    let Some(architecture) = Architecture::of_short_name(architecture) else {
        return Err(Failure::InvalidArgument(format!(
            "expected `emulated:sm90`, `emulated:sm100`, `emulated:sm103` or `emulated:sm120` as \
             device, got `emulated:{architecture}`"
        )));
    };
    let settings = Settings::default();
    let sm_count = settings.sm_count as usize;
    let driver = EmulatedDriver::from_environment(architecture, settings);
    let driver = driver.map_err(KernelError::from)?;
    let images = KernelImages::discover().into_ptx();
    Ok(CudaDevice::new(Box::new(driver), images, cuda_target(architecture, sm_count, &[])))
}

#[cfg(not(feature = "emulated"))]
pub(crate) fn open(architecture: &str) -> Result<CudaDevice, Failure> {
    Err(Failure::NoDevice(format!(
        "device emulated:{architecture}: this library was built without the feature `emulated`"
    )))
}

/// Runs a program of one call.
///
/// # Safety
/// As `HostDevice::run`.
pub(crate) unsafe fn run(
    device: &mut CudaDevice,
    program: &Program,
    operands: &[*mut c_void],
    workspace: Workspace,
) -> Result<(), Failure> {
    let mut copies = Vec::with_capacity(operands.len() + 1);
    for value in &program.values {
        copies.push(device.driver().allocate(value.range.bytes.max(1)).map_err(KernelError::from)?);
    }
    copies.push(device.driver().allocate(workspace.bytes().max(1)).map_err(KernelError::from)?);
    // SAFETY: guaranteed by the caller.
    let result = unsafe { run_on(device, program, operands, workspace, &copies) };
    for copy in copies {
        device.driver().free(copy).map_err(KernelError::from)?;
    }
    result
}

/// # Safety
/// As [`run`]; `copies` is device memory for operands and workspace.
unsafe fn run_on(
    device: &mut CudaDevice,
    program: &Program,
    operands: &[*mut c_void],
    workspace: Workspace,
    copies: &[DevicePtr],
) -> Result<(), Failure> {
    let accesses = program.calls[0].operands.iter().map(|operand| operand.access);
    let parts: Vec<_> = program.values.iter().zip(operands).zip(copies).zip(accesses).collect();
    for &(((value, address), copy), access) in &parts {
        if access != Access::Write {
            let bytes = value.range.bytes;
            // SAFETY: guaranteed by the caller.
            let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) };
            device.driver().upload(*copy, bytes).map_err(KernelError::from)?;
        }
    }
    let addresses: Vec<usize> = copies.iter().map(|copy| copy.0 as usize).collect();
    let steps = device.steps(program, &addresses, workspace)?;
    device.enqueue(&steps, 0)?;
    for &(((value, address), copy), access) in &parts {
        if access != Access::Read {
            let bytes = value.range.bytes;
            // SAFETY: guaranteed by the caller.
            let bytes = unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), bytes) };
            device.driver().download(bytes, *copy).map_err(KernelError::from)?;
        }
    }
    Ok(())
}
