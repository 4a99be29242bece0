//! Element formats without infinity and NaN: E3M2, E2M3 and E2M1.

/// Defines a module with the constants, encoder and decoder of a format. Arguments are the fields,
/// and the rounded value of 2.4 for the example.
macro_rules! finite_format {
    (
        $(#[$documentation:meta])*
        $name:ident: fraction $mantissa_bits:literal, bias $bias:literal, sign $sign_bit:literal,
        max $max:literal, min_normal $min_normal:literal, min_subnormal $min_subnormal:literal,
        example $example:literal
    ) => {
        $(#[$documentation])*
        pub mod $name {
            use crate::minifloat::{self, Layout};
            use crate::{Overflow, Rounding};

            /// Stored fraction bits.
            pub const MANTISSA_BITS: u32 = $mantissa_bits;
            /// Exponent bias.
            pub const BIAS: i32 = $bias;
            /// Position of the sign bit.
            pub const SIGN_BIT: u32 = $sign_bit;
            /// Code of [`MAX`].
            pub const CODE_MAX: u8 = (1 << SIGN_BIT) - 1;
            /// Largest value.
            pub const MAX: f32 = $max;
            /// Smallest positive normal value, 2^(1 - bias).
            pub const MIN_NORMAL: f32 = $min_normal;
            /// Smallest positive value; half of it or less rounds to zero.
            pub const MIN_SUBNORMAL: f32 = $min_subnormal;

            pub(crate) const LAYOUT: Layout = Layout {
                mantissa_bits: MANTISSA_BITS,
                bias: BIAS,
                sign_bit: SIGN_BIT,
                code_max: CODE_MAX,
                code_nan: CODE_MAX,
                code_overflow: CODE_MAX,
                has_nan: false,
                has_infinity: false,
            };

            const _: () = assert!(decode(CODE_MAX) == MAX);
            const _: () = assert!(decode(1 << MANTISSA_BITS) == MIN_NORMAL);
            const _: () = assert!(decode(1) == MIN_SUBNORMAL);

            /// Code of `x`, rounded once. Subnormals and the sign of zero are kept. The format has
            /// no value beyond [`MAX`], so both kinds of `overflow` saturate, infinities included;
            /// NaN of either sign becomes [`CODE_MAX`], as with `cvt.satfinite` of the PTX ISA.
            ///
            /// ```
            #[doc = concat!(
                "use deepwell_precision::{Overflow, Rounding, ", stringify!($name), "};"
            )]
            #[doc = concat!(
                "let nearest = |x| ", stringify!($name),
                "::encode(x, Rounding::NearestEven, Overflow::Saturate);"
            )]
            #[doc = concat!(
                "assert_eq!(", stringify!($name), "::decode(nearest(2.4)), ", $example, ");"
            )]
            #[doc = concat!(
                "assert_eq!(", stringify!($name), "::decode(nearest(-1e9)), -",
                stringify!($name), "::MAX);"
            )]
            /// ```
            #[must_use]
            pub fn encode(x: f32, rounding: Rounding, overflow: Overflow) -> u8 {
                minifloat::encode(x, &LAYOUT, rounding, overflow)
            }

            /// Value of `code`, exact.
            #[must_use]
            pub const fn decode(code: u8) -> f32 {
                minifloat::decode(code, &LAYOUT)
            }
        }
    };
}

finite_format! {
    /// E3M2: one sign bit, three exponent bits, two fraction bits; neither infinity nor NaN. FP6.
    ///
    /// ```text
    /// bit     5  4 3 2  1 0       e = 0:  (-1)^s * m * 2^-4
    ///         s  e e e  m m       else:   (-1)^s * (1 + m/4) * 2^(e - 3)
    /// ```
    ///
    /// A code occupies the low six bits of a byte; [`decode`](e3m2::decode) ignores the bits
    /// above. Matrices are stored closer, see [`crate::packed`]. Source: OCP Microscaling
    /// formats (MX) v1.0, as `.e3m2` of the PTX ISA.
    e3m2: fraction 2, bias 3, sign 5,
    max 28.0, min_normal 0.25, min_subnormal 0.0625, example 2.5
}

finite_format! {
    /// E2M3: one sign bit, two exponent bits, three fraction bits; neither infinity nor NaN. FP6.
    ///
    /// ```text
    /// bit     5  4 3  2 1 0       e = 0:  (-1)^s * m * 2^-3
    ///         s  e e  m m m       else:   (-1)^s * (1 + m/8) * 2^(e - 1)
    /// ```
    ///
    /// A code occupies the low six bits of a byte; [`decode`](e2m3::decode) ignores the bits
    /// above. Matrices are stored closer, see [`crate::packed`]. Source: OCP Microscaling
    /// formats (MX) v1.0, as `.e2m3` of the PTX ISA.
    e2m3: fraction 3, bias 1, sign 5,
    max 7.5, min_normal 1.0, min_subnormal 0.125, example 2.5
}

finite_format! {
    /// E2M1: one sign bit, two exponent bits, one fraction bit; neither infinity nor NaN. FP4.
    ///
    /// ```text
    /// bit     3  2 1  0           e = 0:  (-1)^s * m * 2^-1
    ///         s  e e  m           else:   (-1)^s * (1 + m/2) * 2^(e - 1)
    ///                             magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6
    /// ```
    ///
    /// A code occupies the low four bits of a byte; [`decode`](e2m1::decode) ignores the bits
    /// above. Matrices are stored closer, see [`crate::packed`]. Source: OCP Microscaling
    /// formats (MX) v1.0, as `.e2m1` of the PTX ISA.
    e2m1: fraction 1, bias 1, sign 3,
    max 6.0, min_normal 1.0, min_subnormal 0.5, example 2.0
}
