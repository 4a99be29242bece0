//! Finds the driver library and a device, with clear errors for missing parts.
//!
//! The bindings load each function at its first call and panic if a library or a function is
//! missing. This module therefore looks up every function before the first call.

use std::ffi::{c_char, c_int, c_void};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::error::check;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{DeviceProperties, DriverError, DriverResult};

/// The CUDA version of the compiled kernels, as `cuDriverGetVersion` writes it.
const CUDA_VERSION_MIN: c_int = 13_000;

/// Functions used from the driver library, by their exported names.
const FUNCTIONS: &[&str] = &[
    "cuCtxEnablePeerAccess",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuEventSynchronize",
    "cuFuncGetParamInfo",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphAddChildGraphNode",
    "cuGraphAddEmptyNode",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamUpdateCaptureDependencies_v2",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// Finds and initializes the driver library; may be called repeatedly.
pub(super) fn start_driver() -> DriverResult<()> {
    // SAFETY: loading the driver library runs its initializers, which take no action of their own.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::new(
            "driver library",
            "looked for `libcuda.so.1` and `libcuda.so` and found neither\n\
             hint: install NVIDIA driver 580 or newer; in a container, pass the GPU through \
             (`--gpus all`)",
        ));
    }
    require("cuDriverGetVersion")?;
    let version = version()?;
    if version < CUDA_VERSION_MIN {
        return Err(DriverError::new(
            "driver version",
            format!(
                "expected CUDA {} or newer, the driver serves CUDA {}\n\
                 hint: install NVIDIA driver 580 or newer",
                dotted(CUDA_VERSION_MIN),
                dotted(version)
            ),
        ));
    }
    FUNCTIONS.iter().try_for_each(|name| require(name))?;
    // SAFETY: the flags must be zero.
    check("cuInit", unsafe { sys::cuInit(0) })
}

fn require(name: &str) -> DriverResult<()> {
    // SAFETY: the library was found; the symbol is only looked up, not called.
    match unsafe { sys::culib().get::<*mut c_void>(name.as_bytes()) } {
        Ok(_) => Ok(()),
        Err(_) => Err(DriverError::new(
            "driver library",
            format!(
                "expected the function `{name}` in `libcuda.so.1`, and it is not there\n\
                 hint: install NVIDIA driver 580 or newer"
            ),
        )),
    }
}

fn version() -> DriverResult<c_int> {
    let mut version = 0;
    // SAFETY: writes one integer; needs no initialization.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Returns device `index` of the initialized driver, if kernels are compiled for its architecture.
pub(super) fn device(index: usize) -> DriverResult<(sys::CUdevice, DeviceProperties)> {
    let mut count = 0;
    // SAFETY: writes one integer.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    if index >= count.max(0) as usize {
        let have = match count {
            0 => "none".to_string(),
            1 => "one, with index 0".to_string(),
            _ => format!("{count}, with indices 0 to {}", count - 1),
        };
        return Err(DriverError::new(
            "device",
            format!(
                "expected the index of a GPU, got {index}; there is {have}\n\
                 hint: `CUDA_VISIBLE_DEVICES` hides GPUs from a process"
            ),
        ));
    }
    let mut device = 0;
    // SAFETY: writes one handle; the index is below the count.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, index as c_int) })?;
    let properties = properties(device)?;
    if Architecture::of_capability(properties.capability).is_none() {
        let (major, minor) = properties.capability;
        let names: Vec<&str> = Architecture::ALL.iter().map(|known| known.name()).collect();
        return Err(DriverError::new(
            "device",
            format!(
                "expected a GPU that kernels are built for ({}), got `{}` with compute \
                 capability {major}.{minor}\n\
                 hint: choose another GPU, or train with `--device cpu`",
                names.join(", "),
                properties.name
            ),
        ));
    }
    Ok((device, properties))
}

fn properties(device: sys::CUdevice) -> DriverResult<DeviceProperties> {
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: the length is the buffer's length, and the text in the buffer ends with zero.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device)
    })?;
    let name: Vec<u8> = name.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    let mut memory_bytes = 0;
    // SAFETY: writes one size.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
    let attribute = |attribute: Attribute| -> DriverResult<u32> {
        let mut value = 0;
        // SAFETY: writes one integer.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(value.max(0) as u32)
    };
    Ok(DeviceProperties {
        name: String::from_utf8_lossy(&name).into_owned(),
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory_bytes as u64,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        shared_bytes_per_cta: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        cuda_version: version()? as u32,
    })
}

#[cfg(test)]
mod tests {
    use crate::cuda::CudarcDriver;

    #[test]
    fn what_is_missing_is_an_error_with_a_hint_on_any_machine() {
        // Without a driver, with an old driver, without a GPU, and with eight GPUs.
        let error = CudarcDriver::open(10_000).map(drop).expect_err("no machine has that many");
        let said = error.to_string();
        let known = ["libcuda.so.1", "driver serves CUDA", "got 10000", "CUDA_ERROR_"];
        assert!(known.iter().any(|words| said.contains(words)), "{said}");
        assert!(!error.out_of_memory);
    }
}
