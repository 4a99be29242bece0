//! Matrix descriptors of shared memory.

use std::fmt;

use crate::error::Fault;

/// Permutation of the 16-byte chunks of a matrix in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// No permutation.
    None,
    /// Within rows of 32 bytes.
    Bytes32,
    /// Within rows of 64 bytes.
    Bytes64,
    /// Within rows of 128 bytes.
    Bytes128,
    /// Within rows of 128 bytes, in atoms of 32 bytes.
    Bytes128Atom32,
}

impl Swizzle {
    /// Bytes of a row of the pattern; 16 for no swizzle.
    pub fn row_bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 | Swizzle::Bytes128Atom32 => 128,
        }
    }

    /// Returns the swizzled address of the byte at `address`. Address bits from bit 4 (5 for the
    /// 32-byte atom) on are XORed with bits from bit 7 on. `base_offset` is the pattern's first
    /// 128-byte row, modulo 8.
    pub fn apply(self, address: u32, base_offset: u32) -> u32 {
        let (mask, shift) = match self {
            Swizzle::None => return address,
            Swizzle::Bytes32 => (1, 4),
            Swizzle::Bytes64 => (3, 4),
            Swizzle::Bytes128 => (7, 4),
            Swizzle::Bytes128Atom32 => (3, 5),
        };
        address ^ (((address >> 7).wrapping_sub(base_offset) & mask) << shift)
    }
}

impl fmt::Display for Swizzle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Swizzle::None => "no swizzle",
            Swizzle::Bytes32 => "32-byte swizzle",
            Swizzle::Bytes64 => "64-byte swizzle",
            Swizzle::Bytes128 => "128-byte swizzle",
            Swizzle::Bytes128Atom32 => "128-byte swizzle with 32-byte atoms",
        })
    }
}

/// The fields of a 64-bit matrix descriptor.
///
/// ```text
/// 63  61 60    53 52 51  49 48 46 45      32 31 30 29      16 15 14 13       0
/// swizzle  zero  mode base  0b001  stride/16   -    leading/16   -    start/16
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedDescriptor {
    /// First byte, in the low 18 bits of a shared address.
    pub start: u32,
    /// Leading dimension offset in bytes.
    pub leading: u32,
    /// Stride dimension offset in bytes.
    pub stride: u32,
    /// The 128-byte row, modulo 8, at which the swizzle pattern begins.
    pub base_offset: u32,
    /// Permutation of chunks.
    pub swizzle: Swizzle,
}

impl SharedDescriptor {
    /// Decodes a descriptor.
    ///
    /// # Errors
    /// `shared-descriptor-version` (bits 46 to 48), `shared-descriptor-reserved` (bits 14, 15, 30,
    /// 31, 53 to 60), `shared-descriptor-swizzle` (bit patterns 3, 5, 7),
    /// `shared-descriptor-leading-mode` (an absolute leading address, only for MMAs of K = 96 on
    /// sm_103a), `shared-descriptor-base-offset` (a base offset without a swizzle).
    pub fn decode(what: &str, bits: u64) -> Result<SharedDescriptor, Fault> {
        let field = |at: u32, width: u32| (bits >> at) as u32 & ((1 << width) - 1);
        let fault = |rule, why: String| {
            Err(Fault::new(rule, format!("descriptor {bits:#018x} of {what}: {why}")))
        };
        if field(46, 3) != 1 {
            return fault(
                "shared-descriptor-version",
                format!("expected 0b001 in bits 46 to 48, got {:#05b}", field(46, 3)),
            );
        }
        for (at, width) in [(14, 2), (30, 2), (53, 8)] {
            if field(at, width) != 0 {
                return fault(
                    "shared-descriptor-reserved",
                    format!(
                        "expected zeros in bits {at} to {}, got {:#b}; addresses are cut to 18 \
                         bits before they go in",
                        at + width - 1,
                        field(at, width)
                    ),
                );
            }
        }
        let swizzle = match field(61, 3) {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128Atom32,
            2 => Swizzle::Bytes128,
            4 => Swizzle::Bytes64,
            6 => Swizzle::Bytes32,
            code => {
                return fault(
                    "shared-descriptor-swizzle",
                    format!("expected swizzle 0, 1, 2, 4 or 6 in bits 61 to 63, got {code}"),
                );
            }
        };
        if field(52, 1) != 0 {
            return fault(
                "shared-descriptor-leading-mode",
                "an absolute leading address (bit 52) is for K = 96 of sm_103a only".to_string(),
            );
        }
        let base_offset = field(49, 3);
        if base_offset != 0 && swizzle == Swizzle::None {
            return fault(
                "shared-descriptor-base-offset",
                format!("base offset {base_offset} (bits 49 to 51) without a swizzle pattern"),
            );
        }
        Ok(SharedDescriptor {
            start: field(0, 14) << 4,
            leading: field(16, 14) << 4,
            stride: field(32, 14) << 4,
            base_offset,
            swizzle,
        })
    }

    /// Returns the 64-bit encoding.
    pub fn encode(&self) -> u64 {
        let swizzle = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128Atom32 => 1,
            Swizzle::Bytes128 => 2,
            Swizzle::Bytes64 => 4,
            Swizzle::Bytes32 => 6,
        };
        let address = |bytes: u32| u64::from(bytes >> 4 & 0x3fff);
        address(self.start)
            | address(self.leading) << 16
            | address(self.stride) << 32
            | 1 << 46
            | u64::from(self.base_offset & 7) << 49
            | swizzle << 61
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: SharedDescriptor = SharedDescriptor {
        start: 0x2_0400,
        leading: 16,
        stride: 1024,
        base_offset: 0,
        swizzle: Swizzle::Bytes128,
    };

    #[test]
    fn fields_come_back() {
        for swizzle in [
            Swizzle::None,
            Swizzle::Bytes32,
            Swizzle::Bytes64,
            Swizzle::Bytes128,
            Swizzle::Bytes128Atom32,
        ] {
            let base_offset = if swizzle == Swizzle::None { 0 } else { 5 };
            let descriptor = SharedDescriptor { swizzle, base_offset, ..PLAIN };
            assert_eq!(SharedDescriptor::decode("A", descriptor.encode()).unwrap(), descriptor);
        }
        // The encoding that hand-written kernels use.
        assert_eq!(PLAIN.encode(), 0x2040 | 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61);
    }

    #[test]
    fn illegal_bits_have_names() {
        let plain = PLAIN.encode();
        let rows = [
            (plain & !(1 << 46), "shared-descriptor-version"),
            (plain | 1 << 47, "shared-descriptor-version"),
            (plain | 1 << 48, "shared-descriptor-version"),
            (plain | 1 << 14, "shared-descriptor-reserved"),
            (plain | 1 << 31, "shared-descriptor-reserved"),
            (plain | 1 << 53, "shared-descriptor-reserved"),
            (plain | 1 << 60, "shared-descriptor-reserved"),
            (plain | 1 << 52, "shared-descriptor-leading-mode"),
            (plain | 1 << 61, "shared-descriptor-swizzle"),
            (plain | 5 << 61, "shared-descriptor-swizzle"),
            (plain & !(7 << 61) | 1 << 49, "shared-descriptor-base-offset"),
        ];
        for (bits, rule) in rows {
            assert_eq!(SharedDescriptor::decode("A", bits).unwrap_err().rule, rule, "{bits:#x}");
        }
    }

    #[test]
    fn swizzles_are_permutations_of_their_pattern() {
        for (swizzle, bytes) in [
            (Swizzle::Bytes32, 256),
            (Swizzle::Bytes64, 512),
            (Swizzle::Bytes128, 1024),
            (Swizzle::Bytes128Atom32, 512),
        ] {
            for base_offset in 0..8 {
                let mut seen = vec![false; bytes as usize];
                for address in 0..bytes {
                    let to = swizzle.apply(address, base_offset);
                    assert_eq!(to / swizzle.row_bytes(), address / swizzle.row_bytes());
                    assert!(!std::mem::replace(&mut seen[to as usize], true));
                    // A pattern that begins one row later is the same pattern, shifted by a row.
                    let moved = swizzle.apply(address + 128 * base_offset, base_offset);
                    assert_eq!(moved, swizzle.apply(address, 0) + 128 * base_offset);
                }
            }
        }
    }
}
