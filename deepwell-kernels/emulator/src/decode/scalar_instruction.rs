//! Instructions whose result in a lane depends on that lane's operands alone.

use super::types::{PredicateSource, Register, Source, Type};

/// Rounding of a float.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatRounding {
    /// `.rn`: to the nearest, ties to even.
    NearestEven,
    /// `.rna`: to the nearest, ties away from zero.
    NearestAway,
    /// `.rz`.
    TowardZero,
    /// `.rm`.
    Down,
    /// `.rp`.
    Up,
    /// `.rs`: stochastic, by random bits that are an operand.
    Stochastic,
}

/// Modifiers of float arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FloatModifiers {
    /// How the result is rounded.
    pub rounding: FloatRounding,
    /// Subnormals of single precision are zeros, in and out.
    pub flush_subnormals: bool,
    /// Results are clamped to 0 .. 1, NaN to 0.
    pub saturate: bool,
    /// Results below zero are zero (`.relu`).
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
    /// `.NaN`: a NaN wins; else the other operand does.
    pub propagate_nan: bool,
    /// `.xorsign.abs`: the extremum of magnitudes with the product of signs.
    pub xor_sign: bool,
    /// `.abs` alone (three operands): magnitudes.
    pub absolute: bool,
}

/// Which half of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MultiplyPart {
    /// `.lo`.
    Low,
    /// `.hi`.
    High,
    /// `.wide`: twice the bits of the operands.
    Wide,
}

/// How two values are combined over lanes.
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

/// What a `testp` asks of a float.
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

/// Functions of one float: those whose error the ISA bounds but whose bits it leaves open, which
/// are an H200's here, and the correctly rounded ones of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatFunction {
    /// `rcp.approx`.
    ReciprocalApproximate,
    /// `rcp.rn` and the like.
    Reciprocal,
    /// `rcp.approx.ftz.f64`: the upper 32 bits only.
    ReciprocalHigh,
    /// `rsqrt.approx`.
    InverseRootApproximate,
    /// `rsqrt.approx.ftz.f64`: the upper 32 bits only.
    InverseRootHigh,
    /// `sqrt.approx`.
    RootApproximate,
    /// `sqrt.rn` and the like.
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

/// One operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum UnaryOperation {
    Not,
    /// 1 where the operand is 0, else 0.
    LogicalNot,
    Negate,
    Absolute,
    PopulationCount,
    LeadingZeros,
    /// Position of the highest bit that is not sign, or its distance from the top.
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

/// Two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum BinaryOperation {
    /// With `carry_in`, the carry flag of the lane is added; with `carry_out` it is set.
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
    /// Of 24-bit operands; low 32 bits, or bits 16 to 47.
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
    /// `bmsk`: a run of bits.
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

/// Three operands.
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
    /// Any function of three bits, by its truth table.
    Logic3(u8),
    Permute(PermuteMode),
    /// 64 bits made of b:a, shifted left; the upper 32.
    FunnelLeft {
        wrap: bool,
    },
    /// 64 bits made of b:a, shifted right; the lower 32.
    FunnelRight {
        wrap: bool,
    },
    /// `bfe`: operand, position, length.
    ExtractBits,
    /// `fns`: the n-th set bit.
    FindNthSet,
    /// Four products of bytes and a sum; `signed` of a and b.
    Dot4 {
        signed: [bool; 2],
    },
    /// Two products of halves with the low or high two bytes, and a sum.
    Dot2 {
        signed: [bool; 2],
        high: bool,
    },
    FloatMultiplyAdd(FloatModifiers),
    /// What a `mul` and a `sub` become together: the product minus the third operand, or the third
    /// operand minus the product.
    FloatMultiplySubtract {
        modifiers: FloatModifiers,
        negate_product: bool,
    },
    /// `fma.oob`: a NaN of a special pattern counts as zero.
    FloatMultiplyAddOutOfBounds {
        relu: bool,
    },
    FloatMinimum3(ExtremumModifiers),
    FloatMaximum3(ExtremumModifiers),
    /// Third operand's sign chooses (`slct`): first if it is not negative.
    SelectBySign {
        condition: Type,
        flush_subnormals: bool,
    },
}

/// `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conversion {
    /// To.
    pub to: Type,
    /// From.
    pub from: Type,
    /// To an integer, or a float to an integral float.
    pub integer_rounding: Option<IntegerRounding>,
    /// To a float that cannot hold every value.
    pub float_rounding: Option<FloatRounding>,
    /// `.ftz`.
    pub flush_subnormals: bool,
    /// `.sat`: floats to 0 .. 1, integers to their range.
    pub saturate: bool,
    /// `.satfinite`: infinities and what overflows become the largest finite value.
    pub saturate_finite: bool,
    /// `.relu`.
    pub relu: bool,
}

/// Instructions on lanes.
#[derive(Clone, Debug, PartialEq)]
pub enum ScalarInstruction {
    /// `mov` of the bits of a register or a constant; upper bits are cut or zero.
    Move {
        /// Where to.
        destination: Register,
        /// What.
        source: Source,
    },
    /// `mov d, {a, b, ..}`: parts with the least significant first.
    Pack {
        /// Where to. For 128 bits this is one of the [`ScalarInstruction::Move`]s of two halves.
        destination: Register,
        /// Bits of one part.
        part_bits: u32,
        /// What.
        sources: Box<[Source]>,
    },
    /// `mov {a, b, ..}, d`.
    Unpack {
        /// Where to; `None` is `_`.
        destinations: Box<[Option<Register>]>,
        /// Bits of one part.
        part_bits: u32,
        /// What.
        source: Source,
    },
    /// One operand.
    Unary {
        /// What.
        operation: UnaryOperation,
        /// Of the operand.
        value_type: Type,
        /// Where to.
        destination: Register,
        /// The operand.
        a: Source,
    },
    /// Two operands.
    Binary {
        /// What.
        operation: BinaryOperation,
        /// Of the operands.
        value_type: Type,
        /// Where to.
        destination: Register,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
    },
    /// Three operands.
    Ternary {
        /// What.
        operation: TernaryOperation,
        /// Of the operands.
        value_type: Type,
        /// Where to.
        destination: Register,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
        /// Third operand.
        c: Source,
    },
    /// `bfi`: `a` into `b` at a position, so many bits.
    InsertBits {
        /// 32 or 64 bits.
        value_type: Type,
        /// Where to.
        destination: Register,
        /// The bits.
        a: Source,
        /// Where they go.
        b: Source,
        /// First bit.
        position: Source,
        /// Bits.
        length: Source,
    },
    /// `cvt` of one value, or of several into a packed result.
    Convert {
        /// Types and modifiers.
        conversion: Conversion,
        /// Where to.
        destination: Register,
        /// The first of them goes to the upper part, as in the ISA. Random bits are not here.
        sources: Box<[Source]>,
        /// Bits for stochastic rounding, or the scale of `.scaled` forms.
        extra: Option<Source>,
    },
    /// `cvt.pack`: two integers saturated into the low part of the third operand's bits.
    ConvertPack {
        /// Of the result's parts.
        to: Type,
        /// Of the sources.
        from: Type,
        /// Where to.
        destination: Register,
        /// Upper part.
        a: Source,
        /// Lower part.
        b: Source,
        /// What is shifted up to make room; `None` for 16-bit parts.
        c: Option<Source>,
    },
    /// `add`, `sub`, `fma` with single-precision result and half-precision operands.
    MixedPrecision {
        /// `fma` (a b + c), else a + c.
        multiply: bool,
        /// `sub`: c - ... is written as a - c.
        subtract: bool,
        /// [`Type::F16`] or [`Type::Bf16`].
        narrow: Type,
        /// Rounding and so on.
        modifiers: FloatModifiers,
        /// Where to.
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
        /// How to compare.
        comparison: Comparison,
        /// Of the operands.
        value_type: Type,
        /// `.ftz`.
        flush_subnormals: bool,
        /// Combined with the result, and with its negation.
        combine: Option<(LogicOperation, PredicateSource)>,
        /// The result; `None` is `_`.
        destination: Option<u32>,
        /// The negation, or for packed types the upper half's result.
        second: Option<u32>,
        /// First operand.
        a: Source,
        /// Second operand.
        b: Source,
    },
    /// `set`: all ones (or 1.0) where true.
    Set {
        /// How to compare.
        comparison: Comparison,
        /// Of the operands.
        value_type: Type,
        /// Of the result.
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
        /// Where to.
        destination: Register,
        /// Where the predicate is true.
        a: Source,
        /// Where it is not.
        b: Source,
        /// The predicate.
        predicate: PredicateSource,
    },
    /// `testp`.
    TestFloat {
        /// What is asked.
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
        /// What.
        source: PredicateSource,
    },
    /// `and.pred`, `or.pred`, `xor.pred`.
    CombinePredicates {
        /// How.
        operation: LogicOperation,
        /// The predicate register.
        destination: u32,
        /// First operand.
        a: PredicateSource,
        /// Second operand.
        b: PredicateSource,
    },
}
