//! Types, spaces, registers and operands shared by all instruction families.

use std::fmt;

/// PTX types, including matrix elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Type {
    Predicate,
    B1,
    B8,
    B16,
    B32,
    B64,
    B128,
    U4,
    U8,
    U16,
    U32,
    U64,
    S4,
    S8,
    S16,
    S32,
    S64,
    U16x2,
    S16x2,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F32x2,
    F64,
    E4m3,
    E5m2,
    E3m2,
    E2m3,
    E2m1,
    Ue8m0,
    Ue4m3,
    E4m3x2,
    E5m2x2,
    E3m2x2,
    E2m3x2,
    E2m1x2,
    Ue8m0x2,
    E4m3x4,
    E5m2x4,
    E3m2x4,
    E2m3x4,
    E2m1x4,
    S2f6x2,
}

const TYPE_NAMES: &[(&str, Type)] = &[
    ("pred", Type::Predicate),
    ("b1", Type::B1),
    ("b8", Type::B8),
    ("b16", Type::B16),
    ("b32", Type::B32),
    ("b64", Type::B64),
    ("b128", Type::B128),
    ("u4", Type::U4),
    ("u8", Type::U8),
    ("u16", Type::U16),
    ("u32", Type::U32),
    ("u64", Type::U64),
    ("s4", Type::S4),
    ("s8", Type::S8),
    ("s16", Type::S16),
    ("s32", Type::S32),
    ("s64", Type::S64),
    ("u16x2", Type::U16x2),
    ("s16x2", Type::S16x2),
    ("f16", Type::F16),
    ("f16x2", Type::F16x2),
    ("bf16", Type::Bf16),
    ("bf16x2", Type::Bf16x2),
    ("tf32", Type::Tf32),
    ("f32", Type::F32),
    ("f32x2", Type::F32x2),
    ("f64", Type::F64),
    ("e4m3", Type::E4m3),
    ("e5m2", Type::E5m2),
    ("e3m2", Type::E3m2),
    ("e2m3", Type::E2m3),
    ("e2m1", Type::E2m1),
    ("ue8m0", Type::Ue8m0),
    ("ue4m3", Type::Ue4m3),
    ("e4m3x2", Type::E4m3x2),
    ("e5m2x2", Type::E5m2x2),
    ("e3m2x2", Type::E3m2x2),
    ("e2m3x2", Type::E2m3x2),
    ("e2m1x2", Type::E2m1x2),
    ("ue8m0x2", Type::Ue8m0x2),
    ("e4m3x4", Type::E4m3x4),
    ("e5m2x4", Type::E5m2x4),
    ("e3m2x4", Type::E3m2x4),
    ("e2m3x4", Type::E2m3x4),
    ("e2m1x4", Type::E2m1x4),
    ("s2f6x2", Type::S2f6x2),
];

impl Type {
    /// Returns the type of a name such as `bf16x2`.
    pub fn from_name(name: &str) -> Option<Type> {
        TYPE_NAMES.iter().find(|row| row.0 == name).map(|row| row.1)
    }

    /// Name in PTX, without the dot.
    pub fn name(self) -> &'static str {
        TYPE_NAMES.iter().find(|row| row.1 == self).map_or("?", |row| row.0)
    }

    /// Bits of a value, over all its parts.
    #[inline]
    pub const fn bits(self) -> u32 {
        use Type as T;
        match self {
            T::Predicate | T::B1 => 1,
            T::U4 | T::S4 | T::E2m1 => 4,
            T::E3m2 | T::E2m3 => 6,
            T::B8 | T::U8 | T::S8 | T::E4m3 | T::E5m2 | T::Ue8m0 | T::Ue4m3 | T::E2m1x2 => 8,
            T::B16 | T::U16 | T::S16 | T::F16 | T::Bf16 => 16,
            T::E4m3x2 | T::E5m2x2 | T::E3m2x2 | T::E2m3x2 | T::Ue8m0x2 | T::S2f6x2 => 16,
            T::E2m1x4 => 16,
            T::B32 | T::U32 | T::S32 | T::F32 | T::Tf32 => 32,
            T::U16x2 | T::S16x2 | T::F16x2 | T::Bf16x2 => 32,
            T::E4m3x4 | T::E5m2x4 | T::E3m2x4 | T::E2m3x4 => 32,
            T::B64 | T::U64 | T::S64 | T::F64 | T::F32x2 => 64,
            T::B128 => 128,
        }
    }

    /// Bytes of a value in memory.
    pub fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// Whether this is a signed integer of at most 64 bits.
    #[inline]
    pub fn is_signed(self) -> bool {
        matches!(self, Type::S4 | Type::S8 | Type::S16 | Type::S32 | Type::S64 | Type::S16x2)
    }

    /// Whether this is an unpacked integer or untyped bits.
    pub fn is_integer(self) -> bool {
        use Type::{B8, B16, B32, B64, S8, S16, S32, S64, U8, U16, U32, U64};
        matches!(self, B8 | B16 | B32 | B64 | S8 | S16 | S32 | S64 | U8 | U16 | U32 | U64)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// State spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Generic addresses, which encode their space.
    Generic,
    /// Device memory.
    Global,
    /// Shared memory of the executing CTA (`.shared`, `.shared::cta`).
    Shared,
    /// Shared memory of all CTAs of the cluster (`.shared::cluster`).
    SharedCluster,
    /// Local memory of a thread.
    Local,
    /// Kernel parameters.
    Parameter,
    /// Constants of the module.
    Constant,
}

/// Memory order of an access or a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Semantics {
    Weak,
    Volatile,
    Mmio,
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
    SequentiallyConsistent,
}

/// Set of threads for which an order holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Scope {
    Cta,
    Cluster,
    Device,
    System,
}

/// A value register, as an index into its class. A 128-bit register is two consecutive 64-bit
/// registers, low half first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// 8 or 16 bits (signed or not), in a 32-bit word whose upper half is zero.
    Half(u32),
    /// 32 bits. Shares words and numbering with [`Register::Half`].
    Word(u32),
    /// 64 bits, in a class of its own.
    Long(u32),
}

impl Register {
    /// Bits of the register.
    pub fn bits(self) -> u32 {
        match self {
            Register::Half(_) => 16,
            Register::Word(_) => 32,
            Register::Long(_) => 64,
        }
    }
}

/// Sources of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A register.
    Register(Register),
    /// The same bits in all lanes: bits of the instruction's type, zero-extended to 64 bits
    /// (sign-extended for integers that are negative in the text).
    Immediate(u64),
}

/// A predicate register, possibly negated, or a constant. A predicate register is a mask of 32
/// lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PredicateSource {
    /// `p` or `!p`.
    Register {
        /// Index of the register.
        index: u32,
        /// Whether the predicate is negated.
        negated: bool,
    },
    /// The same value in all lanes.
    Constant(bool),
}

impl PredicateSource {
    /// Returns the negation.
    pub fn negate(self) -> PredicateSource {
        match self {
            PredicateSource::Register { index, negated } => {
                PredicateSource::Register { index, negated: !negated }
            }
            PredicateSource::Constant(value) => PredicateSource::Constant(!value),
        }
    }
}

/// `[base + offset]`. Resolved symbols are part of `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A register of 32 or 64 bits, or an immediate (0 for a plain offset).
    pub base: Source,
    /// Byte offset.
    pub offset: i64,
}

/// Address of an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Barrier64 {
    /// [`Space::Shared`], [`Space::SharedCluster`] or [`Space::Generic`].
    pub space: Space,
    /// Address of the first byte.
    pub address: Address,
}
