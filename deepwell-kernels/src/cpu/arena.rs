//! The CPU's arena: one zeroed, aligned allocation, and typed views of its ranges.
//!
//! Views are given out without borrowing the arena, because a call holds several at once, some
//! of them mutable. What makes that sound:
//! - a view is made only of an aligned range, and given out only inside of the arena;
//! - when a call is prepared, its operands and workspace share no byte unless all of them are only
//!   read (`Operands::check_views`), whether its program was verified or not;
//! - views exist only while their call runs, and calls run one after another.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;

use bytemuck::Pod;
use deepwell_ir::{ALIGNMENT_BYTES, ByteRange};

use crate::KernelError;

/// Alignment that every allocator gives.
const ALLOCATOR_ALIGNMENT_BYTES: usize = 16;

/// Owned bytes, zeroed at first; pages are touched only when they are used.
pub(crate) struct Arena {
    /// The first aligned byte of the allocation.
    start: NonNull<u8>,
    bytes: usize,
    allocation: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena owns its bytes; nothing else points to them but views, which live within a
// call.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Result<Arena, KernelError> {
        let out_of_memory = || KernelError::OutOfMemory { bytes };
        // What is aligned further than this, the allocator would zero byte by byte and so touch.
        let allocated = bytes.checked_add(ALIGNMENT_BYTES).ok_or_else(out_of_memory)?;
        let layout = Layout::from_size_align(allocated, ALLOCATOR_ALIGNMENT_BYTES)
            .map_err(|_| out_of_memory())?;
        // SAFETY: the size is not zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        let skipped = allocation.as_ptr().align_offset(ALIGNMENT_BYTES);
        // SAFETY: fewer than `ALIGNMENT_BYTES` are skipped; the allocation is larger by as many.
        let start = unsafe { allocation.add(skipped) };
        Ok(Arena { start, bytes, allocation, layout })
    }

    fn contains(&self, range: ByteRange) -> bool {
        range.end() <= self.bytes
    }

    /// The bytes of a range, for copies between calls.
    pub(crate) fn bytes(&mut self, range: ByteRange) -> Option<&mut [u8]> {
        if !self.contains(range) {
            return None;
        }
        // SAFETY: inside the allocation, and `&mut self` keeps every other access away.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.offset), range.bytes)
        })
    }

    /// The bytes of a range, read between calls.
    pub(crate) fn view(&self, range: ByteRange) -> Option<&[u8]> {
        if !self.contains(range) {
            return None;
        }
        // SAFETY: inside the allocation; calls run only through `&mut CpuBackend`, so none
        // writes while this borrow of the backend lives.
        Some(unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().add(range.offset), range.bytes)
        })
    }

    fn pointer<T>(&self, range: ByteRange) -> *mut T {
        assert!(self.contains(range), "range outside of the arena");
        // SAFETY: the offset is inside the allocation, checked above.
        unsafe { self.start.as_ptr().add(range.offset).cast() }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped once.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

/// A range that a call reads as elements of `T`.
#[derive(Debug)]
pub(crate) struct In<T> {
    range: ByteRange,
    element: PhantomData<fn() -> T>,
}

/// Whether elements of `T` can begin where a range does; the arena itself is aligned for all.
fn is_aligned<T>(range: ByteRange) -> bool {
    const { assert!(align_of::<T>() <= ALIGNMENT_BYTES) };
    range.offset.is_multiple_of(align_of::<T>())
}

impl<T: Pod> In<T> {
    /// `None` for a range that begins between elements.
    pub(crate) fn new(range: ByteRange) -> Option<In<T>> {
        is_aligned::<T>(range).then_some(In { range, element: PhantomData })
    }

    /// The elements.
    pub(crate) fn of<'a>(&self, arena: &'a Arena) -> &'a [T] {
        let length = self.range.bytes / size_of::<T>();
        // SAFETY: aligned as `new` found, inside as `pointer` does, any bytes are a valid `T: Pod`,
        // and no view of the running call writes this range.
        unsafe { std::slice::from_raw_parts(arena.pointer::<T>(self.range), length) }
    }
}

/// A range that a call writes, or updates, as elements of `T`.
#[derive(Debug)]
pub(crate) struct Out<T> {
    range: ByteRange,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Out<T> {
    /// `None` for a range that begins between elements.
    pub(crate) fn new(range: ByteRange) -> Option<Out<T>> {
        is_aligned::<T>(range).then_some(Out { range, element: PhantomData })
    }

    /// The elements.
    #[expect(clippy::mut_from_ref, reason = "the module's rules keep views apart")]
    pub(crate) fn of<'a>(&self, arena: &'a Arena) -> &'a mut [T] {
        let length = self.range.bytes / size_of::<T>();
        // SAFETY: aligned as `new` found, inside as `pointer` does, any bytes are a valid `T: Pod`,
        // and this is the running call's only view of the range.
        unsafe { std::slice::from_raw_parts_mut(arena.pointer::<T>(self.range), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_begins_aligned() {
        for bytes in [0, 1, 255, 256, 4097] {
            let mut arena = Arena::new(bytes).unwrap();
            assert_eq!(arena.start.as_ptr().align_offset(ALIGNMENT_BYTES), 0);
            let whole = ByteRange { offset: 0, bytes };
            assert!(arena.bytes(whole).is_some_and(|all| all.iter().all(|&byte| byte == 0)));
            assert!(arena.bytes(ByteRange { offset: 1, bytes }).is_none());
        }
    }

    /// Zeroing touched every page, those too that are reserved for GEMMs that fall back.
    #[cfg(target_os = "linux")]
    #[test]
    fn pages_are_touched_when_they_are_used() {
        let resident_bytes = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident_bytes();
        let arena = Arena::new(2 << 30).unwrap();
        let after = resident_bytes();
        assert!(after < before + (1 << 30), "{before} and {after} bytes");
        assert_eq!(arena.bytes, 2 << 30);
    }
}
