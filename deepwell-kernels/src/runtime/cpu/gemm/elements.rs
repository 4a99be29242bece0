//! Elements of MX operands: their values, and codes of one block.

use deepwell_precision::{ElementFormat, packed};

/// Value of every code of a format; codes of fewer bits are repeated.
const fn table(element: ElementFormat) -> [f32; 256] {
    let mask = ((1u32 << element.bits()) - 1) as u8;
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = element.decode(code as u8 & mask);
        code += 1;
    }
    values
}

static E4M3: [f32; 256] = table(ElementFormat::E4M3);
static E5M2: [f32; 256] = table(ElementFormat::E5M2);
static E3M2: [f32; 256] = table(ElementFormat::E3M2);
static E2M3: [f32; 256] = table(ElementFormat::E2M3);
static E2M1: [f32; 256] = table(ElementFormat::E2M1);

/// The value of each code of a format.
pub(crate) fn values_of(element: ElementFormat) -> &'static [f32; 256] {
    match element {
        ElementFormat::E5M2 => &E5M2,
        ElementFormat::E3M2 => &E3M2,
        ElementFormat::E2M3 => &E2M3,
        ElementFormat::E2M1 => &E2M1,
        _ => &E4M3,
    }
}

/// The codes of a block of at most 32 elements at the start of `data`, one per byte. `codes` is
/// scratch of the block's length.
///
/// # Panics
///
/// If `data` is too short.
#[inline(always)]
pub(crate) fn unpack_block<'a>(
    element: ElementFormat,
    data: &'a [u8],
    codes: &'a mut [u8],
) -> &'a [u8] {
    let bytes = &data[..packed::len(element, 1, codes.len())];
    if element.bits() == 8 {
        return bytes;
    }
    let is_unpacked = packed::unpack(element, bytes, 1, codes.len(), codes);
    is_unpacked.expect("one row of this many elements");
    codes
}

/// Exponents of the smallest and the largest magnitude of a format that is not zero.
pub(super) fn exponents(element: ElementFormat) -> [i16; 2] {
    [element.decode(1), element.max()].map(|value| (value.to_bits() >> 23) as i16 - 127)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_exponents() {
        for (element, code, value, expected) in [
            (ElementFormat::E4M3, 0x39, 1.125, [-9, 8]),
            (ElementFormat::E5M2, 0x3D, 1.25, [-16, 15]),
            (ElementFormat::E3M2, 0x0D, 1.25, [-4, 4]),
            (ElementFormat::E2M3, 0x09, 1.125, [-3, 2]),
            (ElementFormat::E2M1, 0x03, 1.5, [-1, 2]),
        ] {
            assert_eq!(values_of(element)[code], value, "{element}");
            assert_eq!(exponents(element), expected, "{element}");
            for (code, value) in values_of(element).iter().enumerate().take(1 << element.bits()) {
                assert_eq!(value.to_bits(), element.decode(code as u8).to_bits(), "{element}");
            }
        }
    }

    #[test]
    fn codes_of_blocks() {
        for &element in ElementFormat::ALL {
            let mask = ((1u32 << element.bits()) - 1) as u8;
            for len in [0, 1, 7, 31, 32] {
                let codes: Vec<u8> = (0..len).map(|i| (i * 37 + 5) as u8 & mask).collect();
                let mut data = vec![0; packed::len(element, 1, len)];
                packed::pack(element, &codes, 1, len, &mut data).unwrap();
                data.push(0xEE);
                let mut scratch = vec![0; len];
                assert_eq!(unpack_block(element, &data, &mut scratch), codes, "{element} {len}");
            }
        }
    }
}
