//! Pinned memory of a driver over host memory: a buffer on the heap.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::runtime::cuda::driver::{DriverError, DriverResult};
use crate::runtime::cuda::pinned::PinnedBuffer;

/// Memory kept alive by its buffer and by the captures that name it.
pub(in crate::cuda) struct HostPinned {
    pointer: *mut u8,
    bytes: usize,
    /// Number of the driver that allocated the memory.
    driver: usize,
}

// SAFETY: plain memory; the holder orders reads and writes, as on a GPU.
unsafe impl Send for HostPinned {}
// SAFETY: as above.
unsafe impl Sync for HostPinned {}

impl Drop for HostPinned {
    fn drop(&mut self) {
        let slice = std::ptr::slice_from_raw_parts_mut(self.pointer, self.bytes);
        // SAFETY: created from such a box in `allocate`, freed once.
        drop(unsafe { Box::from_raw(slice) });
    }
}

impl HostPinned {
    /// Allocates zeroed memory of a driver.
    pub(super) fn allocate(bytes: usize, driver: usize) -> PinnedBuffer {
        let slice = Box::into_raw(vec![0u8; bytes].into_boxed_slice());
        let memory = Arc::new(HostPinned { pointer: slice.cast(), bytes, driver });
        let (pointer, owner) = (memory.pointer, Box::new(memory));
        // SAFETY: initialized bytes that live as long as the owner; only copies access the bytes
        // besides the holder, who keeps off during copies.
        unsafe { PinnedBuffer::from_raw(pointer, bytes, owner) }
    }

    /// The memory of a buffer, if this driver allocated the buffer.
    pub(super) fn of(buffer: &PinnedBuffer, driver: usize) -> DriverResult<&Arc<HostPinned>> {
        let own = buffer.owner().downcast_ref::<Arc<HostPinned>>();
        own.filter(|memory| memory.driver == driver)
            .ok_or_else(|| DriverError::new("pinned memory", "expected a buffer of this driver"))
    }

    /// Rejects a range outside of the buffer.
    pub(super) fn check(&self, offset: usize, bytes: usize) -> DriverResult<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(DriverError::new(
            "pinned copy",
            format!(
                "expected a range within {} bytes, got {bytes} bytes from {offset}",
                self.bytes
            ),
        ))
    }

    /// Copies a checked range.
    pub(super) fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(self.check(offset, bytes).is_ok());
        let mut copy = vec![0; bytes];
        // SAFETY: within the memory; the target is a separate vector.
        unsafe { self.pointer.add(offset).copy_to_nonoverlapping(copy.as_mut_ptr(), bytes) };
        copy
    }

    /// Writes to a checked range.
    pub(super) fn write(&self, offset: usize, source: &[u8]) {
        assert!(self.check(offset, source.len()).is_ok());
        // SAFETY: within the memory; the source is not part of the memory; the holder keeps off.
        unsafe {
            self.pointer.add(offset).copy_from_nonoverlapping(source.as_ptr(), source.len());
        }
    }
}
