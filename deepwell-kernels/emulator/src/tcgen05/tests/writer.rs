//! Writes matrices to shared memory by the canonical layouts: every element gets its place from a
//! layout `((..), (..)):((..), (..))` in elements, as the tables give them, and then from
//! `Swizzle<B, M, S>`. Nothing of the code under test is used.

use super::memory::PairMemory;
use crate::tcgen05::{Major, SharedDescriptor, Swizzle};

/// A matrix of 16-byte chunks of `t` elements, as large as K of several MMAs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) rank: u32,
    pub(super) start: u32,
    pub(super) swizzle: Swizzle,
    pub(super) major: Major,
    /// Elements in 16 bytes.
    pub(super) t: u32,
    /// Bits of an element in its chunk.
    pub(super) bits: u32,
    pub(super) rows: u32,
    pub(super) k: u32,
}

/// Position `index` of a mode with nested shape and strides, first part fastest.
fn dot(mut index: u32, shape: &[u32], strides: &[u32]) -> u32 {
    let mut offset = 0;
    for (i, stride) in strides.iter().enumerate() {
        let size = shape.get(i).copied().unwrap_or(u32::MAX);
        offset += index % size * stride;
        index /= size;
    }
    offset
}

impl Matrix {
    /// Chunks in a row of the swizzle pattern.
    fn w(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => 1,
            Swizzle::Bytes32 => 2,
            Swizzle::Bytes64 => 4,
            Swizzle::Bytes128 | Swizzle::Bytes128Atom32 => 8,
        }
    }

    /// K elements in one group of rows when MN-major.
    fn group(&self) -> u32 {
        if self.swizzle == Swizzle::Bytes128Atom32 { 4 } else { 8 }
    }

    /// Leading and stride offsets in bytes: with gaps, so that they matter.
    pub(super) fn strides(&self) -> (u32, u32) {
        let plain = self.swizzle == Swizzle::None;
        match self.major {
            Major::K if plain => (self.rows.div_ceil(8) * 144 + 32, 144),
            Major::K => (16, 2 * 8 * 16 * self.w()),
            Major::Mn if plain => (self.rows.div_ceil(self.t) * 144 + 32, 144),
            Major::Mn => {
                let stride = 2 * self.group() * 16 * self.w();
                (self.k.div_ceil(self.group()) * stride + 1024, stride)
            }
        }
    }

    /// Bytes between parts of K that do not fit in one row of the pattern.
    fn atom_bytes(&self) -> u32 {
        self.rows.div_ceil(8) * self.strides().1 + 1024
    }

    /// Descriptor of the MMA that begins at element `k`.
    pub(super) fn descriptor(&self, k: u32) -> SharedDescriptor {
        let (leading, stride) = self.strides();
        let chunk = k / self.t;
        let advance = match (self.major, self.swizzle) {
            (Major::K, Swizzle::None) => chunk * leading,
            (Major::K, _) => chunk / self.w() * self.atom_bytes() + chunk % self.w() * 16,
            (Major::Mn, Swizzle::None) => k / 8 * leading,
            (Major::Mn, _) => k / self.group() * stride,
        };
        SharedDescriptor {
            start: self.start + advance,
            leading,
            stride,
            base_offset: 0,
            swizzle: self.swizzle,
        }
    }

    /// First byte of the chunk of an element, and the element's number in it.
    fn place(&self, row: u32, k: u32) -> (u32, u32) {
        let t = self.t;
        let w = self.w();
        let (leading, stride) = self.strides();
        let elements = |bytes: u32| bytes / 16 * t;
        let (lbo, sbo) = (elements(leading), elements(stride));
        let offset = match (self.major, self.swizzle) {
            (Major::K, Swizzle::None) => dot(row, &[8], &[t, sbo]) + dot(k, &[t], &[1, lbo]),
            (Major::K, _) => {
                let atom = elements(self.atom_bytes());
                dot(row, &[8], &[w * t, sbo]) + dot(k, &[t, w], &[1, t, atom])
            }
            (Major::Mn, Swizzle::None) => dot(row, &[t], &[1, sbo]) + dot(k, &[8], &[t, lbo]),
            (Major::Mn, _) => {
                dot(row, &[t, w], &[1, t, lbo]) + dot(k, &[self.group()], &[w * t, sbo])
            }
        };
        let address = self.start + offset / t * 16;
        let (b, m, s) = match self.swizzle {
            Swizzle::None => (0, 4, 3),
            Swizzle::Bytes32 => (1, 4, 3),
            Swizzle::Bytes64 => (2, 4, 3),
            Swizzle::Bytes128 => (3, 4, 3),
            Swizzle::Bytes128Atom32 => (2, 5, 2),
        };
        let selected = address & ((1 << b) - 1) << (m + s);
        (address ^ selected >> s, offset % t)
    }

    pub(super) fn write(&self, memory: &mut PairMemory, code: impl Fn(u32, u32) -> u32) {
        for row in 0..self.rows {
            for k in 0..self.k {
                let (chunk, nth) = self.place(row, k);
                let code = code(row, k);
                for bit in 0..self.bits {
                    let at = nth * self.bits + bit;
                    let old = memory.byte(self.rank, chunk + at / 8);
                    let mask = 1 << (at % 8);
                    let new = if code >> bit & 1 == 1 { old | mask } else { old & !mask };
                    memory.write_byte(self.rank, chunk + at / 8, new);
                }
            }
        }
    }
}
