//! All-reduces over the devices of a process, to measure their interconnect.

use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::driver::sys::CUstream;

use super::library::{Communicator, DataType, Library, ReduceOp};
use crate::runtime::cuda::driver::{DevicePtr, DriverResult};

/// A communicator for each of several devices of this process.
pub(in crate::cuda::cudarc_driver) struct Communicators {
    raw: Vec<Communicator>,
    library: &'static Library,
}

impl Communicators {
    /// Finds the library and connects devices.
    ///
    /// # Errors
    /// No library, a library that lacks a function, or devices that cannot be connected.
    pub(in crate::cuda::cudarc_driver) fn open(indices: &[usize]) -> DriverResult<Communicators> {
        let library = Library::get()?;
        let devices: Vec<c_int> = indices.iter().map(|&index| index as c_int).collect();
        let mut raw = vec![ptr::null_mut(); devices.len()];
        // SAFETY: as many handles are written and device numbers read as there are devices.
        library.check("ncclCommInitAll", unsafe {
            (library.init_all)(raw.as_mut_ptr(), devices.len() as c_int, devices.as_ptr())
        })?;
        Ok(Communicators { raw, library })
    }

    /// `2.27.3`.
    pub(in crate::cuda::cudarc_driver) fn version(&self) -> String {
        self.library.version()
    }

    /// Enqueues an all-reduce of `elements` FP32 numbers: source, target and stream of each device,
    /// in the order of connection.
    pub(in crate::cuda::cudarc_driver) fn all_reduce(
        &self,
        ends: &[(DevicePtr, DevicePtr, CUstream)],
        elements: usize,
    ) -> DriverResult<()> {
        let library = self.library;
        // SAFETY: takes nothing; ended below.
        library.check("ncclGroupStart", unsafe { (library.group_start)() })?;
        let mut first_error = Ok(());
        for (&communicator, &(source, target, stream)) in self.raw.iter().zip(ends) {
            // SAFETY: the communicator is alive, the stream belongs to its device, and the buffers
            // on this device have `elements` numbers each and outlive the work.
            let code = unsafe {
                (library.all_reduce)(
                    source.0 as *const c_void,
                    target.0 as *mut c_void,
                    elements,
                    DataType::Float32,
                    ReduceOp::Sum,
                    communicator,
                    stream,
                )
            };
            first_error = first_error.and(library.check("ncclAllReduce", code));
        }
        // SAFETY: ends the group that was begun above, also after an error.
        let ended = library.check("ncclGroupEnd", unsafe { (library.group_end)() });
        first_error.and(ended)
    }
}

impl Drop for Communicators {
    fn drop(&mut self) {
        for communicator in self.raw.drain(..) {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { (self.library.destroy)(communicator) };
        }
    }
}
