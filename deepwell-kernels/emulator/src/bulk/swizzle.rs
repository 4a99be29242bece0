//! Swizzle patterns of tensor copies in shared memory.

use serde::{Deserialize, Serialize};

/// Atoms, the contiguous units of [`Swizzle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SwizzleAtom {
    Bytes16,
    Bytes32,
    /// [`SwizzleAtom::Bytes32`], with the halves of every 16 bytes exchanged in every second
    /// 128-byte line.
    Bytes32Flip8,
    Bytes64,
}

/// Swizzle pattern of a box in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Swizzle {
    /// No swizzle.
    #[default]
    #[serde(rename = "none")]
    None,
    /// 16-byte atoms within 32 bytes.
    #[serde(rename = "32B")]
    Bytes32,
    /// 16-byte atoms within 64 bytes.
    #[serde(rename = "64B")]
    Bytes64,
    /// 16-byte atoms within 128 bytes.
    #[serde(rename = "128B")]
    Bytes128,
    /// 32-byte atoms within 128 bytes.
    #[serde(rename = "128B_atom_32B")]
    Bytes128Atom32,
    /// [`SwizzleAtom::Bytes32Flip8`] within 128 bytes.
    #[serde(rename = "128B_atom_32B_flip_8B")]
    Bytes128Atom32Flip8,
    /// 64-byte atoms within 128 bytes.
    #[serde(rename = "128B_atom_64B")]
    Bytes128Atom64,
}

impl Swizzle {
    /// All patterns, in the order of `CUtensorMapSwizzle`.
    pub const ALL: [Swizzle; 7] = [
        Swizzle::None,
        Swizzle::Bytes32,
        Swizzle::Bytes64,
        Swizzle::Bytes128,
        Swizzle::Bytes128Atom32,
        Swizzle::Bytes128Atom32Flip8,
        Swizzle::Bytes128Atom64,
    ];

    /// Returns the pattern of a `CUtensorMapSwizzle` value.
    pub fn from_driver(code: u32) -> Option<Swizzle> {
        Swizzle::ALL.get(code as usize).copied()
    }

    /// Bytes within which atoms are permuted; also the largest inner extent of a box. `None`
    /// without swizzle.
    pub fn span_bytes(self) -> Option<u32> {
        match self {
            Swizzle::None => None,
            Swizzle::Bytes32 => Some(32),
            Swizzle::Bytes64 => Some(64),
            _ => Some(128),
        }
    }

    /// Returns the codes of `tensormap.replace`: swizzle mode and atomicity.
    pub(super) fn ptx_codes(self) -> (u8, u8) {
        match self {
            Swizzle::None => (0, 0),
            Swizzle::Bytes32 => (1, 0),
            Swizzle::Bytes64 => (2, 0),
            Swizzle::Bytes128 => (3, 0),
            Swizzle::Bytes128Atom32 => (3, 1),
            Swizzle::Bytes128Atom32Flip8 => (3, 2),
            Swizzle::Bytes128Atom64 => (3, 3),
        }
    }

    /// The inverse of [`Swizzle::ptx_codes`].
    pub(super) fn from_ptx(mode: u8, atomicity: u8) -> Option<Swizzle> {
        Swizzle::ALL.into_iter().find(|swizzle| swizzle.ptx_codes() == (mode, atomicity))
    }

    /// Returns the atom of the pattern.
    pub fn atom(self) -> SwizzleAtom {
        match self {
            Swizzle::Bytes128Atom32 => SwizzleAtom::Bytes32,
            Swizzle::Bytes128Atom32Flip8 => SwizzleAtom::Bytes32Flip8,
            Swizzle::Bytes128Atom64 => SwizzleAtom::Bytes64,
            _ => SwizzleAtom::Bytes16,
        }
    }
}

/// Returns the swizzled address of a byte. Bits of the 128-byte line number (address bits 7 and up)
/// are XORed into the atom index. `address` is the address in shared memory, so that a box that
/// does not begin at a pattern boundary begins inside the pattern (PTX ISA, swizzling modes: `base
/// offset`).
///
/// Applying the function twice returns the original address.
pub fn swizzle_address(swizzle: Swizzle, address: u32) -> u32 {
    let line = address >> 7;
    match swizzle {
        Swizzle::None => address,
        Swizzle::Bytes32 => address ^ ((line & 1) << 4),
        Swizzle::Bytes64 => address ^ ((line & 3) << 4),
        Swizzle::Bytes128 => address ^ ((line & 7) << 4),
        Swizzle::Bytes128Atom32 => address ^ ((line & 3) << 5),
        Swizzle::Bytes128Atom32Flip8 => address ^ ((line & 3) << 5) ^ ((line & 1) << 3),
        Swizzle::Bytes128Atom64 => address ^ ((line & 1) << 6),
    }
}
