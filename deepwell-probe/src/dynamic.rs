//! Loads libraries at run time and calls the few functions that have no safe wrapper.
//!
//! All `unsafe` code of the crate is here. Two rules keep it small. A symbol is called only with
//! the C signature that its library has had in all versions. A loaded library stays loaded, because
//! CUDA's libraries start threads and register exit handlers whose code must remain mapped.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};

use libloading::Library as Handle;
use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU as REMOTE_GPU,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH as REMOTE_SWITCH,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN as REMOTE_UNKNOWN,
};

use crate::record::{Answer, CudaDevice, PciAddress, Refusal, RemoteKind, RowRepairs};
use crate::software::{CUBLASLT, CUDA_DRIVER_API, CUDA_RUNTIME, NCCL, NVRTC, Requirement};
use crate::{Library, NvLinkDomain};

/// How a library reports its version.
enum VersionCall {
    /// `int f(int *version)`, zero on success; the number is `1000 x major + 10 x minor`.
    Cuda(&'static str),
    /// The same for NCCL: `10000 x major + 100 x minor + patch`.
    Nccl(&'static str),
    /// `size_t f()`: `10000 x major + 100 x minor + patch`.
    CublasLt(&'static str),
    /// `int f(int *major, int *minor)`, zero on success.
    Nvrtc(&'static str),
}

/// All libraries except the management library, in the order of [`Software`](crate::Software).
pub(crate) struct Found {
    pub(crate) cuda_driver_api: Library,
    pub(crate) cuda_runtime: Library,
    pub(crate) nccl: Library,
    pub(crate) cublaslt: Library,
    pub(crate) nvrtc: Library,
}

/// Searches for every library and reads its version.
pub(crate) fn libraries() -> Found {
    use VersionCall::{CublasLt, Cuda, Nccl, Nvrtc};
    let toolkit = toolkit_folders();
    let look = |requirement, names: &[&str], call| look_for(requirement, names, &toolkit, call);
    if cfg!(windows) {
        return Found {
            cuda_driver_api: look(&CUDA_DRIVER_API, &["nvcuda.dll"], Cuda("cuDriverGetVersion")),
            cuda_runtime: look(
                &CUDA_RUNTIME,
                &["cudart64_13.dll", "cudart64_12.dll"],
                Cuda("cudaRuntimeGetVersion"),
            ),
            nccl: look(&NCCL, &["nccl.dll"], Nccl("ncclGetVersion")),
            cublaslt: look(
                &CUBLASLT,
                &["cublasLt64_13.dll", "cublasLt64_12.dll"],
                CublasLt("cublasLtGetVersion"),
            ),
            nvrtc: look(&NVRTC, &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"], Nvrtc("nvrtcVersion")),
        };
    }
    Found {
        cuda_driver_api: look(
            &CUDA_DRIVER_API,
            &["libcuda.so.1", "libcuda.so"],
            Cuda("cuDriverGetVersion"),
        ),
        cuda_runtime: look(
            &CUDA_RUNTIME,
            &["libcudart.so", "libcudart.so.13", "libcudart.so.12"],
            Cuda("cudaRuntimeGetVersion"),
        ),
        nccl: look(&NCCL, &["libnccl.so.2", "libnccl.so"], Nccl("ncclGetVersion")),
        cublaslt: look(
            &CUBLASLT,
            &["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"],
            CublasLt("cublasLtGetVersion"),
        ),
        nvrtc: look(
            &NVRTC,
            &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"],
            Nvrtc("nvrtcVersion"),
        ),
    }
}

/// Library folders of toolkits outside the loader's search path.
fn toolkit_folders() -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let roots = named.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    roots.map(|root| root.join("lib64")).filter(|folder| folder.is_dir()).collect()
}

fn look_for(
    requirement: &Requirement,
    names: &[&str],
    toolkit: &[PathBuf],
    call: VersionCall,
) -> Library {
    let mut broken = None;
    let mut candidates: Vec<(PathBuf, Option<&Path>)> =
        names.iter().map(|name| (PathBuf::from(name), None)).collect();
    for folder in toolkit {
        candidates.extend(names.iter().map(|name| (folder.join(name), Some(folder.as_path()))));
    }
    for (candidate, folder) in &candidates {
        match open(candidate) {
            Ok(handle) => {
                let path = loaded_path(candidate);
                let note = folder.map(note);
                let version = version(&handle, &call);
                std::mem::forget(handle);
                return match version {
                    Ok(version) => Library::judged(requirement, &version, path, note),
                    Err(reason) => Library::unusable(requirement, reason, path),
                };
            }
            // A file that exists but cannot be loaded is reported if no other candidate loads.
            Err(reason) if !reason.contains("No such file") && broken.is_none() => {
                broken = Some(reason);
            }
            Err(_) => {}
        }
    }
    match broken {
        Some(reason) if cfg!(target_os = "linux") => Library::unusable(requirement, reason, None),
        _ => Library::Missing {
            looked_for: candidates.iter().map(|(path, _)| path.display().to_string()).collect(),
            hint: requirement.hint.to_owned(),
        },
    }
}

/// Note about a library in a folder outside the loader's search path.
fn note(folder: &Path) -> String {
    format!("outside the loader's search path; add `{}` to `LD_LIBRARY_PATH`", folder.display())
}

fn open(path: &Path) -> Result<Handle, String> {
    // SAFETY: loading runs the initializers of the library. The names are those of NVIDIA's
    // libraries, whose initializers register code and take no other action; the handle is never
    // closed, so that no terminator runs before the process ends.
    unsafe { Handle::new(path) }.map_err(|error| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    })
}

/// The version of a loaded library as text, or the reason why it is unknown.
fn version(handle: &Handle, call: &VersionCall) -> Result<String, String> {
    type OneNumber = unsafe extern "C" fn(*mut c_int) -> c_int;
    type TwoNumbers = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Returned = unsafe extern "C" fn() -> usize;
    let missing = |name: &str| format!("has no function `{name}`");
    let failed = |name: &str, code: c_int| format!("`{name}` failed with code {code}");
    let hundreds =
        |number: i64| format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100);
    match call {
        VersionCall::Cuda(name) | VersionCall::Nccl(name) => {
            // SAFETY: every version of these functions is `int f(int *)`.
            let function = unsafe { handle.get::<OneNumber>(*name) }.map_err(|_| missing(name))?;
            let mut number: c_int = 0;
            // SAFETY: the pointer is to a live `int` of ours; the function writes nothing else and
            // needs no initialization before it.
            let code = unsafe { function(&mut number) };
            if code != 0 {
                return Err(failed(name, code));
            }
            Ok(match call {
                VersionCall::Cuda(_) => format!("{}.{}", number / 1000, number % 1000 / 10),
                _ => hundreds(i64::from(number)),
            })
        }
        VersionCall::CublasLt(name) => {
            // SAFETY: every version of this function is `size_t f(void)`.
            let function = unsafe { handle.get::<Returned>(*name) }.map_err(|_| missing(name))?;
            // SAFETY: it takes nothing and returns a constant.
            let number = unsafe { function() };
            Ok(hundreds(number as i64))
        }
        VersionCall::Nvrtc(name) => {
            // SAFETY: every version of this function is `int f(int *, int *)`.
            let function = unsafe { handle.get::<TwoNumbers>(*name) }.map_err(|_| missing(name))?;
            let (mut major, mut minor): (c_int, c_int) = (0, 0);
            // SAFETY: both pointers are to live `int`s of ours, and nothing else is written.
            let code = unsafe { function(&mut major, &mut minor) };
            if code != 0 {
                return Err(failed(name, code));
            }
            Ok(format!("{major}.{minor}"))
        }
    }
}

/// The file of a library that was just loaded, if the system reports it.
fn loaded_path(candidate: &Path) -> Option<String> {
    let name = candidate.file_name()?.to_str()?;
    // `libnccl.so` is usually a link to `libnccl.so.2.27.3`, and the map shows the target.
    let stem = name.split(".so").next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| {
            let file = Path::new(path).file_name().and_then(|file| file.to_str());
            file.and_then(|file| file.strip_prefix(stem))
                .is_some_and(|rest| rest.starts_with(".so"))
        })
        .map(str::to_owned)
}

/// The CUDA driver's information about its devices; empty if the driver does not start.
///
/// Starts the driver in this process (`cuInit`) but creates no context on any device.
pub(crate) fn cuda_devices() -> Vec<CudaDevice> {
    let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    let Ok(handle) = open(Path::new(name)) else { return Vec::new() };
    let devices = ask_cuda(&handle).unwrap_or_default();
    std::mem::forget(handle);
    devices
}

/// `None` if a function is missing or the driver does not start.
fn ask_cuda(handle: &Handle) -> Option<Vec<CudaDevice>> {
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type GetCount = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type GetBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
    // From `CUdevice_attribute` in `cuda.h`.
    const SM_COUNT: c_int = 16;
    const GLOBAL_MEMORY_BUS_WIDTH: c_int = 37;
    const L2_CACHE_SIZE: c_int = 38;

    // SAFETY: the types are those of `cuda.h`, where `CUresult`, `CUdevice` and
    // `CUdevice_attribute` are `int`-sized, and have not changed since CUDA 4.1.
    let (init, get_count, get, get_bus_id, get_attribute) = unsafe {
        (
            handle.get::<Init>("cuInit").ok()?,
            handle.get::<GetCount>("cuDeviceGetCount").ok()?,
            handle.get::<Get>("cuDeviceGet").ok()?,
            handle.get::<GetBusId>("cuDeviceGetPCIBusId").ok()?,
            handle.get::<GetAttribute>("cuDeviceGetAttribute").ok()?,
        )
    };
    // SAFETY: zero is the only valid flag value, and repeated calls are allowed.
    if unsafe { init(0) } != 0 {
        return None;
    }
    let mut count: c_int = 0;
    // SAFETY: the pointer is to a live `int` of ours.
    if unsafe { get_count(&mut count) } != 0 {
        return None;
    }
    let mut devices = Vec::new();
    for ordinal in 0..count {
        let mut device: c_int = 0;
        // SAFETY: the pointer is to a live `int` of ours and the ordinal is below the count.
        if unsafe { get(&mut device, ordinal) } != 0 {
            continue;
        }
        let mut bus_id: [c_char; 32] = [0; 32];
        // SAFETY: the length is that of the buffer, and the driver ends the text with a zero
        // within it.
        if unsafe { get_bus_id(bus_id.as_mut_ptr(), bus_id.len() as c_int, device) } != 0 {
            continue;
        }
        bus_id[bus_id.len() - 1] = 0;
        // SAFETY: the buffer is ours, alive, and its last byte is zero.
        let text = unsafe { CStr::from_ptr(bus_id.as_ptr()) }.to_string_lossy();
        let attribute = |code: c_int| {
            let mut value: c_int = 0;
            // SAFETY: the pointer is to a live `int` of ours and the device came from the driver;
            // a code that the driver does not know makes it return an error.
            let result = unsafe { get_attribute(&mut value, code, device) };
            (result == 0 && value > 0).then_some(value as u32)
        };
        if let Some(address) = PciAddress::parse(&text) {
            devices.push(CudaDevice {
                address,
                sm_count: attribute(SM_COUNT),
                l2_bytes: attribute(L2_CACHE_SIZE).map(u64::from),
                memory_bus_bits: attribute(GLOBAL_MEMORY_BUS_WIDTH),
            });
        }
    }
    Some(devices)
}

/// The NVLink domain of a device: `None` if no domain spans several hosts.
pub(crate) fn nvlink_domain(device: &Device<'_>) -> Answer<Option<NvLinkDomain>> {
    const SUCCESS: c_uint = 0;
    const NOT_SUPPORTED: c_uint = 3;
    const STATE_COMPLETED: u8 = 3;
    let library = device.nvml().lib();
    let Ok(function) = library.nvmlDeviceGetGpuFabricInfoV.as_ref() else {
        return Err(Refusal::NotSupported);
    };
    // The version word of a structure is its size and, in the top byte, its number. Version 2 is a
    // prefix of version 3, so one buffer also serves drivers that know only version 2.
    let versions = [
        size_of::<nvmlGpuFabricInfo_v3_t>() as c_uint | (3 << 24),
        size_of::<nvmlGpuFabricInfo_v2_t>() as c_uint | (2 << 24),
    ];
    let mut code = NOT_SUPPORTED;
    for version in versions {
        let mut info = nvmlGpuFabricInfo_v3_t {
            version,
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        // SAFETY: the device handle comes from a live library object that `device` borrows, the
        // pointer is to a structure of ours, and the version word tells the library how many bytes
        // it may write, never more than the structure has.
        code = unsafe { function(device.handle(), &mut info) };
        if code == SUCCESS {
            let whole = info.state == STATE_COMPLETED && info.clusterUuid != [0; 16];
            return Ok(whole.then(|| NvLinkDomain {
                cluster_uuid: info.clusterUuid.iter().map(|b| format!("{b:02x}")).collect(),
                clique: info.cliqueId,
            }));
        }
    }
    match code {
        // Unknown argument or version: the driver predates such domains.
        2 | NOT_SUPPORTED | 13 | 25 => Err(Refusal::NotSupported),
        other => Err(Refusal::Failed(format!("code {other}"))),
    }
}

/// Pending and failed replacements of rows of the device memory.
pub(crate) fn row_repairs(device: &Device<'_>) -> Answer<RowRepairs> {
    let library = device.nvml().lib();
    let Ok(function) = library.nvmlDeviceGetRemappedRows.as_ref() else {
        return Err(Refusal::NotSupported);
    };
    let (mut corrected, mut uncorrected): (c_uint, c_uint) = (0, 0);
    let (mut pending, mut failed): (c_uint, c_uint) = (0, 0);
    // SAFETY: the device handle comes from a live library object that `device` borrows, and the
    // four pointers are to integers of ours of the type that the bindings give.
    let code = unsafe {
        function(device.handle(), &mut corrected, &mut uncorrected, &mut pending, &mut failed)
    };
    match code {
        0 => Ok(RowRepairs { pending: pending != 0, failed: failed != 0 }),
        3 => Err(Refusal::NotSupported),
        other => Err(Refusal::Failed(format!("code {other}"))),
    }
}

/// Kind of the other end of a link.
///
/// The wrapper crate has a function for this, but as of 0.13.0 it drops the library's result and
/// always returns "unknown".
pub(crate) fn nvlink_remote_kind(device: &Device<'_>, link: u32) -> Answer<RemoteKind> {
    let library = device.nvml().lib();
    let Ok(function) = library.nvmlDeviceGetNvLinkRemoteDeviceType.as_ref() else {
        return Err(Refusal::NotSupported);
    };
    let mut kind = REMOTE_UNKNOWN;
    // SAFETY: the device handle comes from a live library object that `device` borrows, and the
    // pointer is to an integer of ours of the type that the bindings give.
    let code = unsafe { function(device.handle(), link, &mut kind) };
    match code {
        0 => Ok(match kind {
            REMOTE_GPU => RemoteKind::Gpu,
            REMOTE_SWITCH => RemoteKind::Switch,
            _ => RemoteKind::Other,
        }),
        3 => Err(Refusal::NotSupported),
        other => Err(Refusal::Failed(format!("code {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_missing_with_what_was_tried() {
        let names = ["libdeepwell-not-there.so", "libdeepwell-not-there.so.2"];
        let folder = PathBuf::from("/nowhere");
        let call = VersionCall::Nccl("ncclGetVersion");
        let library = look_for(&NCCL, &names, std::slice::from_ref(&folder), call);
        let Library::Missing { looked_for, hint } = library else { panic!("{library:?}") };
        assert_eq!(looked_for.len(), 4);
        assert_eq!(looked_for[3], "/nowhere/libdeepwell-not-there.so.2");
        assert!(hint.contains("libnccl"), "{hint}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_without_the_function_is_unusable_and_its_file_is_named() {
        let call = VersionCall::Cuda("cuDriverGetVersion");
        let library = look_for(&CUDA_DRIVER_API, &["libc.so.6"], &[], call);
        let Library::Unusable { reason, path, .. } = library else { panic!("{library:?}") };
        assert!(reason.contains("cuDriverGetVersion"), "{reason}");
        assert!(path.is_some_and(|path| path.contains("libc.so")));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_is_no_library_is_unusable() {
        let call = VersionCall::Cuda("cuDriverGetVersion");
        let library = look_for(&CUDA_DRIVER_API, &["/proc/self/status"], &[], call);
        assert!(matches!(library, Library::Unusable { .. }), "{library:?}");
    }
}
