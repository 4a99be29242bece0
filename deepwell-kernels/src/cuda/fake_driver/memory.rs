//! Device memory on the host that takes room only where it was written.

use std::collections::BTreeMap;

use crate::runtime::cuda::driver::{DevicePtr, DriverError, DriverResult};

const PAGE_BYTES: usize = 1 << 16;
/// Alignment of addresses, and size of the unmapped gap after each allocation.
const ALIGNMENT_BYTES: u64 = 256;
/// Contents of unwritten memory: NaN in every float type.
const UNWRITTEN: u8 = 0xFF;
/// First address: far from zero, so that an offset without a base is out of bounds.
const FIRST_ADDRESS: u64 = 1 << 40;

enum Page {
    Same(u8),
    Bytes(Box<[u8]>),
}

#[derive(Default)]
struct Allocation {
    bytes: usize,
    pages: BTreeMap<usize, Page>,
}

/// Allocations by address.
pub(super) struct Memory {
    capacity_bytes: u64,
    used_bytes: u64,
    next_address: u64,
    allocations: BTreeMap<u64, Allocation>,
}

impl Memory {
    pub(super) fn new(capacity_bytes: u64) -> Memory {
        Memory {
            capacity_bytes,
            used_bytes: 0,
            next_address: FIRST_ADDRESS,
            allocations: BTreeMap::new(),
        }
    }

    pub(super) fn free_and_total(&self) -> (u64, u64) {
        (self.capacity_bytes - self.used_bytes, self.capacity_bytes)
    }

    pub(super) fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        let rounded = (bytes.max(1) as u64).next_multiple_of(ALIGNMENT_BYTES);
        let (free_bytes, _) = self.free_and_total();
        if rounded > free_bytes {
            let reason = format!("expected at most {free_bytes} bytes, got {bytes}");
            return Err(DriverError {
                out_of_memory: true,
                ..DriverError::new("allocate", reason)
            });
        }
        let address = self.next_address;
        self.next_address += rounded + ALIGNMENT_BYTES;
        self.used_bytes += rounded;
        self.allocations.insert(address, Allocation { bytes, pages: BTreeMap::new() });
        Ok(DevicePtr(address))
    }

    pub(super) fn free(&mut self, pointer: DevicePtr) -> DriverResult<()> {
        match self.allocations.remove(&pointer.0) {
            Some(allocation) => {
                let bytes = allocation.bytes.max(1) as u64;
                self.used_bytes -= bytes.next_multiple_of(ALIGNMENT_BYTES);
                Ok(())
            }
            None => Err(DriverError::new(
                "free",
                format!("expected an address of this driver, got {:#x}", pointer.0),
            )),
        }
    }

    /// The allocation that contains a range, and the range's offset.
    fn find(&self, at: DevicePtr, bytes: usize) -> DriverResult<(&Allocation, usize)> {
        let below = self.allocations.range(..=at.0).next_back();
        let found = below.and_then(|(base, allocation)| {
            offset_in(*base, allocation, at, bytes).map(|offset| (allocation, offset))
        });
        found.ok_or_else(|| outside(at, bytes))
    }

    /// [`Memory::find`], mutably.
    fn find_mut(&mut self, at: DevicePtr, bytes: usize) -> DriverResult<(&mut Allocation, usize)> {
        let below = self.allocations.range_mut(..=at.0).next_back();
        let found = below.and_then(|(base, allocation)| {
            offset_in(*base, allocation, at, bytes).map(|offset| (allocation, offset))
        });
        found.ok_or_else(|| outside(at, bytes))
    }

    /// Rejects a range outside of all allocations.
    pub(super) fn check(&self, at: DevicePtr, bytes: usize) -> DriverResult<()> {
        if bytes == 0 { Ok(()) } else { self.find(at, bytes).map(|_| ()) }
    }

    pub(super) fn read(&self, target: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        if target.is_empty() {
            return Ok(());
        }
        let (allocation, offset) = self.find(source, target.len())?;
        for (page, start, part) in pieces(offset, target.len()) {
            let target = &mut target[part.clone()];
            match allocation.pages.get(&page) {
                Some(Page::Bytes(bytes)) => {
                    target.copy_from_slice(&bytes[start..start + part.len()]);
                }
                Some(Page::Same(byte)) => target.fill(*byte),
                None => target.fill(UNWRITTEN),
            }
        }
        Ok(())
    }

    pub(super) fn write(&mut self, target: DevicePtr, source: &[u8]) -> DriverResult<()> {
        if source.is_empty() {
            return Ok(());
        }
        let (allocation, offset) = self.find_mut(target, source.len())?;
        for (page, start, part) in pieces(offset, source.len()) {
            let bytes = allocation.bytes_of(page);
            bytes[start..start + part.len()].copy_from_slice(&source[part]);
        }
        Ok(())
    }

    pub(super) fn fill(&mut self, target: DevicePtr, byte: u8, bytes: usize) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        let (allocation, offset) = self.find_mut(target, bytes)?;
        for (page, start, part) in pieces(offset, bytes) {
            if part.len() == PAGE_BYTES {
                allocation.pages.insert(page, Page::Same(byte));
            } else {
                allocation.bytes_of(page)[start..start + part.len()].fill(byte);
            }
        }
        Ok(())
    }

    pub(super) fn copy(
        &mut self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: usize,
    ) -> DriverResult<()> {
        self.check(source, bytes)?;
        self.check(target, bytes)?;
        let mut piece = vec![0; bytes.min(PAGE_BYTES)];
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(PAGE_BYTES);
            self.read(&mut piece[..len], source.offset(done))?;
            self.write(target.offset(done), &piece[..len])?;
            done += len;
        }
        Ok(())
    }
}

impl Allocation {
    /// The bytes of a page, materialized.
    fn bytes_of(&mut self, page: usize) -> &mut [u8] {
        let entry = self.pages.entry(page).or_insert(Page::Same(UNWRITTEN));
        if let Page::Same(byte) = entry {
            *entry = Page::Bytes(vec![*byte; PAGE_BYTES].into_boxed_slice());
        }
        match entry {
            Page::Bytes(bytes) => bytes,
            Page::Same(_) => unreachable!("written out just now"),
        }
    }
}

/// Offset of a range in an allocation at `base`; `None` if the range is out of bounds.
fn offset_in(base: u64, allocation: &Allocation, at: DevicePtr, bytes: usize) -> Option<usize> {
    let offset = (at.0 - base) as usize;
    offset.checked_add(bytes).is_some_and(|end| end <= allocation.bytes).then_some(offset)
}

fn outside(at: DevicePtr, bytes: usize) -> DriverError {
    DriverError::new(
        "memory",
        format!("expected a range within one allocation, got {bytes} bytes from {:#x}", at.0),
    )
}

/// Splits a range of an allocation at page boundaries: page, offset in the page, and part of the
/// range.
fn pieces(
    offset: usize,
    bytes: usize,
) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == bytes {
            return None;
        }
        let page = (offset + done) / PAGE_BYTES;
        let start = (offset + done) % PAGE_BYTES;
        let part = done..done + (PAGE_BYTES - start).min(bytes - done);
        done = part.end;
        Some((page, start, part))
    })
}
