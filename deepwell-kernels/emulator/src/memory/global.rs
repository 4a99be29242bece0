//! Device memory: allocations with guard space between them.

use super::POISON;
use crate::error::Fault;

/// Allocations start at multiples of this size, so that a lookup is one division.
const GRANULE: u64 = 1 << 21;
/// Lowest address of an allocation.
const FIRST: u64 = 0x10_0000_0000;

/// Largest offset from [`FIRST`] at which [`GlobalMemory::allocate_at`] allocates.
const FARTHEST: u64 = 1 << 40;

/// Granularity, in bytes, of the record of written memory.
const LINE: usize = 128;

#[derive(Clone, Debug)]
struct Allocation {
    base: u64,
    bytes: Vec<u8>,
    name: String,
    /// One bit for each [`LINE`] written since the last [`GlobalMemory::take_written`].
    written: Vec<u64>,
}

/// Device memory. Every allocation is followed by unowned guard addresses, and no address is
/// reused, so that every access outside of an allocation is detected.
#[derive(Clone, Debug, Default)]
pub struct GlobalMemory {
    allocations: Vec<Option<Allocation>>,
    /// For every granule from [`FIRST`] on, the index of its allocation plus one; 0 for none.
    granules: Vec<u32>,
    bytes: u64,
}

impl GlobalMemory {
    /// Creates device memory without allocations.
    pub fn new() -> GlobalMemory {
        GlobalMemory::default()
    }

    /// Allocates `bytes` bytes filled with poison. Returns the address, a multiple of 2 MiB.
    pub fn allocate(&mut self, bytes: u64, name: &str) -> u64 {
        let base = FIRST + self.granules.len() as u64 * GRANULE;
        self.place(base, bytes, name);
        base
    }

    /// Allocates at an address that [`GlobalMemory::allocate`] may return but has not returned
    /// here.
    ///
    /// # Errors
    /// An address that [`GlobalMemory::allocate`] cannot return, or one already in use.
    pub fn allocate_at(&mut self, address: u64, bytes: u64, name: &str) -> Result<(), Fault> {
        let next = FIRST + self.granules.len() as u64 * GRANULE;
        if address < next || !address.is_multiple_of(GRANULE) || address - FIRST > FARTHEST {
            return Err(Fault::new(
                "global-place",
                format!(
                    "expected an address for `{name}` from {next:#x} to {:#x} in steps of \
                     {GRANULE:#x}, got {address:#x}",
                    FIRST + FARTHEST
                ),
            ));
        }
        self.granules.resize(((address - FIRST) / GRANULE) as usize, 0);
        self.place(address, bytes, name);
        Ok(())
    }

    fn place(&mut self, base: u64, bytes: u64, name: &str) {
        self.allocations.push(Some(Allocation {
            base,
            bytes: vec![POISON; bytes as usize],
            name: name.to_owned(),
            written: vec![0; (bytes as usize).div_ceil(LINE * 64)],
        }));
        let owner = self.allocations.len() as u32;
        let granules = bytes.div_ceil(GRANULE).max(1) as usize;
        self.granules.resize(self.granules.len() + granules, owner);
        // The guard granule.
        self.granules.push(owner);
        self.bytes += bytes;
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// `address` was not returned by [`GlobalMemory::allocate`], or is already free.
    pub fn free(&mut self, address: u64) -> Result<(), Fault> {
        let index = self.owner(address);
        match index.and_then(|index| self.allocations[index].as_ref()) {
            Some(allocation) if allocation.base == address => {
                self.bytes -= allocation.bytes.len() as u64;
                self.allocations[index.unwrap_or(0)] = None;
                Ok(())
            }
            _ => Err(Fault::new(
                "global-free",
                format!("{address:#x} is not the start of a live allocation"),
            )),
        }
    }

    /// Number of allocated bytes.
    pub fn bytes_allocated(&self) -> u64 {
        self.bytes
    }

    /// Returns the ranges written since the last call, in lines of 128 bytes.
    pub fn take_written(&mut self) -> Vec<std::ops::Range<u64>> {
        let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
        for allocation in self.allocations.iter_mut().flatten() {
            for (index, word) in allocation.written.iter_mut().enumerate() {
                let mut rest = std::mem::take(word);
                while rest != 0 {
                    let line = index * 64 + rest.trailing_zeros() as usize;
                    rest &= rest - 1;
                    let start = allocation.base + (line * LINE) as u64;
                    let end =
                        (start + LINE as u64).min(allocation.base + allocation.bytes.len() as u64);
                    match ranges.last_mut() {
                        Some(last) if last.end == start => last.end = end,
                        _ => ranges.push(start..end),
                    }
                }
            }
        }
        ranges
    }

    fn owner(&self, address: u64) -> Option<usize> {
        let granule = address.checked_sub(FIRST)? / GRANULE;
        let owner = *self.granules.get(usize::try_from(granule).ok()?)?;
        (owner as usize).checked_sub(1)
    }

    #[cold]
    fn out_of_range(&self, address: u64, bytes: usize) -> Fault {
        let message = match self.owner(address).map(|index| &self.allocations[index]) {
            None => format!("{bytes} bytes at {address:#x}: no allocation is there"),
            Some(None) => format!("{bytes} bytes at {address:#x}: the allocation was freed"),
            Some(Some(allocation)) => format!(
                "{bytes} bytes at {address:#x}: byte {} of `{}`, which has {} bytes",
                address - allocation.base,
                allocation.name,
                allocation.bytes.len()
            ),
        };
        Fault::new("global-out-of-range", message)
    }

    /// Returns the bytes at `address`.
    ///
    /// # Errors
    /// Bytes that do not lie in one live allocation.
    #[inline]
    pub fn slice(&self, address: u64, bytes: usize) -> Result<&[u8], Fault> {
        if let Some(index) = self.owner(address)
            && let Some(allocation) = &self.allocations[index]
            && let Some(found) = allocation
                .bytes
                .get((address - allocation.base) as usize..)
                .and_then(|tail| tail.get(..bytes))
        {
            return Ok(found);
        }
        Err(self.out_of_range(address, bytes))
    }

    /// Returns the bytes at `address` for writing.
    ///
    /// # Errors
    /// Bytes that do not lie in one live allocation.
    #[inline]
    pub fn slice_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], Fault> {
        let Some(index) = self.owner(address) else {
            return Err(self.out_of_range(address, bytes));
        };
        let inside = self.allocations[index].as_ref().is_some_and(|allocation| {
            let offset = (address - allocation.base) as usize;
            offset.checked_add(bytes).is_some_and(|end| end <= allocation.bytes.len())
        });
        if !inside {
            return Err(self.out_of_range(address, bytes));
        }
        match &mut self.allocations[index] {
            Some(allocation) => {
                let offset = (address - allocation.base) as usize;
                for line in offset / LINE..(offset + bytes).div_ceil(LINE) {
                    allocation.written[line / 64] |= 1 << (line % 64);
                }
                Ok(&mut allocation.bytes[offset..offset + bytes])
            }
            None => Ok(&mut []),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_belongs_to_one_allocation() {
        let mut memory = GlobalMemory::new();
        let small = memory.allocate(16, "small");
        let large = memory.allocate(3 << 20, "large");
        assert_eq!(memory.slice(small, 16).unwrap(), &[POISON; 16]);
        memory.slice_mut(large + (3 << 20) - 4, 4).unwrap().copy_from_slice(&[1, 2, 3, 4]);
        assert_eq!(memory.slice(large + (3 << 20) - 4, 4).unwrap(), &[1, 2, 3, 4]);
        let end = large + (3 << 20);
        assert!(memory.take_written().iter().eq([&(end - 128..end)]));
        assert_eq!(memory.take_written(), []);
        for (address, bytes) in
            [(small + 15, 2), (small - 1, 1), (large + (3 << 20), 1), (0, 4), (u64::MAX, 1)]
        {
            assert_eq!(memory.slice(address, bytes).unwrap_err().rule, "global-out-of-range");
            assert_eq!(memory.slice_mut(address, bytes).unwrap_err().rule, "global-out-of-range");
        }
        assert_eq!(memory.bytes_allocated(), 16 + (3 << 20));
        memory.free(small).unwrap();
        assert!(memory.slice(small, 1).unwrap_err().message.contains("freed"));
        assert_eq!(memory.free(small).unwrap_err().rule, "global-free");
        assert_eq!(memory.free(large + 4).unwrap_err().rule, "global-free");
        assert_ne!(memory.allocate(16, "again"), small);
    }

    #[test]
    fn an_allocation_lies_where_another_device_had_it() {
        let mut memory = GlobalMemory::new();
        let first = FIRST + 4 * GRANULE;
        memory.allocate_at(first, 16, "placed").unwrap();
        memory.slice_mut(first, 16).unwrap().fill(1);
        assert_eq!(memory.slice(first, 16).unwrap(), &[1; 16]);
        assert_eq!(memory.slice(FIRST, 1).unwrap_err().rule, "global-out-of-range");
        for address in [0, FIRST, first, first + GRANULE, first + 3 * GRANULE + 16, u64::MAX] {
            assert_eq!(memory.allocate_at(address, 1, "x").unwrap_err().rule, "global-place");
        }
        assert_eq!(memory.allocate(16, "next"), first + 2 * GRANULE);
        memory.free(first).unwrap();
    }
}
