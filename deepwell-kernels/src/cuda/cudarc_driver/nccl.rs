//! Sums over devices by NVIDIA's collective library, as far as measuring them takes.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{self, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};

use crate::cuda::driver::{DevicePtr, DriverError, DriverResult};

/// Functions of the library that are called.
const FUNCTIONS: [&str; 7] = [
    "ncclAllReduce",
    "ncclCommDestroy",
    "ncclCommInitAll",
    "ncclGetErrorString",
    "ncclGetVersion",
    "ncclGroupEnd",
    "ncclGroupStart",
];

/// One communicator for each of several devices of this process.
pub(super) struct Communicators {
    raw: Vec<ncclComm_t>,
    version: c_int,
}

impl Communicators {
    /// Finds the library and connects devices.
    ///
    /// # Errors
    /// No library, one without a function, or devices that cannot be connected.
    pub(super) fn open(indices: &[usize]) -> DriverResult<Communicators> {
        // SAFETY: loading the library runs its initializers, which take no action of their own.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverError::new(
                "NCCL",
                "looked for `libnccl.so` and found none\n\
                 hint: install `libnccl-dev`; where there is `libnccl.so.2`, link it: \
                 `ln -s libnccl.so.2 libnccl.so` in its folder",
            ));
        }
        FUNCTIONS.iter().try_for_each(|name| require(name))?;
        let mut version = 0;
        // SAFETY: writes one integer.
        check("ncclGetVersion", unsafe { sys::ncclGetVersion(&mut version) })?;
        let devices: Vec<c_int> = indices.iter().map(|&index| index as c_int).collect();
        let mut raw = vec![ptr::null_mut(); devices.len()];
        // SAFETY: as many handles are written and device numbers read as there are devices.
        check("ncclCommInitAll", unsafe {
            sys::ncclCommInitAll(raw.as_mut_ptr(), devices.len() as c_int, devices.as_ptr())
        })?;
        Ok(Communicators { raw, version })
    }

    /// `2.27.3`, of the library's own 22703.
    pub(super) fn version(&self) -> String {
        dotted(self.version)
    }

    /// Puts a sum of `elements` FP32 numbers into the streams: source, target and stream of each
    /// device, in the order in which they were connected.
    pub(super) fn all_reduce(
        &self,
        ends: &[(DevicePtr, DevicePtr, CUstream)],
        elements: usize,
    ) -> DriverResult<()> {
        // SAFETY: takes nothing; ended below.
        check("ncclGroupStart", unsafe { sys::ncclGroupStart() })?;
        let mut first_error = Ok(());
        for (&communicator, &(source, target, stream)) in self.raw.iter().zip(ends) {
            // SAFETY: the communicator is alive, the stream is its device's, and the buffers on
            // that device have `elements` numbers each and outlive the work.
            let code = unsafe {
                sys::ncclAllReduce(
                    source.0 as *const c_void,
                    target.0 as *mut c_void,
                    elements,
                    ncclDataType_t::ncclFloat32,
                    ncclRedOp_t::ncclSum,
                    communicator,
                    stream.cast(),
                )
            };
            first_error = first_error.and(check("ncclAllReduce", code));
        }
        // SAFETY: ends the group that was begun above, also after an error.
        let ended = check("ncclGroupEnd", unsafe { sys::ncclGroupEnd() });
        first_error.and(ended)
    }
}

impl Drop for Communicators {
    fn drop(&mut self) {
        for communicator in self.raw.drain(..) {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { sys::ncclCommDestroy(communicator) };
        }
    }
}

fn require(name: &str) -> DriverResult<()> {
    // SAFETY: the library was found; the symbol is only looked up, not called.
    match unsafe { sys::culib().get::<*mut c_void>(name.as_bytes()) } {
        Ok(_) => Ok(()),
        Err(_) => Err(DriverError::new(
            "NCCL",
            format!(
                "expected the function `{name}` in `libnccl.so`, and it is not there\n\
                 hint: install NCCL 2.20 or newer"
            ),
        )),
    }
}

fn check(call: &str, code: ncclResult_t) -> DriverResult<()> {
    if code == ncclResult_t::ncclSuccess {
        return Ok(());
    }
    // SAFETY: the function gives a constant text that ends with zero, or null.
    let text = unsafe { sys::ncclGetErrorString(code) };
    let reason = if text.is_null() {
        format!("code {}", code as u32)
    } else {
        // SAFETY: as above, and not null.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(DriverError::new(call, format!("{reason}\nhint: `NCCL_DEBUG=INFO` tells more")))
}

/// A version as NCCL writes it since 2.9: 10000, 100 and 1.
fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::dotted;

    #[test]
    fn versions() {
        assert_eq!(dotted(22_703), "2.27.3");
        assert_eq!(dotted(21_004), "2.10.4");
    }
}
