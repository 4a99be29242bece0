//! Finds the first non-finite value of a tensor.

use half::{bf16, f16};

use crate::tensor::CkptDtype;

/// Bytes checked between two branches. The check of a block has no early exit, so that it
/// vectorizes.
const BLOCK_BYTES: usize = 4096;

/// Index and value, as text, of the first NaN or infinite element of `data`; `None` if all are
/// finite or the type has no such values.
pub(crate) fn first_non_finite(dtype: CkptDtype, data: &[u8]) -> Option<(usize, String)> {
    match dtype {
        CkptDtype::F64 => find(
            data,
            |bytes: [u8; 8]| u64::from_le_bytes(bytes) >> 52 & 0x7FF == 0x7FF,
            |bytes| f64::from_le_bytes(bytes).to_string(),
        ),
        CkptDtype::F32 => find(
            data,
            |bytes: [u8; 4]| u32::from_le_bytes(bytes) & 0x7F80_0000 == 0x7F80_0000,
            |bytes| f32::from_le_bytes(bytes).to_string(),
        ),
        CkptDtype::F16 => find(
            data,
            |bytes: [u8; 2]| u16::from_le_bytes(bytes) & 0x7C00 == 0x7C00,
            |bytes| f16::from_le_bytes(bytes).to_string(),
        ),
        CkptDtype::Bf16 => find(
            data,
            |bytes: [u8; 2]| u16::from_le_bytes(bytes) & 0x7F80 == 0x7F80,
            |bytes| bf16::from_le_bytes(bytes).to_string(),
        ),
        CkptDtype::E4M3 => find(data, |[byte]: [u8; 1]| byte & 0x7F == 0x7F, |_| "NaN".into()),
        CkptDtype::E5M2 => find(data, |[byte]: [u8; 1]| byte & 0x7C == 0x7C, e5m2_text),
        CkptDtype::E8M0 => find(data, |[byte]: [u8; 1]| byte == 0xFF, |_| "NaN".into()),
        CkptDtype::U8
        | CkptDtype::I8
        | CkptDtype::U16
        | CkptDtype::I16
        | CkptDtype::U32
        | CkptDtype::I32
        | CkptDtype::U64
        | CkptDtype::I64 => None,
    }
}

fn e5m2_text([byte]: [u8; 1]) -> String {
    match byte {
        0x7C => "inf",
        0xFC => "-inf",
        _ => "NaN",
    }
    .to_string()
}

fn find<const N: usize>(
    data: &[u8],
    is_bad: impl Fn([u8; N]) -> bool,
    text: impl Fn([u8; N]) -> String,
) -> Option<(usize, String)> {
    for (block_index, block) in data.chunks(BLOCK_BYTES).enumerate() {
        let elements = block.as_chunks::<N>().0;
        if elements.iter().fold(false, |bad, &element| bad | is_bad(element)) {
            let within = elements.iter().position(|&element| is_bad(element))?;
            let index = block_index * (BLOCK_BYTES / N) + within;
            return Some((index, text(elements[within])));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_code_agrees_with_the_half_crate() {
        for code in 0..=u16::MAX {
            let bytes = code.to_le_bytes();
            let found = |dtype| first_non_finite(dtype, &bytes).is_some();
            assert_eq!(found(CkptDtype::F16), !f16::from_bits(code).is_finite(), "{code:04x}");
            assert_eq!(found(CkptDtype::Bf16), !bf16::from_bits(code).is_finite(), "{code:04x}");
        }
    }

    #[test]
    fn special_codes_of_the_8_bit_formats() {
        // The special values of the OCP 8-bit formats.
        let check = |dtype, expected: &[u8]| {
            let bad: Vec<u8> =
                (0..=255).filter(|&code| first_non_finite(dtype, &[code]).is_some()).collect();
            assert_eq!(bad, expected, "{dtype}");
        };
        check(CkptDtype::E4M3, &[0x7F, 0xFF]);
        check(CkptDtype::E5M2, &[0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF]);
        check(CkptDtype::E8M0, &[0xFF]);
        check(CkptDtype::U8, &[]);
    }

    #[test]
    fn index_and_value_of_the_first_one() {
        let check = |position: usize, value: f32, text: &str| {
            let mut values = vec![f32::MAX; 5000];
            values[position] = value;
            if position + 1 < values.len() {
                values[position + 1] = f32::NAN;
            }
            let found = first_non_finite(CkptDtype::F32, bytemuck::cast_slice(&values));
            assert_eq!(found, Some((position, text.to_string())));
        };
        check(0, f32::NAN, "NaN");
        check(1023, f32::INFINITY, "inf");
        check(1024, f32::NEG_INFINITY, "-inf");
        check(4999, f32::NAN, "NaN");
        let wide = [1.0, f64::NEG_INFINITY];
        let found = first_non_finite(CkptDtype::F64, bytemuck::cast_slice(&wide));
        assert_eq!(found, Some((1, "-inf".to_string())));
        assert_eq!(first_non_finite(CkptDtype::F32, &[]), None);
    }
}
