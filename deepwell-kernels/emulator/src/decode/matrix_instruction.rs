//! Matrix instructions of warps and warp groups.

use super::types::{Address, PredicateSource, Register, Source, Space, Type};

/// Shape of one matrix of `ldmatrix` and `stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MatrixShape {
    M8n8,
    M8n16,
    M16n8,
    M16n16,
}

/// Elements of `ldmatrix` and `stmatrix`, as in memory and as in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixElement {
    /// 16 bits.
    B16,
    /// 8 bits.
    B8,
    /// 8 bits in registers, 16 of 6 bits and 4 bytes of padding in memory (`.b6x16_p32`).
    B8FromB6,
    /// 8 bits in registers, 16 of 4 bits and 8 bytes of padding in memory (`.b4x16_p64`).
    B8FromB4,
}

/// `ldmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadMatrix {
    /// Of one matrix.
    pub shape: MatrixShape,
    /// Matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Elements.
    pub element: MatrixElement,
    /// Registers of 32 bits.
    pub destinations: Box<[Option<Register>]>,
    /// Of one row, by lane.
    pub address: Address,
    /// [`Space::Generic`], [`Space::Shared`].
    pub space: Space,
}

/// `stmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreMatrix {
    /// Of one matrix.
    pub shape: MatrixShape,
    /// Matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Elements.
    pub element: MatrixElement,
    /// Registers of 32 bits.
    pub sources: Box<[Source]>,
    /// Of one row, by lane.
    pub address: Address,
    /// [`Space::Generic`], [`Space::Shared`].
    pub space: Space,
}

/// M, N and K of an MMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct MmaShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// `.kind::` of an MMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum MmaKind {
    F16,
    Tf32,
    F8f6f4,
    I8,
    Mxf8f6f4,
    Mxf4,
    Mxf4nvf4,
}

/// Scales of one side of a `mma.sync` with block scales.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMmaScale {
    /// 32 bits that hold the scales of a lane.
    pub data: Source,
    /// Which byte (or half) of them.
    pub byte_id: Source,
    /// Which threads of four (two) give them.
    pub thread_id: Source,
}

/// `mma.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMma {
    /// Shape.
    pub shape: MmaShape,
    /// `.row`/`.col` of A and B: true where row. Only row by column for most.
    pub a_is_row: bool,
    /// See [`WarpMma::a_is_row`].
    pub b_is_row: bool,
    /// Type of D.
    pub d_type: Type,
    /// Element of A.
    pub a_type: Type,
    /// Element of B.
    pub b_type: Type,
    /// Type of C.
    pub c_type: Type,
    /// `.satfinite`.
    pub saturate: bool,
    /// `.kind::`.
    pub kind: Option<MmaKind>,
    /// Elements along K that share a scale, the type of scales, and scales of A and B.
    pub scales: Option<Box<WarpMmaScales>>,
    /// Registers of D.
    pub d: Box<[Option<Register>]>,
    /// Registers of A.
    pub a: Box<[Source]>,
    /// Registers of B.
    pub b: Box<[Source]>,
    /// Registers of C.
    pub c: Box<[Source]>,
}

/// Block scales of `mma.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMmaScales {
    /// Scales along K: 1, 2 or 4 (`.scale_vec::nX`).
    pub vector: u32,
    /// [`Type::Ue8m0`] or [`Type::Ue4m3`].
    pub scale_type: Type,
    /// Of A.
    pub a: WarpMmaScale,
    /// Of B.
    pub b: WarpMmaScale,
}

/// A of `wgmma`.
#[derive(Clone, Debug, PartialEq)]
pub enum WarpGroupOperand {
    /// Matrix descriptor, 64 bits.
    Descriptor(Source),
    /// Fragments in registers, 32 bits each.
    Registers(Box<[Source]>),
}

/// `wgmma.mma_async`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpGroupMma {
    /// m64nNkK.
    pub shape: MmaShape,
    /// Type of D.
    pub d_type: Type,
    /// Element of A.
    pub a_type: Type,
    /// Element of B.
    pub b_type: Type,
    /// `.satfinite` (integers).
    pub saturate: bool,
    /// Registers of D, read and written.
    pub d: Box<[Register]>,
    /// A.
    pub a: WarpGroupOperand,
    /// B's descriptor.
    pub b: Source,
    /// False: D is not added.
    pub scale_d: PredicateSource,
    /// A is negated.
    pub negate_a: bool,
    /// B is negated.
    pub negate_b: bool,
    /// A is M-major.
    pub transpose_a: bool,
    /// B is N-major.
    pub transpose_b: bool,
}
