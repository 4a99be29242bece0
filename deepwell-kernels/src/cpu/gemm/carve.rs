//! Typed buffers out of a workspace of bytes.

use super::ALIGNMENT;

/// Hands out the front of a workspace, buffer by buffer, each aligned to a cache line.
pub(crate) struct Carver<'a> {
    rest: &'a mut [u8],
}

impl<'a> Carver<'a> {
    pub(crate) fn new(workspace: &'a mut [u8]) -> Self {
        Self { rest: align(workspace) }
    }

    /// The next `count` elements, of any value.
    ///
    /// # Panics
    ///
    /// When too little is left: sizes come from sums of [`carved_bytes`].
    pub(crate) fn take<T: bytemuck::Pod>(&mut self, count: usize) -> &'a mut [T] {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(carved_bytes::<T>(count));
        self.rest = rest;
        whole_elements(&mut taken[..count * size_of::<T>()])
    }

    /// All that is left.
    pub(crate) fn rest(self) -> &'a mut [u8] {
        self.rest
    }
}

/// What [`Carver::take`] uses up. Add [`ALIGNMENT`] once for the beginning of the workspace.
pub(crate) fn carved_bytes<T>(count: usize) -> usize {
    (count * size_of::<T>()).next_multiple_of(ALIGNMENT)
}

/// The part of `workspace` that starts at a multiple of [`ALIGNMENT`].
pub(crate) fn align(workspace: &mut [u8]) -> &mut [u8] {
    let skipped = workspace.as_ptr().align_offset(ALIGNMENT).min(workspace.len());
    &mut workspace[skipped..]
}

/// Aligned bytes as as many elements as they hold. No bytes need no alignment.
pub(super) fn whole_elements<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
    let length = bytes.len() / size_of::<T>() * size_of::<T>();
    if length == 0 { &mut [] } else { bytemuck::cast_slice_mut(&mut bytes[..length]) }
}
