//! Elements as the sums take them.

use std::sync::OnceLock;

use crate::number::{Format, decode};

/// The exponent that a zero has, so far below all others that a sum with another one is as well.
pub(super) const ZERO_EXPONENT: i16 = -8192;
/// The exponent of a zero's last bit, above all others.
const ZERO_LAST: i16 = 8192;

/// One element, decoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) value: f32,
    /// Of the leading bit, but no less than the format's least; [`ZERO_EXPONENT`] for zero.
    pub(super) exponent: i16,
    /// The exponent of the last bit that is set.
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

/// Decodes the elements of one format: those of 8 and of 16 bits by a table.
pub(super) struct Decoder {
    format: Format,
    /// Of as many elements as a power of two, or none.
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

/// A scale's exponent, or `None` for NaN, and its significand.
pub(super) fn scale_parts(format: Format, code: u8) -> (Option<i32>, f32) {
    if format == Format::UE8M0 {
        return ((code != 0xff).then_some(i32::from(code) - 127), 1.0);
    }
    let value = decode(format, code.into());
    if value.is_nan() {
        return (None, 0.0);
    }
    if value == 0.0 {
        // As low as a binary32 zero, which is how the published model has it.
        return (Some(-126), 0.0);
    }
    let exponent = ((value.to_bits() >> 23 & 0xff) as i32 - 127).max(format.exponent_min());
    (Some(exponent), value * f32::from_bits(((127 - exponent) as u32) << 23))
}

/// Two to a power that `f64` has as a normal number; powers beyond become the nearest of those.
#[inline(always)]
pub(super) fn power_of_two(power: i32) -> f64 {
    f64::from_bits(((power.clamp(-1022, 1023) + 1023) as u64) << 52)
}
