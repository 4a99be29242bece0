//! Packing of elements in 16-byte chunks.

use crate::number::Format;
use crate::numerics::ElementBits;

/// Contents of a 16-byte chunk in shared memory, or of four columns of a tensor-memory lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    /// 4 words of 32 bits.
    Words,
    /// 8 halves of 16 bits.
    Halves,
    /// 16 bytes.
    Bytes,
    /// 16 bytes with a 6-bit element in the lower bits of each; tensor memory.
    Bytes6,
    /// 16 bytes with a 4-bit element in bits 2 to 5 of each; tensor memory.
    Bytes4,
    /// 16 packed elements of 6 bits, and 4 bytes of padding; shared memory.
    Padded6,
    /// 16 packed elements of 4 bits, and 8 bytes of padding; shared memory.
    Padded4,
    /// 32 elements of 4 bits, the first one in the low half of its byte.
    Packed4,
}

impl Container {
    /// Returns the container of `format` in shared memory. `packed` is true for kinds whose 4-bit
    /// elements have no padding (`mxf4`, `mxf4nvf4`).
    pub fn shared(format: Format, packed: bool) -> Container {
        match format.bits() {
            32 => Container::Words,
            16 => Container::Halves,
            6 => Container::Padded6,
            4 if packed => Container::Packed4,
            4 => Container::Padded4,
            _ => Container::Bytes,
        }
    }

    /// Returns the container of `format` in tensor memory.
    pub fn tensor(format: Format, packed: bool) -> Container {
        match Container::shared(format, packed) {
            Container::Padded6 => Container::Bytes6,
            Container::Padded4 => Container::Bytes4,
            other => other,
        }
    }

    /// Elements in a chunk.
    pub fn per_chunk(self) -> u32 {
        match self {
            Container::Words => 4,
            Container::Halves => 8,
            Container::Packed4 => 32,
            _ => 16,
        }
    }

    /// Bytes of a chunk without padding.
    pub fn chunk_bytes(self) -> usize {
        match self {
            Container::Padded6 => 12,
            Container::Padded4 => 8,
            _ => 16,
        }
    }

    /// Unpacks all elements of a chunk to `at`, `at + step`, and so on.
    pub fn unpack(self, data: &[u8], element_bits: &mut CodeBuffer, at: usize, step: usize) {
        self.unpack_some(data, self.per_chunk() as usize, element_bits, at, step);
    }

    /// Unpacks the first `take` elements of a chunk.
    pub fn unpack_some(
        self,
        data: &[u8],
        take: usize,
        element_bits: &mut CodeBuffer,
        at: usize,
        step: usize,
    ) {
        match &mut element_bits.element_bits {
            Buffer::U32(element_bits) => {
                for (i, word) in data.as_chunks::<4>().0.iter().take(take).enumerate() {
                    element_bits[at + i * step] = u32::from_le_bytes(*word);
                }
            }
            Buffer::U16(element_bits) => {
                for (i, half) in data.as_chunks::<2>().0.iter().take(take).enumerate() {
                    element_bits[at + i * step] = u16::from_le_bytes(*half);
                }
            }
            Buffer::U8(element_bits) => {
                for i in 0..take {
                    element_bits[at + i * step] = self.code(data, i);
                }
            }
        }
    }

    fn code(self, data: &[u8], i: usize) -> u8 {
        match self {
            Container::Bytes6 => data[i] & 0x3f,
            Container::Bytes4 => data[i] >> 2 & 0xf,
            Container::Padded6 => bits6(data, i),
            Container::Padded4 | Container::Packed4 => data[i / 2] >> (i % 2 * 4) & 0xf,
            _ => data[i],
        }
    }
}

/// Returns element `i` of packed 6-bit elements.
pub(super) fn bits6(data: &[u8], i: usize) -> u8 {
    let (byte, shift) = (i * 6 / 8, i * 6 % 8);
    let next = data.get(byte + 1).copied().unwrap_or(0);
    (u16::from_le_bytes([data[byte], next]) >> shift) as u8 & 0x3f
}

/// Row-major bit patterns of a matrix, in the narrowest integers that hold them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeBuffer {
    element_bits: Buffer,
    k: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Buffer {
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl CodeBuffer {
    /// Creates `rows` x `k` zeros.
    pub fn new(format: Format, rows: u32, k: u32) -> CodeBuffer {
        let count = (rows * k) as usize;
        let element_bits = match format.bits() {
            32 => Buffer::U32(vec![0; count]),
            16 => Buffer::U16(vec![0; count]),
            _ => Buffer::U8(vec![0; count]),
        };
        CodeBuffer { element_bits, k: k as usize }
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns `count` rows starting at `first`.
    pub fn rows(&self, first: u32, count: u32) -> ElementBits<'_> {
        let range = first as usize * self.k..(first + count) as usize * self.k;
        match &self.element_bits {
            Buffer::U8(element_bits) => ElementBits::U8(&element_bits[range]),
            Buffer::U16(element_bits) => ElementBits::U16(&element_bits[range]),
            Buffer::U32(element_bits) => ElementBits::U32(&element_bits[range]),
        }
    }
}
