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

/// Elements of `ldmatrix` and `stmatrix`, in memory and in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixElement {
    /// 16 bits.
    B16,
    /// 8 bits.
    B8,
    /// 8 bits in registers; in memory, 16 elements of 6 bits and 4 bytes of padding (`.b6x16_p32`).
    B8FromB6,
    /// 8 bits in registers; in memory, 16 elements of 4 bits and 8 bytes of padding (`.b4x16_p64`).
    B8FromB4,
}

/// `ldmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadMatrix {
    /// Shape of one matrix.
    pub shape: MatrixShape,
    /// Number of matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Element type.
    pub element: MatrixElement,
    /// Destinations, 32-bit registers.
    pub destinations: Box<[Option<Register>]>,
    /// Address of one row per lane.
    pub address: Address,
    /// [`Space::Generic`], [`Space::Shared`].
    pub space: Space,
}

/// `stmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreMatrix {
    /// Shape of one matrix.
    pub shape: MatrixShape,
    /// Number of matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Element type.
    pub element: MatrixElement,
    /// Sources, 32-bit registers.
    pub sources: Box<[Source]>,
    /// Address of one row per lane.
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

/// Block scales of one operand of `mma.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMmaScale {
    /// A lane's 32-bit register of scales.
    pub data: Source,
    /// Byte (or half) of the register.
    pub byte_id: Source,
    /// Threads of four (two) that supply the scales.
    pub thread_id: Source,
}

/// `mma.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMma {
    /// Shape.
    pub shape: MmaShape,
    /// Whether A is `.row`. Only A `.row` with B `.col` is decoded.
    pub a_is_row: bool,
    /// Whether B is `.row`; see [`WarpMma::a_is_row`].
    pub b_is_row: bool,
    /// Type of D.
    pub d_type: Type,
    /// Element type of A.
    pub a_type: Type,
    /// Element type of B.
    pub b_type: Type,
    /// Type of C.
    pub c_type: Type,
    /// `.satfinite`.
    pub saturate: bool,
    /// `.kind::`.
    pub kind: Option<MmaKind>,
    /// Block scales of A and B.
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
    /// Scales of A.
    pub a: WarpMmaScale,
    /// Scales of B.
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
    /// Element type of A.
    pub a_type: Type,
    /// Element type of B.
    pub b_type: Type,
    /// `.satfinite` (integers).
    pub saturate: bool,
    /// Registers of D, read and written.
    pub d: Box<[Register]>,
    /// A.
    pub a: WarpGroupOperand,
    /// Matrix descriptor of B.
    pub b: Source,
    /// Whether D is accumulated.
    pub scale_d: PredicateSource,
    /// Whether A is negated.
    pub negate_a: bool,
    /// Whether B is negated.
    pub negate_b: bool,
    /// Whether A is M-major.
    pub transpose_a: bool,
    /// Whether B is N-major.
    pub transpose_b: bool,
}
