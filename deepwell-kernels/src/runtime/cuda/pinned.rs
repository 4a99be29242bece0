//! Host memory that a device reads and writes by DMA.
#![allow(unsafe_code)]

use std::any::Any;

/// Pinned host memory, for asynchronous copies.
///
/// Allocated by [`allocate_pinned`](super::driver::Driver::allocate_pinned) and freed by
/// [`free_pinned`](super::driver::Driver::free_pinned) or on drop. While a copy is in flight nobody
/// may touch the bytes or drop the buffer; the callers of
/// [`copy_to_pinned`](super::driver::Driver::copy_to_pinned) and
/// [`copy_from_pinned`](super::driver::Driver::copy_from_pinned) guarantee that.
#[derive(Debug)]
pub struct PinnedBuffer {
    pointer: *mut u8,
    bytes: usize,
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the buffer is plain memory with one owner; nothing in it belongs to a thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference only reads, and copies of a device are `unsafe` to enqueue.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Wraps memory that stays in place until `owner` is dropped.
    ///
    /// # Safety
    /// `pointer` points to `bytes` initialized bytes that nothing else reads or writes and that
    /// live as long as `owner`.
    pub unsafe fn from_raw(
        pointer: *mut u8,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> PinnedBuffer {
        PinnedBuffer { pointer, bytes, owner }
    }

    /// The owner of the memory, as created by the driver.
    pub fn owner(&self) -> &(dyn Any + Send + Sync) {
        self.owner.as_ref()
    }

    /// First byte, for the driver.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the driver gave `bytes` initialized bytes at `pointer` to this single owner, and
        // the caller that enqueued a copy into the buffer guarantees that the copy has ended.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, mutably.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}
