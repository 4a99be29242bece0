//! Layout of A and B in shared memory.
//!
//! One MMA reads 32 bytes along K of every row: two 16-byte chunks, the units of all layouts.
//!
//! K-major, row `r`, chunk `c` (0 or 1) along K:
//!
//! | swizzle | byte |
//! |---|---|
//! | none | `(r % 8) * 16 + (r / 8) * stride + c * leading` |
//! | rows of `w` bytes | `(r % 8) * w + (r / 8) * stride + c * 16` |
//!
//! MN-major, chunk `i` along M or N, index `k` along K:
//!
//! | swizzle | byte |
//! |---|---|
//! | none | `i * stride + (k % 8) * 16 + (k / 8) * leading` |
//! | rows of `w` bytes | `i % c * 16 + i / c * leading + (k % g) * w + (k / g) * stride` |
//!
//! with `c = w / 16` chunks in a row and groups of `g = 8` along K, 4 with 32-byte atoms.
//!
//! The offset is added to the start address, and the sum is swizzled ([`Swizzle::apply`]). Patterns
//! depend on addresses, so that a start address inside a pattern advances along K.

use super::elements::{CodeBuffer, Container};
use super::shared_descriptor::{SharedDescriptor, Swizzle};
use crate::error::Fault;
use crate::place::{Memory, Place};

/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16;
/// Chunks along K of one MMA.
pub const K_CHUNKS: u32 = 2;

/// The index along which elements are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// Along K ("no transpose").
    K,
    /// Along M or N ("transpose").
    Mn,
}

/// An operand of one MMA in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedTile {
    /// Matrix descriptor.
    pub descriptor: SharedDescriptor,
    /// Major direction.
    pub major: Major,
    /// Packing of the elements.
    pub container: Container,
}

impl SharedTile {
    /// Checks that the layout is legal for the start address and `rows` rows.
    ///
    /// # Errors
    /// `swizzle-major`: 32-byte atoms have no K-major layout. `shared-tile-crosses-pattern`: the
    /// chunks at this start address do not fit in one row of the swizzle pattern.
    pub fn check(&self, what: &str, rows: u32) -> Result<(), Fault> {
        let swizzle = self.descriptor.swizzle;
        if self.major == Major::K && swizzle == Swizzle::Bytes128Atom32 {
            return Err(Fault::new(
                "swizzle-major",
                format!("{what} is K-major with {swizzle}, which is for MN-major matrices only"),
            ));
        }
        if swizzle == Swizzle::None {
            return Ok(());
        }
        let row = swizzle.row_bytes();
        let chunks = match self.major {
            Major::K => K_CHUNKS,
            Major::Mn => rows.div_ceil(self.container.per_chunk()).min(row / CHUNK_BYTES),
        };
        let inside = self.descriptor.start % row;
        if inside + chunks * CHUNK_BYTES > row {
            return Err(Fault::new(
                "shared-tile-crosses-pattern",
                format!(
                    "{what} begins at byte {inside} of a row of {row} ({swizzle}), where {} bytes \
                     do not fit",
                    chunks * CHUNK_BYTES
                ),
            ));
        }
        Ok(())
    }

    /// Returns the address of a chunk. `outer` counts along M or N (rows if K-major, chunks if
    /// MN-major), `inner` along K (chunks if K-major, elements if MN-major).
    pub fn chunk_address(&self, outer: u32, inner: u32) -> u32 {
        let SharedDescriptor { start, leading, stride, base_offset, swizzle } = self.descriptor;
        let row = swizzle.row_bytes();
        let plain = swizzle == Swizzle::None;
        let offset = match self.major {
            Major::K => {
                let along = if plain { leading } else { CHUNK_BYTES };
                outer % 8 * row + outer / 8 * stride + inner * along
            }
            Major::Mn if plain => outer * stride + inner % 8 * row + inner / 8 * leading,
            Major::Mn => {
                let across = row / CHUNK_BYTES;
                let group = if swizzle == Swizzle::Bytes128Atom32 { 4 } else { 8 };
                outer % across * CHUNK_BYTES
                    + outer / across * leading
                    + inner % group * row
                    + inner / group * stride
            }
        };
        swizzle.apply(start + offset, base_offset)
    }

    /// Reads `rows` rows from the shared memory of CTA `rank` into `element_bits`, starting at row
    /// `first`.
    ///
    /// # Errors
    /// The errors of `memory`.
    pub fn read(
        &self,
        rank: u32,
        first: u32,
        rows: u32,
        element_bits: &mut CodeBuffer,
        memory: &mut dyn Memory,
    ) -> Result<(), Fault> {
        match self.major {
            Major::K => self.read_k_major(rank, first, rows, element_bits, memory),
            Major::Mn => self.read_mn_major(rank, first, rows, element_bits, memory),
        }
    }

    fn read_k_major(
        &self,
        rank: u32,
        first: u32,
        rows: u32,
        element_bits: &mut CodeBuffer,
        memory: &mut dyn Memory,
    ) -> Result<(), Fault> {
        let bytes = self.container.chunk_bytes();
        let per_chunk = self.container.per_chunk() as usize;
        let whole = bytes == CHUNK_BYTES as usize;
        let mut data = [0; (K_CHUNKS * CHUNK_BYTES) as usize];
        for row in 0..rows {
            let [low, high] = [0, 1].map(|chunk| self.chunk_address(row, chunk));
            let at = (first + row) as usize * element_bits.k();
            if whole && low.abs_diff(high) == CHUNK_BYTES {
                // Adjacent chunks in either order are one access.
                memory.read(Place::Shared { rank, offset: low.min(high) }, &mut data)?;
                let (one, other) = data.split_at(CHUNK_BYTES as usize);
                let (one, other) = if low < high { (one, other) } else { (other, one) };
                self.container.unpack(one, element_bits, at, 1);
                self.container.unpack(other, element_bits, at + per_chunk, 1);
                continue;
            }
            for (chunk, offset) in [low, high].into_iter().enumerate() {
                memory.read(Place::Shared { rank, offset }, &mut data[..bytes])?;
                self.container.unpack(&data[..bytes], element_bits, at + chunk * per_chunk, 1);
            }
        }
        Ok(())
    }

    fn read_mn_major(
        &self,
        rank: u32,
        first: u32,
        rows: u32,
        element_bits: &mut CodeBuffer,
        memory: &mut dyn Memory,
    ) -> Result<(), Fault> {
        let bytes = self.container.chunk_bytes();
        let per_chunk = self.container.per_chunk();
        let mut data = [0; CHUNK_BYTES as usize];
        let k_count = element_bits.k();
        for chunk in 0..rows.div_ceil(per_chunk) {
            // The last chunk may be half used. The whole chunk is read, as on hardware.
            let take = per_chunk.min(rows - chunk * per_chunk) as usize;
            for k in 0..k_count {
                let offset = self.chunk_address(chunk, k as u32);
                memory.read(Place::Shared { rank, offset }, &mut data[..bytes])?;
                let at = (first + chunk * per_chunk) as usize * k_count + k;
                self.container.unpack_some(&data[..bytes], take, element_bits, at, k_count);
            }
        }
        Ok(())
    }
}
