//! Host memory that a device copies from and to by itself.
#![allow(unsafe_code)]

use std::any::Any;

/// Host memory that the device can copy from and to without the host waiting.
///
/// Given by [`allocate_pinned`](super::Driver::allocate_pinned) and given back to
/// [`free_pinned`](super::Driver::free_pinned); one that is dropped gives itself back. While a copy
/// is under way nobody touches the bytes or drops the buffer: those who enqueue one, by
/// [`copy_to_pinned`](super::Driver::copy_to_pinned) or
/// [`copy_from_pinned`](super::Driver::copy_from_pinned), vouch for that.
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
    /// A buffer over memory that stays where it is until `owner` is dropped.
    ///
    /// # Safety
    /// `pointer` is that of `bytes` initialized bytes which nothing else reads or writes, and which
    /// live as long as `owner` does.
    pub unsafe fn from_raw(
        pointer: *mut u8,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> PinnedBuffer {
        PinnedBuffer { pointer, bytes, owner }
    }

    /// What keeps the memory, as the driver made it.
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

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the driver gave `bytes` initialized bytes at `pointer` to this one owner, and who
        // enqueued a copy to them has seen to it that it has ended.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access the only one.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}
