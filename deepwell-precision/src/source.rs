//! Element types that quantization reads and dequantization writes.

use half::bf16;

mod sealed {
    use half::bf16;

    pub trait Sealed: Sized {
        fn values(values: &[Self]) -> Values<'_>;
        fn values_mut(values: &mut [Self]) -> ValuesMut<'_>;
    }

    impl Sealed for f32 {
        fn values(values: &[f32]) -> Values<'_> {
            Values::F32(values)
        }

        fn values_mut(values: &mut [f32]) -> ValuesMut<'_> {
            ValuesMut::F32(values)
        }
    }

    impl Sealed for bf16 {
        fn values(values: &[bf16]) -> Values<'_> {
            Values::Bf16(values)
        }

        fn values_mut(values: &mut [bf16]) -> ValuesMut<'_> {
            ValuesMut::Bf16(values)
        }
    }

    /// Values of either type. Functions of these are compiled once, in this crate, and not in each
    /// calling crate: the vector code of all formats is two megabytes.
    #[derive(Clone, Copy, Debug)]
    pub enum Values<'a> {
        F32(&'a [f32]),
        Bf16(&'a [bf16]),
    }

    /// Mutable [`Values`].
    pub enum ValuesMut<'a> {
        F32(&'a mut [f32]),
        Bf16(&'a mut [bf16]),
    }

    impl Values<'_> {
        pub(crate) fn len(&self) -> usize {
            match self {
                Values::F32(values) => values.len(),
                Values::Bf16(values) => values.len(),
            }
        }

        pub(crate) fn is_empty(&self) -> bool {
            self.len() == 0
        }
    }
}

pub(crate) use sealed::{Values, ValuesMut};

/// A type that can be quantized: `f32` and `half::bf16`. Sealed.
pub trait Source: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Converts to f32, exactly.
    fn to_f32(self) -> f32;
}

impl Source for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Source for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // Not `bf16::to_f32`, which branches to quiet NaNs.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// A type that can be dequantized into: `f32` and `half::bf16`. Sealed.
pub trait DequantizedValue: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Converts `value`, rounded to nearest even if this type cannot represent it. A finite value
    /// beyond the largest of this type becomes the largest.
    fn from_f32(value: f32) -> Self;
}

impl DequantizedValue for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl DequantizedValue for bf16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // Not `bf16::from_f32`, which branches on NaN and does not vectorize.
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))) >> 16;
        let quiet = (bits >> 16) | 0x0040;
        let magnitude = bits & 0x7FFF_FFFF;
        // Infinity is one above the largest number.
        let is_beyond = (magnitude < 0x7F80_0000) & (rounded & 0x7FFF == 0x7F80);
        let rounded = rounded - u32::from(is_beyond);
        bf16::from_bits(if magnitude > 0x7F80_0000 { quiet } else { rounded } as u16)
    }
}
