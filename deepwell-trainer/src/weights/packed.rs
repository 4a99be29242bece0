//! Unpacks the packed weights of published mixtures.
//!
//! MXFP4 needs no rounding: an element has two significant bits and its scale is a power of two, so
//! that F32 and BF16 represent each product exactly. An E4M3 element times its F32 factor is
//! rounded once, to F32.

use deepwell_ir::capture::{StoredSlice, WeightPacking, Weights};
use deepwell_precision::{e2m1, e4m3, e8m0};
use safetensors::Dtype;

use crate::TrainError;

/// Elements per scale in MXFP4, and their number of bytes.
const MXFP4_BLOCK: usize = 32;
const MXFP4_BYTES: usize = MXFP4_BLOCK / 2;

/// Fills `values`, which have the shape of `part`.
///
/// # Errors
/// A tensor is missing or has another shape or type, or a value is not finite.
pub(super) fn read(
    files: &Weights,
    part: &StoredSlice,
    packing: WeightPacking,
    values: &mut [f32],
) -> Result<(), TrainError> {
    let name = &part.name;
    match (packing, part.shape.as_slice()) {
        (WeightPacking::Mxfp4, [stack @ .., columns]) => {
            let blocks = [stack, &[columns / MXFP4_BLOCK]].concat();
            let data = [&blocks[..], &[MXFP4_BYTES]].concat();
            let data = files.read_bytes(&format!("{name}_blocks"), &data, Dtype::U8)?;
            let scales = files.read_bytes(&format!("{name}_scales"), &blocks, Dtype::U8)?;
            unpack_mxfp4(&data, &scales, values);
        }
        (WeightPacking::Fp8Blocks { rows, columns }, &[height, width]) => {
            let data = files.read_bytes(name, &part.shape, Dtype::F8_E4M3)?;
            let shape = [height.div_ceil(rows), width.div_ceil(columns)];
            let factors = files.read_f32(&format!("{name}_scale_inv"), &shape)?;
            unpack_fp8(&data, &factors, width, [rows, columns], values);
        }
        (packing, shape) => {
            return Err(TrainError::Setting {
                setting: "model",
                expected: format!("a matrix in `{name}`, or a packing that is read"),
                got: format!("{packing:?} of {shape:?}"),
                hint: None,
            });
        }
    }
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(TrainError::Setting {
            setting: "model",
            expected: format!("finite values in `{name}`"),
            got: format!("{} at element {index}", values[index]),
            hint: Some("the file is damaged: download it again".to_string()),
        }),
    }
}

/// Two elements a byte, the low four bits first, and a scale for each 32.
fn unpack_mxfp4(data: &[u8], scales: &[u8], values: &mut [f32]) {
    let blocks = values.chunks_exact_mut(MXFP4_BLOCK).zip(data.chunks_exact(MXFP4_BYTES));
    for ((values, data), &scale) in blocks.zip(scales) {
        let scale = e8m0::decode(scale);
        for (pair, &byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(data) {
            *pair = [byte & 0xf, byte >> 4].map(|code| e2m1::decode(code) * scale);
        }
    }
}

/// An element a byte, in rows of `width`, and a factor for each block of rows and columns.
fn unpack_fp8(
    data: &[u8],
    factors: &[f32],
    width: usize,
    [rows, columns]: [usize; 2],
    values: &mut [f32],
) {
    let per_row = width.div_ceil(columns);
    for (index, (value, &byte)) in values.iter_mut().zip(data).enumerate() {
        let (row, column) = (index / width, index % width);
        *value = e4m3::decode(byte) * factors[row / rows * per_row + column / columns];
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use safetensors::SafeTensors;

    use super::*;

    /// Equals the result of transformers for the same bytes (`convert_moe_packed_tensors`, see
    /// `tests/oracle/README.md`), which transposes: bit for bit, and in BF16 too.
    #[test]
    fn mxfp4_is_what_transformers_makes_of_it() {
        let file = include_bytes!("../../tests/oracle/mxfp4.safetensors");
        let file = SafeTensors::deserialize(file).unwrap();
        let [blocks, scales, expected] =
            ["blocks", "scales", "values"].map(|name| file.tensor(name).unwrap());
        let &[experts, columns, rows] = expected.shape() else { panic!("no stack") };
        assert_eq!(blocks.shape(), [experts, rows, columns / MXFP4_BLOCK, MXFP4_BYTES]);
        let expected: Vec<f32> = expected
            .data()
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        let mut values = vec![f32::NAN; expected.len()];
        unpack_mxfp4(blocks.data(), scales.data(), &mut values);
        for (index, value) in values.iter().enumerate() {
            let (row, column) = (index / columns, index % columns);
            let (expert, row) = (row / rows, row % rows);
            let turned = expected[(expert * columns + column) * rows + row];
            assert_eq!(value.to_bits(), turned.to_bits(), "element {index}");
            assert_eq!(bf16::from_f32(*value).to_f32(), *value, "BF16 holds it");
        }
        assert!(values.iter().any(|value| *value != 0.0));
    }

    #[test]
    fn fp8_blocks_by_hand() {
        // Three rows and columns in blocks of two: E4M3 1.0 is 0x38, 2.0 is 0x40.
        let data = [0x38, 0x40, 0x38, 0x38, 0x38, 0x40, 0xb8, 0x38, 0x00];
        let mut values = [f32::NAN; 9];
        unpack_fp8(&data, &[1.0, 10.0, 100.0, 1000.0], 3, [2, 2], &mut values);
        assert_eq!(values, [1.0, 2.0, 10.0, 1.0, 1.0, 20.0, -100.0, 100.0, 0.0]);
    }
}
