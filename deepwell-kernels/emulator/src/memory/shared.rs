//! Shared memory of one CTA.

use super::{POISON, SHARED_BASE};
use crate::error::Fault;

/// Shared memory of one CTA, static variables first. Offsets count from the start of the window,
/// so the first byte that a kernel owns is [`SHARED_BASE`].
#[derive(Debug)]
pub struct SharedMemory {
    bytes: Vec<u8>,
    /// One bit per byte, set when the byte is written.
    written: Vec<u64>,
}

impl SharedMemory {
    /// Creates shared memory filled with poison.
    pub fn new(bytes: u32) -> SharedMemory {
        SharedMemory {
            bytes: vec![POISON; bytes as usize],
            written: vec![0; (bytes as usize).div_ceil(64)],
        }
    }

    /// Number of bytes that the kernel owns.
    pub fn len(&self) -> u32 {
        self.bytes.len() as u32
    }

    /// Whether the kernel owns no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    #[cold]
    fn out_of_range(&self, offset: u32, bytes: usize) -> Fault {
        Fault::new(
            "shared-out-of-range",
            format!(
                "{bytes} bytes at shared offset {offset:#x}: the CTA owns {SHARED_BASE:#x} to \
                 {:#x}",
                SHARED_BASE as usize + self.bytes.len()
            ),
        )
    }

    #[inline]
    fn index(&self, offset: u32, bytes: usize) -> Result<usize, Fault> {
        let start = offset.wrapping_sub(SHARED_BASE) as usize;
        if start + bytes <= self.bytes.len() {
            Ok(start)
        } else {
            Err(self.out_of_range(offset, bytes))
        }
    }

    /// Returns the bytes starting at `offset`, and whether all of them were written.
    ///
    /// # Errors
    /// Bytes that the CTA does not own.
    #[inline]
    pub fn read(&self, offset: u32, bytes: usize) -> Result<(&[u8], bool), Fault> {
        let start = self.index(offset, bytes)?;
        let written = if (start & 63) + bytes <= 64 && bytes > 0 {
            let mask = (u64::MAX >> (64 - bytes)) << (start & 63);
            self.written[start >> 6] & mask == mask
        } else {
            (start..start + bytes).all(|byte| self.written[byte >> 6] >> (byte & 63) & 1 == 1)
        };
        Ok((&self.bytes[start..start + bytes], written))
    }

    /// Returns the bytes starting at `offset`, all of which the caller overwrites.
    ///
    /// # Errors
    /// Bytes that the CTA does not own.
    #[inline]
    pub fn write(&mut self, offset: u32, bytes: usize) -> Result<&mut [u8], Fault> {
        let start = self.index(offset, bytes)?;
        self.mark(start, bytes, true);
        Ok(&mut self.bytes[start..start + bytes])
    }

    /// Marks the bytes as unwritten, because a pending copy will write them.
    ///
    /// # Errors
    /// Bytes that the CTA does not own.
    pub fn poison(&mut self, offset: u32, bytes: usize) -> Result<(), Fault> {
        let start = self.index(offset, bytes)?;
        self.mark(start, bytes, false);
        self.bytes[start..start + bytes].fill(POISON);
        Ok(())
    }

    #[inline]
    fn mark(&mut self, start: usize, bytes: usize, written: bool) {
        let (mut byte, end) = (start, start + bytes);
        while byte < end {
            let count = (64 - (byte & 63)).min(end - byte);
            let mask = (u64::MAX >> (64 - count)) << (byte & 63);
            if written {
                self.written[byte >> 6] |= mask;
            } else {
                self.written[byte >> 6] &= !mask;
            }
            byte += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_tells_whether_all_was_written() {
        let mut memory = SharedMemory::new(256);
        assert_eq!(memory.read(SHARED_BASE, 4).unwrap(), (&[POISON; 4][..], false));
        memory.write(SHARED_BASE + 60, 72).unwrap().fill(7);
        for (start, bytes, written) in [
            (60, 4, true),
            (59, 4, false),
            (60, 72, true),
            (64, 64, true),
            (128, 4, true),
            (128, 5, false),
            (61, 8, true),
            (131, 1, true),
            (132, 1, false),
        ] {
            assert_eq!(memory.read(SHARED_BASE + start, bytes).unwrap().1, written, "{start}");
        }
        memory.poison(SHARED_BASE + 64, 16).unwrap();
        assert_eq!(memory.read(SHARED_BASE + 64, 1).unwrap(), (&[POISON][..], false));
        assert!(memory.read(SHARED_BASE + 80, 16).unwrap().1);
    }

    #[test]
    fn bounds() {
        let mut memory = SharedMemory::new(256);
        for (offset, bytes) in [(0, 1), (SHARED_BASE - 1, 2), (SHARED_BASE + 253, 4), (1 << 23, 1)]
        {
            assert_eq!(memory.read(offset, bytes).unwrap_err().rule, "shared-out-of-range");
            assert_eq!(memory.write(offset, bytes).unwrap_err().rule, "shared-out-of-range");
        }
        assert_eq!(memory.len(), 256);
    }
}
