//! Elements of four and six bits stored without gaps.
//!
//! - **FP4**: two per byte, the element of the lower index in the low nibble.
//! - **FP6**: four to three bytes, little-endian: element i of a row occupies bits 6 i to 6 i + 5
//!   of the row, bit b being bit b % 8 of byte b / 8. So byte 0 holds element 0 and the two low
//!   bits of element 1.
//!
//! Each row starts at a byte boundary; bits after its last element are zero. FP6 is the dense form
//! for files and memory; tensor cores read FP6 and mixed FP4 from a padded form (16 elements, then
//! padding to 16 bytes), which a copy to shared memory creates.

use crate::ElementFormat;
use crate::error::{QuantizeError, Shape};

/// Bytes of a row-major [rows, cols] matrix of elements without gaps.
#[must_use]
pub const fn len(element: ElementFormat, rows: usize, cols: usize) -> usize {
    match element.bits() {
        4 => fp4_len(rows, cols),
        6 => fp6_len(rows, cols),
        _ => rows * cols,
    }
}

/// Packs row-major [rows, cols] elements, one per byte, into [`len`] bytes.
///
/// ```
/// use deepwell_precision::{ElementFormat, packed};
/// for (element, expected) in [
///     (ElementFormat::E2M1, &[0x21, 0x03][..]),
///     (ElementFormat::E3M2, &[0x81, 0x30, 0x00]),
///     (ElementFormat::E5M2, &[1, 2, 3]),
/// ] {
///     let mut bytes = vec![0; packed::len(element, 1, 3)];
///     packed::pack(element, &[1, 2, 3], 1, 3, &mut bytes)?;
///     assert_eq!(bytes, expected);
/// }
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn pack(
    element: ElementFormat,
    data: &[u8],
    rows: usize,
    cols: usize,
    bytes: &mut [u8],
) -> Result<(), QuantizeError> {
    match element.bits() {
        4 => pack_fp4(data, rows, cols, bytes),
        6 => pack_fp6(data, rows, cols, bytes),
        _ => {
            check(data.len(), rows, cols, bytes.len(), |rows, cols| rows * cols)?;
            bytes.copy_from_slice(data);
            Ok(())
        }
    }
}

/// The inverse of [`pack`].
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn unpack(
    element: ElementFormat,
    bytes: &[u8],
    rows: usize,
    cols: usize,
    data: &mut [u8],
) -> Result<(), QuantizeError> {
    match element.bits() {
        4 => unpack_fp4(bytes, rows, cols, data),
        6 => unpack_fp6(bytes, rows, cols, data),
        _ => {
            check(data.len(), rows, cols, bytes.len(), |rows, cols| rows * cols)?;
            data.copy_from_slice(bytes);
            Ok(())
        }
    }
}

/// Bytes of a row-major [rows, cols] matrix of FP4 elements.
#[must_use]
pub const fn fp4_len(rows: usize, cols: usize) -> usize {
    rows * cols.div_ceil(2)
}

/// Bytes of a row-major [rows, cols] matrix of FP6 elements.
#[must_use]
pub const fn fp6_len(rows: usize, cols: usize) -> usize {
    rows * fp6_row(cols)
}

/// Six bits per element, rounded up to bytes, without overflow for any `cols`.
const fn fp6_row(cols: usize) -> usize {
    cols / 4 * 3 + (cols % 4 * 6).div_ceil(8)
}

/// Element `index` of a packed row.
///
/// # Panics
///
/// If the row is too short.
#[must_use]
#[inline(always)]
pub fn code(element: ElementFormat, row: &[u8], index: usize) -> u8 {
    match element.bits() {
        4 => row[index / 2] >> (index % 2 * 4) & 0xF,
        6 => {
            let (byte, shift) = (index * 6 / 8, index * 6 % 8);
            // Only elements across two bytes read the second.
            let next = if shift > 2 { row[byte + 1] } else { 0 };
            (u16::from_le_bytes([row[byte], next]) >> shift) as u8 & 0x3F
        }
        _ => row[index],
    }
}

/// Packs row-major [rows, cols] FP4 elements, one per byte, into [`fp4_len`] bytes. The high
/// nibbles of `data` are ignored.
///
/// ```
/// let mut bytes = [0; 2];
/// deepwell_precision::packed::pack_fp4(&[1, 2, 3], 1, 3, &mut bytes)?;
/// assert_eq!(bytes, [0x21, 0x03]);
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn pack_fp4(
    data: &[u8],
    rows: usize,
    cols: usize,
    bytes: &mut [u8],
) -> Result<(), QuantizeError> {
    check(data.len(), rows, cols, bytes.len(), fp4_len)?;
    if cols == 0 {
        return Ok(());
    }
    for (data, bytes) in data.chunks_exact(cols).zip(bytes.chunks_exact_mut(cols.div_ceil(2))) {
        let (pairs, last) = data.as_chunks::<2>();
        for (pair, byte) in pairs.iter().zip(&mut *bytes) {
            *byte = (pair[0] & 0xF) | (pair[1] << 4);
        }
        if let (&[code], Some(byte)) = (last, bytes.last_mut()) {
            *byte = code & 0xF;
        }
    }
    Ok(())
}

/// Sixteen bytes of FP4 from 32 elements.
#[inline(always)]
pub(crate) fn pack_pairs(data: &[u8; 32]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(data.as_chunks::<2>().0) {
        // As 16-bit words, so that a vector of pairs narrows to a vector of bytes.
        let word = u16::from_le_bytes(*pair);
        *byte = ((word & 0xF) | (word >> 4)) as u8;
    }
    bytes
}

/// The inverse of [`pack_fp4`].
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn unpack_fp4(
    bytes: &[u8],
    rows: usize,
    cols: usize,
    data: &mut [u8],
) -> Result<(), QuantizeError> {
    check(data.len(), rows, cols, bytes.len(), fp4_len)?;
    if cols == 0 {
        return Ok(());
    }
    for (data, bytes) in data.chunks_exact_mut(cols).zip(bytes.chunks_exact(cols.div_ceil(2))) {
        for (pair, &byte) in data.chunks_mut(2).zip(bytes) {
            pair[0] = byte & 0xF;
            if let Some(high) = pair.get_mut(1) {
                *high = byte >> 4;
            }
        }
    }
    Ok(())
}

/// Packs row-major [rows, cols] FP6 elements, one per byte, into [`fp6_len`] bytes. The two high
/// bits of `data` are ignored.
///
/// ```
/// let mut bytes = [0; 3];
/// deepwell_precision::packed::pack_fp6(&[0x3F, 0, 0x3F, 0], 1, 4, &mut bytes)?;
/// assert_eq!(bytes, [0x3F, 0xF0, 0x03]);
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn pack_fp6(
    data: &[u8],
    rows: usize,
    cols: usize,
    bytes: &mut [u8],
) -> Result<(), QuantizeError> {
    check(data.len(), rows, cols, bytes.len(), fp6_len)?;
    if cols == 0 {
        return Ok(());
    }
    for (data, bytes) in data.chunks_exact(cols).zip(bytes.chunks_exact_mut(fp6_row(cols))) {
        for (eight, six) in data.chunks(8).zip(bytes.chunks_mut(6)) {
            let mut padded = [0; 8];
            let word = match eight.as_array() {
                Some(eight) => gather_six_bits(u64::from_le_bytes(*eight)),
                None => {
                    padded[..eight.len()].copy_from_slice(eight);
                    gather_six_bits(u64::from_le_bytes(padded))
                }
            };
            six.copy_from_slice(&word.to_le_bytes()[..six.len()]);
        }
    }
    Ok(())
}

/// The inverse of [`pack_fp6`].
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn unpack_fp6(
    bytes: &[u8],
    rows: usize,
    cols: usize,
    data: &mut [u8],
) -> Result<(), QuantizeError> {
    check(data.len(), rows, cols, bytes.len(), fp6_len)?;
    if cols == 0 {
        return Ok(());
    }
    for (data, bytes) in data.chunks_exact_mut(cols).zip(bytes.chunks_exact(fp6_row(cols))) {
        for (eight, six) in data.chunks_mut(8).zip(bytes.chunks(6)) {
            let mut padded = [0; 8];
            match six.as_array::<6>() {
                Some(six) => padded[..6].copy_from_slice(six),
                None => padded[..six.len()].copy_from_slice(six),
            }
            let word = spread_six_bits(u64::from_le_bytes(padded)).to_le_bytes();
            match eight.as_mut_array() {
                Some(eight) => *eight = word,
                None => eight.copy_from_slice(&word[..eight.len()]),
            }
        }
    }
    Ok(())
}

/// Packs the low six bits of eight bytes contiguously into the low 48 bits, merging pairs, then
/// pairs of pairs, then halves.
const fn gather_six_bits(word: u64) -> u64 {
    let word = (word & 0x003F_003F_003F_003F) | ((word & 0x3F00_3F00_3F00_3F00) >> 2);
    let word = (word & 0x0000_0FFF_0000_0FFF) | ((word & 0x0FFF_0000_0FFF_0000) >> 4);
    (word & 0x00FF_FFFF) | ((word & 0x00FF_FFFF_0000_0000) >> 8)
}

/// The inverse of [`gather_six_bits`].
const fn spread_six_bits(word: u64) -> u64 {
    let word = (word & 0x00FF_FFFF) | ((word & 0xFFFF_FF00_0000) << 8);
    let word = (word & 0x0000_0FFF_0000_0FFF) | ((word & 0x00FF_F000_00FF_F000) << 4);
    (word & 0x003F_003F_003F_003F) | ((word & 0x0FC0_0FC0_0FC0_0FC0) << 2)
}

fn check(
    data: usize,
    rows: usize,
    cols: usize,
    bytes: usize,
    len: fn(usize, usize) -> usize,
) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("data", rows * cols, data)?;
    shape.expect("bytes", len(rows, cols), bytes)
}
