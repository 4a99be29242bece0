//! Decoded elements.

use std::sync::OnceLock;

use crate::number::{Format, decode};

/// Exponent of zero, so low that a product with zero is below every nonzero product.
pub(super) const ZERO_EXPONENT: i16 = -8192;
/// Exponent of the last set bit of zero, above all others.
const ZERO_LAST: i16 = 8192;

/// One element, decoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) value: f32,
    /// Exponent of the leading bit, at least the format's least exponent; [`ZERO_EXPONENT`] for
    /// zero.
    pub(super) exponent: i16,
    /// Exponent of the last set bit.
    pub(super) last: i16,
}

impl Element {
    fn new(format: Format, value: f32) -> Element {
        if value == 0.0 {
            return Element { value, exponent: ZERO_EXPONENT, last: ZERO_LAST };
        }
        let bits = value.to_bits();
        let field = (bits >> 23 & 0xff) as i16;
        let leading = field.max(1) - 127;
        let significand = bits & 0x7f_ffff | u32::from(field != 0) << 23;
        Element {
            value,
            exponent: leading.max(format.exponent_min() as i16),
            last: leading - 23 + significand.trailing_zeros() as i16,
        }
    }
}

/// Decoder for the elements of one format; formats of 8 and 16 bits use a table.
pub(super) struct Decoder {
    format: Format,
    /// Power-of-two length, or empty.
    table: &'static [Element],
}

impl Decoder {
    pub(super) fn new(format: Format) -> Decoder {
        Decoder { format, table: if format.bits() <= 16 { table(format) } else { &[] } }
    }

    #[inline(always)]
    pub(super) fn decode(&self, code: u32) -> Element {
        let mask = self.table.len().wrapping_sub(1);
        match self.table.get(code as usize & mask) {
            Some(element) => *element,
            None => Element::new(self.format, decode(self.format, code)),
        }
    }
}

fn table(format: Format) -> &'static [Element] {
    static TABLES: [OnceLock<Vec<Element>>; Format::ALL.len()] =
        [const { OnceLock::new() }; Format::ALL.len()];
    TABLES[format as usize].get_or_init(|| {
        let element_bits = if format.bits() <= 8 { 1 << 8 } else { 1 << 16 };
        (0..element_bits).map(|code| Element::new(format, decode(format, code))).collect()
    })
}

/// Returns the exponent (`None` for NaN) and the significand of a scale.
pub(super) fn scale_parts(format: Format, code: u8) -> (Option<i32>, f32) {
    if format == Format::UE8M0 {
        return ((code != 0xff).then_some(i32::from(code) - 127), 1.0);
    }
    let value = decode(format, code.into());
    if value.is_nan() {
        return (None, 0.0);
    }
    if value == 0.0 {
        // The exponent of a binary32 zero, as in the published model.
        return (Some(-126), 0.0);
    }
    let exponent = ((value.to_bits() >> 23 & 0xff) as i32 - 127).max(format.exponent_min());
    (Some(exponent), value * f32::from_bits(((127 - exponent) as u32) << 23))
}

/// Returns 2^power, with the power clamped to the normal range of `f64`.
#[inline(always)]
pub(super) fn power_of_two(power: i32) -> f64 {
    f64::from_bits(((power.clamp(-1022, 1023) + 1023) as u64) << 52)
}
