//! Instructions of the fifth-generation tensor cores.

use super::matrix_instruction::MmaKind;
use super::types::{Address, PredicateSource, Register, Source, Space};

/// `tcgen05.*`. `group` is the number of CTAs (`.cta_group`): 1 or 2.
#[derive(Clone, Debug, PartialEq)]
pub enum Tcgen05 {
    /// `alloc`: writes the address of the allocated columns to shared memory.
    Allocate {
        /// `.cta_group`: 1 or 2.
        group: u32,
        /// Shared-memory address for the result, 4 bytes.
        target: Address,
        /// [`Space::Shared`] or [`Space::Generic`].
        space: Space,
        /// Number of columns, a power of two from 32 to 512.
        columns: Source,
    },
    /// `dealloc`.
    Deallocate {
        /// `.cta_group`: 1 or 2.
        group: u32,
        /// Tensor memory address.
        address: Source,
        /// Number of columns, a power of two from 32 to 512.
        columns: Source,
    },
    /// `relinquish_alloc_permit`.
    Relinquish {
        /// `.cta_group`: 1 or 2.
        group: u32,
    },
    /// `mma`.
    Mma(Box<Tcgen05Mma>),
    /// `cp`.
    Copy {
        /// `.cta_group`: 1 or 2.
        group: u32,
        /// Shape and multicast.
        shape: Tcgen05CopyShape,
        /// Decompression to 8 bits.
        source_format: Tcgen05CopyFormat,
        /// Tensor memory address.
        target: Address,
        /// Matrix descriptor.
        descriptor: Source,
    },
    /// `shift.down`.
    Shift {
        /// `.cta_group`: 1 or 2.
        group: u32,
        /// Tensor memory address.
        address: Address,
    },
    /// `commit`.
    Commit {
        /// `.cta_group`: 1 or 2.
        group: u32,
        /// The mbarrier that gets one arrival.
        barrier: Address,
        /// [`Space::SharedCluster`] or [`Space::Generic`].
        space: Space,
        /// `.multicast::cluster`: one bit per rank.
        multicast: Option<Source>,
    },
    /// `ld`.
    Load {
        /// Layout over lanes and columns.
        shape: Tcgen05Shape,
        /// `.x1` to `.x128`.
        repeat: u32,
        /// `.pack::16b`.
        pack: bool,
        /// Offset of the second half of `.16x32bx2`, in columns.
        half_offset: u32,
        /// Destinations, 32-bit registers.
        destinations: Box<[Option<Register>]>,
        /// Tensor memory address.
        address: Address,
    },
    /// `st`.
    Store {
        /// Layout over lanes and columns.
        shape: Tcgen05Shape,
        /// `.x1` to `.x128`.
        repeat: u32,
        /// `.unpack::16b`.
        unpack: bool,
        /// Offset of the second half of `.16x32bx2`, in columns.
        half_offset: u32,
        /// Sources, 32-bit registers.
        sources: Box<[Source]>,
        /// Tensor memory address.
        address: Address,
    },
    /// `wait::ld`.
    WaitLoad,
    /// `wait::st`.
    WaitStore,
    /// `fence::before_thread_sync`.
    FenceBefore,
    /// `fence::after_thread_sync`.
    FenceAfter,
}

/// A of `tcgen05.mma`.
#[derive(Clone, Debug, PartialEq)]
pub enum Tcgen05Operand {
    /// Matrix descriptor, 64 bits.
    Descriptor(Source),
    /// Tensor memory address.
    Tensor(Address),
}

/// `tcgen05.mma`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tcgen05Mma {
    /// `.cta_group`: 1 or 2.
    pub group: u32,
    /// Kind.
    pub kind: MmaKind,
    /// Tensor memory address of D.
    pub d: Address,
    /// A.
    pub a: Tcgen05Operand,
    /// Matrix descriptor of B.
    pub b: Source,
    /// Instruction descriptor, 32 bits.
    pub instruction_descriptor: Source,
    /// Mask of lanes of D that are not written: 4 words, or 8 with a group of 2; empty for none.
    pub disable_output_lanes: Box<[Source]>,
    /// Whether D is accumulated.
    pub enable_input_d: PredicateSource,
    /// D is multiplied by 2^-`scale_input_d`, 0 to 15.
    pub scale_input_d: u32,
    /// `.ashift`.
    pub shift_a: bool,
    /// `.block_scale`.
    pub scales: Option<Tcgen05Scales>,
}

/// Block scales of `tcgen05.mma`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tcgen05Scales {
    /// Scales along K of one instruction: 1, 2 or 4 (`.scale_vec::nX`, from `.block16`/`.block32`).
    pub vector: u32,
    /// Elements along K per scale: 16 or 32.
    pub block: u32,
    /// Tensor memory address of the scales of A.
    pub a: Address,
    /// Tensor memory address of the scales of B.
    pub b: Address,
}

/// `.shape{.multicast}` of `tcgen05.cp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tcgen05CopyShape {
    /// `.128x256b`.
    Rows128Bits256,
    /// `.4x256b`.
    Rows4Bits256,
    /// `.128x128b`.
    Rows128Bits128,
    /// `.64x128b.warpx2::02_13`.
    Rows64Bits128Warps02And13,
    /// `.64x128b.warpx2::01_23`.
    Rows64Bits128Warps01And23,
    /// `.32x128b.warpx4`.
    Rows32Bits128AllWarps,
}

/// Source format of `tcgen05.cp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tcgen05CopyFormat {
    /// No decompression.
    Same,
    /// `.b8x16.b6x16_p32`.
    B6,
    /// `.b8x16.b4x16_p64`.
    B4,
}

/// `.shape` of `tcgen05.ld` and `tcgen05.st`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Tcgen05Shape {
    S32x32b,
    S16x64b,
    S16x128b,
    S16x256b,
    S16x32bx2,
}

impl Tcgen05Shape {
    /// Registers of 32 bits per lane at `.x1`.
    pub fn registers(self) -> u32 {
        match self {
            Tcgen05Shape::S32x32b | Tcgen05Shape::S16x64b | Tcgen05Shape::S16x32bx2 => 1,
            Tcgen05Shape::S16x128b => 2,
            Tcgen05Shape::S16x256b => 4,
        }
    }
}
