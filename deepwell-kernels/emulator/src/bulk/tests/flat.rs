//! Memory that copies work on, and random numbers.

use super::*;

/// Shared memory of two CTAs and global memory from [`BASE`] on.
pub(super) struct Flat {
    pub(super) shared: [Vec<u8>; 2],
    pub(super) global: Vec<u8>,
}

impl Flat {
    pub(super) fn new(global: Vec<u8>) -> Flat {
        Flat { shared: [(); 2].map(|()| vec![UNTOUCHED; SHARED_BYTES]), global }
    }

    pub(super) fn bytes(&mut self, place: Place, count: usize) -> Result<&mut [u8], Fault> {
        let (bytes, at) = match place {
            Place::Shared { rank, offset } if rank < 2 => {
                (&mut self.shared[rank as usize], offset as usize)
            }
            Place::Global(address) => (&mut self.global, address.wrapping_sub(BASE) as usize),
            _ => return Err(Fault::new("test-memory", format!("{place} is not there"))),
        };
        at.checked_add(count)
            .and_then(|end| bytes.get_mut(at..end))
            .ok_or_else(|| Fault::new("test-memory", format!("{count} bytes at {place}")))
    }
}

impl Memory for Flat {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        bytes.copy_from_slice(self.bytes(place, bytes.len())?);
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault> {
        self.bytes(place, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }
}

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `count - 1`.
    pub(super) fn below(&mut self, count: u64) -> u64 {
        self.next() % count
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}
