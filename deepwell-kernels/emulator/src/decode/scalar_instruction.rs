//! Scalar instructions: the result in a lane depends only on operands in the same lane.

use super::types::{PredicateSource, Register, Source, Type};

/// Rounding modes of float results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatRounding {
    /// `.rn`: to nearest, ties to even.
    NearestEven,
    /// `.rna`: to nearest, ties away from zero.
    NearestAway,
    /// `.rz`.
    TowardZero,
    /// `.rm`.
    Down,
    /// `.rp`.
    Up,
    /// `.rs`: stochastic, with random bits as an operand.
    Stochastic,
}

/// Modifiers of float arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FloatModifiers {
    /// Rounding mode of the result.
    pub rounding: FloatRounding,
    /// `.ftz`: single-precision subnormal inputs and results become zero.
    pub flush_subnormals: bool,
    /// `.sat`: results are clamped to 0 .. 1, NaN to 0.
    pub saturate: bool,
    /// `.relu`: negative results become zero.
    pub relu: bool,
}

impl Default for FloatModifiers {
    fn default() -> FloatModifiers {
        FloatModifiers {
            rounding: FloatRounding::NearestEven,
            flush_subnormals: false,
            saturate: false,
            relu: false,
        }
    }
}

/// Modifiers of `min` and `max` of floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct ExtremumModifiers {
    /// `.ftz`.
    pub flush_subnormals: bool,
    /// `.NaN`: NaN propagates; otherwise the other operand is returned.
    pub propagate_nan: bool,
    /// `.xorsign.abs`: the extremum of magnitudes with the product of signs.
    pub xor_sign: bool,
    /// `.abs` (three operands): compares magnitudes.
    pub absolute: bool,
}

/// Selected part of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MultiplyPart {
    /// `.lo`.
    Low,
    /// `.hi`.
    High,
    /// `.wide`: the full product, twice the width of the operands.
    Wide,
}

/// Operations of reductions over lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ReductionOperation {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
}

/// Operations on predicates and words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum LogicOperation {
    And,
    Or,
    Xor,
}

/// Comparisons of `setp` and `set`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// Equal; false with NaN.
    Equal,
    /// Not equal; false with NaN.
    NotEqual,
    /// Less; false with NaN. `.lo` for unsigned integers.
    Less,
    /// Less or equal; false with NaN. `.ls` for unsigned integers.
    LessEqual,
    /// Greater; false with NaN. `.hi` for unsigned integers.
    Greater,
    /// Greater or equal; false with NaN. `.hs` for unsigned integers.
    GreaterEqual,
    /// Equal, or NaN.
    EqualOrNan,
    /// Not equal, or NaN.
    NotEqualOrNan,
    /// Less, or NaN.
    LessOrNan,
    /// Less or equal, or NaN.
    LessEqualOrNan,
    /// Greater, or NaN.
    GreaterOrNan,
    /// Greater or equal, or NaN.
    GreaterEqualOrNan,
    /// Neither is NaN.
    Ordered,
    /// One is NaN.
    Unordered,
}

/// Properties tested by `testp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum FloatTest {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

/// Rounding of a float to an integral value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntegerRounding {
    /// `.rni`.
    NearestEven,
    /// `.rzi`.
    TowardZero,
    /// `.rmi`.
    Down,
    /// `.rpi`.
    Up,
}

/// `prmt` modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum PermuteMode {
    Index,
    Forward4,
    Backward4,
    Replicate8,
    EdgeClampLeft,
    EdgeClampRight,
    Replicate16,
}

/// Functions of one float: approximate functions, with the bits of an H200 because the ISA only
/// bounds their error, and correctly rounded functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatFunction {
    /// `rcp.approx`.
    ReciprocalApproximate,
    /// `rcp.rn` and other roundings.
    Reciprocal,
    /// `rcp.approx.ftz.f64`: the upper 32 bits only.
    ReciprocalHigh,
    /// `rsqrt.approx`.
    InverseRootApproximate,
    /// `rsqrt.approx.ftz.f64`: the upper 32 bits only.
    InverseRootHigh,
    /// `sqrt.approx`.
    RootApproximate,
    /// `sqrt.rn` and other roundings.
    Root,
    /// `sin.approx`.
    Sine,
    /// `cos.approx`.
    Cosine,
    /// `lg2.approx`.
    Logarithm2,
    /// `ex2.approx`.
    Exponential2,
    /// `tanh.approx`.
    HyperbolicTangent,
}

/// Operations of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum UnaryOperation {
    Not,
    /// 1 if the operand is 0, otherwise 0.
    LogicalNot,
    Negate,
    Absolute,
    PopulationCount,
    LeadingZeros,
    /// Position of the highest bit that differs from the sign, or its distance from the top.
    FindBit {
        shift_amount: bool,
    },
    ReverseBits,
    FloatNegate {
        flush_subnormals: bool,
    },
    FloatAbsolute {
        flush_subnormals: bool,
    },
    Function(FloatFunction, FloatModifiers),
}

/// Operations of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum BinaryOperation {
    /// `carry_in` adds the carry flag of the lane; `carry_out` sets the flag.
    Add {
        saturate: bool,
        carry_in: bool,
        carry_out: bool,
    },
    Subtract {
        saturate: bool,
        carry_in: bool,
        carry_out: bool,
    },
    Multiply(MultiplyPart),
    /// Product of 24-bit operands: low 32 bits, or bits 16 to 47.
    Multiply24 {
        high: bool,
    },
    Divide,
    Remainder,
    Minimum {
        relu: bool,
    },
    Maximum {
        relu: bool,
    },
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
    /// `bmsk`: mask of consecutive bits.
    BitMask {
        wrap: bool,
    },
    /// `szext`.
    ExtendSign {
        wrap: bool,
    },
    FloatAdd(FloatModifiers),
    FloatSubtract(FloatModifiers),
    FloatMultiply(FloatModifiers),
    FloatDivide(FloatModifiers),
    /// `div.full`.
    FloatDivideFull(FloatModifiers),
    /// `div.approx`.
    FloatDivideApproximate(FloatModifiers),
    FloatMinimum(ExtremumModifiers),
    FloatMaximum(ExtremumModifiers),
    /// Magnitude of the second operand with the sign of the first.
    CopySign,
}

/// Operations of three operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum TernaryOperation {
    MultiplyAdd {
        part: MultiplyPart,
        saturate: bool,
        carry_in: bool,
        carry_out: bool,
    },
    MultiplyAdd24 {
        high: bool,
        saturate: bool,
    },
    SumOfAbsoluteDifferences,
    /// Any bitwise function of three operands, by truth table.
    Logic3(u8),
    Permute(PermuteMode),
    /// 64 bits b:a, shifted left; the upper 32 bits.
    FunnelLeft {
        wrap: bool,
    },
    /// 64 bits b:a, shifted right; the lower 32 bits.
    FunnelRight {
        wrap: bool,
    },
    /// `bfe`: operand, position, length.
    ExtractBits,
    /// `fns`: the n-th set bit.
    FindNthSet,
    /// Sum of four byte products; signedness of a and b.
    Dot4 {
        signed: [bool; 2],
    },
    /// Sum of two products of halves with the low or high two bytes.
    Dot2 {
        signed: [bool; 2],
        high: bool,
    },
    FloatMultiplyAdd(FloatModifiers),
    /// A fused `mul` and `sub`: the product minus the third operand, or the third operand minus the
    /// product.
    FloatMultiplySubtract {
        modifiers: FloatModifiers,
        negate_product: bool,
    },
    /// `fma.oob`: the NaN of out-of-bounds elements counts as zero.
    FloatMultiplyAddOutOfBounds {
        relu: bool,
    },
    FloatMinimum3(ExtremumModifiers),
    FloatMaximum3(ExtremumModifiers),
    /// `slct`: the first operand if the third is at least zero, otherwise the second.
    SelectBySign {
        condition: Type,
        flush_subnormals: bool,
    },
}

/// `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conversion {
    /// Destination type.
    pub to: Type,
    /// Source type.
    pub from: Type,
    /// Rounding to an integer, or to an integral float.
    pub integer_rounding: Option<IntegerRounding>,
    /// Rounding to a float type that cannot represent every value.
    pub float_rounding: Option<FloatRounding>,
    /// `.ftz`.
    pub flush_subnormals: bool,
    /// `.sat`: clamps floats to 0 .. 1, integers to their range.
    pub saturate: bool,
    /// `.satfinite`: infinities and overflows become the largest finite value.
    pub saturate_finite: bool,
    /// `.relu`.
    pub relu: bool,
}

/// Scalar instructions.
#[derive(Clone, Debug, PartialEq)]
pub enum ScalarInstruction {
    /// `mov` of a register or a constant; truncated or zero-extended.
    Move {
        /// Destination register.
        destination: Register,
        /// Source.
        source: Source,
    },
    /// `mov d, {a, b, ..}`: packs parts, the least significant first.
    Pack {
        /// Destination register. A 128-bit destination is decoded as two
        /// [`ScalarInstruction::Move`]s.
        destination: Register,
        /// Bits of one part.
        part_bits: u32,
        /// The parts.
        sources: Box<[Source]>,
    },
    /// `mov {a, b, ..}, d`: unpacks parts.
    Unpack {
        /// Destination registers; `None` is `_`.
        destinations: Box<[Option<Register>]>,
        /// Bits of one part.
        part_bits: u32,
        /// Source.
        source: Source,
    },
    /// An operation of one operand.
    Unary {
        /// Operation.
        operation: UnaryOperation,
        /// Type of the operand.
        value_type: Type,
        /// Destination register.
        destination: Register,
        /// The operand.
        a: Source,
    },
    /// An operation of two operands.
    Binary {
        /// Operation.
        operation: BinaryOperation,
        /// Type of the operands.
        value_type: Type,
        /// Destination register.
        destination: Register,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
    },
    /// An operation of three operands.
    Ternary {
        /// Operation.
        operation: TernaryOperation,
        /// Type of the operands.
        value_type: Type,
        /// Destination register.
        destination: Register,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
        /// Third operand.
        c: Source,
    },
    /// `bfi`: inserts the low bits of `a` into `b`.
    InsertBits {
        /// 32 or 64 bits.
        value_type: Type,
        /// Destination register.
        destination: Register,
        /// The inserted bits.
        a: Source,
        /// The value that receives the bits.
        b: Source,
        /// Position of the lowest inserted bit.
        position: Source,
        /// Number of inserted bits.
        length: Source,
    },
    /// `cvt` of one value, or of several values to a packed result.
    Convert {
        /// Types and modifiers.
        conversion: Conversion,
        /// Destination register.
        destination: Register,
        /// Sources, the first for the upper part, as in the ISA; without random bits.
        sources: Box<[Source]>,
        /// Random bits for stochastic rounding, or the scale of `.scaled` forms.
        extra: Option<Source>,
    },
    /// `cvt.pack`: saturates two integers into the low part of the result.
    ConvertPack {
        /// Type of the result's parts.
        to: Type,
        /// Type of the sources.
        from: Type,
        /// Destination register.
        destination: Register,
        /// Source of the upper part.
        a: Source,
        /// Source of the lower part.
        b: Source,
        /// Value shifted up to make room; `None` for 16-bit parts.
        c: Option<Source>,
    },
    /// `add`, `sub` or `fma` with a single-precision result and half-precision operands.
    MixedPrecision {
        /// `fma` (a b + c); otherwise a + c.
        multiply: bool,
        /// `sub`: a - c.
        subtract: bool,
        /// [`Type::F16`] or [`Type::Bf16`].
        narrow: Type,
        /// Modifiers of the result.
        modifiers: FloatModifiers,
        /// Destination register.
        destination: Register,
        /// First operand, narrow.
        a: Source,
        /// Second operand, narrow; not read without `multiply`.
        b: Source,
        /// Last operand, single precision.
        c: Source,
    },
    /// `setp`.
    SetPredicate {
        /// Comparison.
        comparison: Comparison,
        /// Type of the operands.
        value_type: Type,
        /// `.ftz`.
        flush_subnormals: bool,
        /// Combined with the result and with its negation.
        combine: Option<(LogicOperation, PredicateSource)>,
        /// The result; `None` is `_`.
        destination: Option<u32>,
        /// The negated result; for packed types, the result of the upper half.
        second: Option<u32>,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
    },
    /// `set`: all ones (or 1.0) if true, otherwise zero.
    Set {
        /// Comparison.
        comparison: Comparison,
        /// Type of the operands.
        value_type: Type,
        /// Type of the result.
        result_type: Type,
        /// `.ftz`.
        flush_subnormals: bool,
        /// Combined with the result.
        combine: Option<(LogicOperation, PredicateSource)>,
        /// The result.
        destination: Register,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
    },
    /// `selp`.
    Select {
        /// Destination register.
        destination: Register,
        /// Value if the predicate is true.
        a: Source,
        /// Value if the predicate is false.
        b: Source,
        /// The predicate.
        predicate: PredicateSource,
    },
    /// `testp`.
    TestFloat {
        /// Tested property.
        test: FloatTest,
        /// [`Type::F32`] or [`Type::F64`].
        value_type: Type,
        /// The predicate register.
        destination: u32,
        /// The operand.
        a: Source,
    },
    /// `mov.pred`, `not.pred`.
    MovePredicate {
        /// The predicate register.
        destination: u32,
        /// Source.
        source: PredicateSource,
    },
    /// `and.pred`, `or.pred`, `xor.pred`.
    CombinePredicates {
        /// Operation.
        operation: LogicOperation,
        /// The predicate register.
        destination: u32,
        /// First operand.
        a: PredicateSource,
        /// Second operand.
        b: PredicateSource,
    },
}
