//! Matrix descriptors of `wgmma`.

use crate::error::Fault;
use crate::place::{Memory, Place};

/// Bytes of a chunk, the unit of swizzling.
const CHUNK_BYTES: usize = 16;

/// Swizzle pattern of a matrix in shared memory, by the bytes of a pattern row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Swizzle {
    None,
    Bytes128,
    Bytes64,
    Bytes32,
}

impl Swizzle {
    /// Patterns by descriptor code.
    const BY_CODE: [Swizzle; 4] =
        [Swizzle::None, Swizzle::Bytes128, Swizzle::Bytes64, Swizzle::Bytes32];

    /// Number of 16-byte chunks in a row of the pattern.
    pub fn chunks(self) -> u32 {
        match self {
            Swizzle::None => 1,
            Swizzle::Bytes32 => 2,
            Swizzle::Bytes64 => 4,
            Swizzle::Bytes128 => 8,
        }
    }
}

/// The 64-bit matrix descriptor of `wgmma`. All sizes are multiples of 16 below 2^18.
///
/// | bits | field |
/// |---|---|
/// | 0 to 13 | start / 16 |
/// | 16 to 29 | leading offset / 16 |
/// | 32 to 45 | stride offset / 16 |
/// | 49 to 51 | base offset |
/// | 62, 63 | swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// First byte in shared memory.
    pub start: u32,
    /// Leading dimension byte offset.
    pub leading_bytes: u32,
    /// Stride dimension byte offset.
    pub stride_bytes: u32,
    /// The 128-byte line of the pattern at which the matrix begins, 0 to 7.
    pub base_offset: u32,
    /// Swizzle pattern.
    pub swizzle: Swizzle,
}

const RESERVED: u64 = !(0x3fff | 0x3fff << 16 | 0x3fff << 32 | 0x7 << 49 | 0x3 << 62);

impl Descriptor {
    /// Decodes a descriptor.
    ///
    /// # Errors
    /// `wgmma-descriptor` for set bits outside of all fields, and for a base offset without
    /// swizzle.
    pub fn decode(bits: u64) -> Result<Descriptor, Fault> {
        if bits & RESERVED != 0 {
            return Err(Fault::new(
                "wgmma-descriptor",
                format!(
                    "a matrix descriptor has bits set that belong to no field: {:#x} of {bits:#x}",
                    bits & RESERVED
                ),
            ));
        }
        let field = |at: u32| ((bits >> at) as u32 & 0x3fff) << 4;
        let descriptor = Descriptor {
            start: field(0),
            leading_bytes: field(16),
            stride_bytes: field(32),
            base_offset: (bits >> 49) as u32 & 7,
            swizzle: Swizzle::BY_CODE[(bits >> 62) as usize],
        };
        if descriptor.swizzle == Swizzle::None && descriptor.base_offset != 0 {
            return Err(Fault::new(
                "wgmma-descriptor",
                format!(
                    "a matrix descriptor without swizzle has no base offset, got {}",
                    descriptor.base_offset
                ),
            ));
        }
        Ok(descriptor)
    }

    /// Returns the 64-bit encoding. Sizes are truncated to their fields.
    pub fn encode(&self) -> u64 {
        let field = |bytes: u32| u64::from(bytes >> 4 & 0x3fff);
        let swizzle = Swizzle::BY_CODE.iter().position(|&one| one == self.swizzle).unwrap_or(0);
        field(self.start)
            | field(self.leading_bytes) << 16
            | field(self.stride_bytes) << 32
            | u64::from(self.base_offset & 7) << 49
            | (swizzle as u64) << 62
    }

    /// Returns the swizzled address of a chunk. The number of its 128-byte line, relative to the
    /// base offset, is XORed into its position in the pattern.
    fn swizzled(&self, address: u32) -> u32 {
        let line = (address >> 7).wrapping_sub(self.base_offset);
        address ^ (line & (self.swizzle.chunks() - 1)) << 4
    }
}

/// An operand of an instruction: A as `[M, K]` or B as `[N, K]`, where K is 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Matrix descriptor.
    pub descriptor: Descriptor,
    /// M or N.
    pub rows: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element_bytes: u32,
    /// Whether elements are contiguous along M or N instead of K (`imm-trans`).
    pub is_transposed: bool,
}

impl Tile {
    /// Returns the address of a 16-byte chunk. K-major: two chunks per row, with 16 bytes of K
    /// each. Transposed: for every 16 bytes of M or N, one chunk per element of K.
    ///
    /// Canonical layouts in bytes, where W is [`Swizzle::chunks`]:
    ///
    /// | | row `r`, chunk `c` of K | chunk `c` of rows, element `k` of K |
    /// |---|---|---|
    /// | no swizzle | `r/8 SBO + r%8 16 + c LBO` | `c SBO + k%8 16 + k/8 LBO` |
    /// | swizzle | `r/8 SBO + r%8 16 W + c 16` | `c/W LBO + c%W 16 + k%8 16 W + k/8 SBO` |
    fn chunk(&self, outer: u32, inner: u32) -> u32 {
        let Descriptor { start, leading_bytes, stride_bytes, swizzle, .. } = self.descriptor;
        let w = swizzle.chunks();
        let offset = match (self.is_transposed, swizzle) {
            (false, Swizzle::None) => {
                outer / 8 * stride_bytes + outer % 8 * 16 + inner * leading_bytes
            }
            (false, _) => outer / 8 * stride_bytes + outer % 8 * 16 * w + inner * 16,
            (true, Swizzle::None) => {
                outer * stride_bytes + inner % 8 * 16 + inner / 8 * leading_bytes
            }
            (true, _) => {
                outer / w * leading_bytes
                    + outer % w * 16
                    + inner % 8 * 16 * w
                    + inner / 8 * stride_bytes
            }
        };
        self.descriptor.swizzled(start + offset)
    }

    /// Reads rows `first` to `first + count` of CTA `rank` as bit patterns `[count, K]`.
    ///
    /// # Errors
    /// The errors of the memory.
    pub fn read(
        &self,
        rank: u32,
        (first, count): (u32, u32),
        memory: &mut dyn Memory,
    ) -> Result<Vec<u32>, Fault> {
        let size = self.element_bytes as usize;
        let per_chunk = CHUNK_BYTES / size;
        let k = 2 * per_chunk;
        let mut element_bits = vec![0; count as usize * k];
        let mut chunk = [0; CHUNK_BYTES];
        if self.is_transposed {
            let chunks = per_chunk as u32;
            for outer in first / chunks..(first + count).div_ceil(chunks) {
                for inner in 0..k as u32 {
                    let offset = self.chunk(outer, inner);
                    memory.read(Place::Shared { rank, offset }, &mut chunk)?;
                    for (i, bytes) in chunk.chunks_exact(size).enumerate() {
                        let row = (outer as usize * per_chunk + i).wrapping_sub(first as usize);
                        if row < count as usize {
                            element_bits[row * k + inner as usize] = code(bytes);
                        }
                    }
                }
            }
            return Ok(element_bits);
        }
        for (row, target) in (first..first + count).zip(element_bits.chunks_exact_mut(k)) {
            for (inner, target) in target.chunks_exact_mut(per_chunk).enumerate() {
                let offset = self.chunk(row, inner as u32);
                memory.read(Place::Shared { rank, offset }, &mut chunk)?;
                for (target, bytes) in target.iter_mut().zip(chunk.chunks_exact(size)) {
                    *target = code(bytes);
                }
            }
        }
        Ok(element_bits)
    }
}

fn code(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |code, &byte| code << 8 | u32::from(byte))
}
