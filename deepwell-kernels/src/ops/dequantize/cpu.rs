//! Dequantizes data and tiled scales.
//!
//! The result is E4M3 times a power of two: exact in FP32, or infinite. BF16 rounds as documented
//! in `deepwell_ir::ops::Dequantize`.

use deepwell_ir::ops::Axis;
use deepwell_ir::{Op, Storage};
use deepwell_precision::{BLOCK, e4m3, e8m0, scale_tiles};
use rayon::prelude::*;

use crate::KernelError;
use crate::ops::scaled_gemm::nvfp4::Planes;
use crate::runtime::cpu::arena::In;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::chunk_elements;

/// Values of all E4M3 bit patterns.
const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut bits = 0;
    while bits < values.len() {
        values[bits] = e4m3::decode(bits as u8);
        bits += 1;
    }
    values
};

/// Dequantizes a rowwise operand: `data` and `target` `[rows, columns]`, `scales` tiles of
/// `[rows, ceil(columns / 32)]`.
///
/// # Panics
///
/// If a slice is too short.
pub fn dequantize_rows<E: Element>(data: &[u8], scales: &[u8], columns: usize, target: &mut [E]) {
    assert_eq!(data.len(), target.len(), "`data` and `target` differ in length");
    let blocks = columns.div_ceil(BLOCK);
    let rows_of_chunk = (chunk_elements(columns) / columns.max(1)).max(1);
    let chunks = target.par_chunks_mut(rows_of_chunk * columns.max(1));
    chunks.enumerate().for_each(|(chunk, target)| {
        for (row, target) in target.chunks_mut(columns).enumerate() {
            let row = chunk * rows_of_chunk + row;
            let data = &data[row * columns..][..columns];
            let groups = target.chunks_mut(BLOCK).zip(data.chunks(BLOCK)).enumerate();
            for (block, (target, data)) in groups {
                let scale = e8m0::decode(scales[scale_tiles::offset(row, block, blocks)]);
                for (target, &bits) in target.iter_mut().zip(data) {
                    *target = E::from_f32(VALUES[usize::from(bits)] * scale);
                }
            }
        }
    });
}

/// Dequantizes a columnwise operand and transposes it back: `data` `[columns, rows]`, `scales`
/// tiles of `[columns, ceil(rows / 32)]`, `target` `[rows, columns]`.
///
/// # Panics
///
/// If a slice is too short.
pub fn dequantize_columns<E: Element>(
    data: &[u8],
    scales: &[u8],
    columns: usize,
    target: &mut [E],
) {
    assert_eq!(data.len(), target.len(), "`data` and `target` differ in length");
    if columns == 0 {
        return;
    }
    let rows = target.len() / columns;
    let blocks = rows.div_ceil(BLOCK);
    target.par_chunks_mut(BLOCK * columns).enumerate().for_each(|(block, target)| {
        for column in 0..columns {
            let scale = e8m0::decode(scales[scale_tiles::offset(column, block, blocks)]);
            let data = &data[column * rows + block * BLOCK..];
            for (target, &bits) in target.chunks_mut(columns).zip(data) {
                target[column] = E::from_f32(VALUES[usize::from(bits)] * scale);
            }
        }
    });
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Dequantize(op) = op else { return Err(operands.unknown_kernel()) };
    let target_index = operands.output(0);
    let (matrices, columns) = match *operands.shape(target_index) {
        [_, columns] => (1, columns),
        [matrices, _, columns] => (matrices, columns),
        _ => return Err(operands.unexpected(target_index, "a matrix, or a stack of them")),
    };
    let (data, scales) = (operands.input::<u8>(0)?, operands.input::<u8>(1)?);
    let tensor_scale: Option<In<f32>> = match Storage::plane_count(&op.format) {
        3 => Some(operands.input(2)?),
        _ => None,
    };
    let (axis, transform) = (op.axis, op.format.hadamard);
    let k = *operands.shape(0).last().unwrap_or(&0);
    by_float!(operands, target_index, E => {
        let target = operands.target::<E>(target_index)?;
        Ok(Box::new(move |arena| {
            let data = data.of(arena);
            let scales = scales.of(arena);
            let target = target.of(arena);
            match (&tensor_scale, axis) {
                (Some(scale), axis) => {
                    let planes = Planes::whole(data, scales, scale.of(arena)[0], k);
                    match (axis, transform) {
                        (Axis::Column, None) => planes.dequantize_columns(columns, target),
                        (Axis::Column, Some(transform)) => {
                            planes.dequantize_transformed_columns(transform, columns, target);
                        }
                        (_, None) => planes.dequantize_rows(target),
                        (_, Some(transform)) => {
                            planes.dequantize_transformed_rows(transform, target);
                        }
                    }
                }
                (None, axis) => {
                    let [elements, tiles] = [data.len(), scales.len()].map(|n| n / matrices.max(1));
                    for index in 0..matrices {
                        let data = &data[index * elements..][..elements];
                        let scales = &scales[index * tiles..][..tiles];
                        let target = &mut target[index * elements..][..elements];
                        match axis {
                            Axis::Column => dequantize_columns(data, scales, columns, target),
                            _ => dequantize_rows(data, scales, columns, target),
                        }
                    }
                }
            }
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::dequantize::oracle as mx;
    use crate::runtime::cpu::test_support::{for_thread_counts, poisoned};

    /// Every E4M3 bit pattern, with different scales in neighbouring blocks; `specials` includes
    /// the ends of the range.
    fn operand(rows: usize, columns: usize, specials: bool) -> (Vec<u8>, Vec<u8>) {
        let data = (0..rows * columns).map(|index| (index * 37 + index / 256) as u8).collect();
        let scale = |index: usize| match (specials, index % 5) {
            (true, 1) => 0,
            (true, 3) => 254,
            (true, 4) => 255,
            _ => 100 + (index * 7 % 50) as u8,
        };
        (data, (0..rows * columns.div_ceil(BLOCK)).map(scale).collect())
    }

    /// An oracle's number as stored in `E`.
    fn stored<E: Element>(value: f64) -> E {
        // FP32 represents each number exactly, or as infinity.
        E::from_f32(value as f32)
    }

    fn check<E: Element>(rows: usize, columns: usize, specials: bool) {
        let what = format!("{rows}x{columns} {}", E::NAME);
        let tiles = |plain: &[u8], rows: usize, blocks: usize| {
            let mut tiles = vec![0xEE; scale_tiles::tiled_len(rows, blocks)];
            scale_tiles::to_tiles(plain, rows, blocks, &mut tiles).unwrap();
            tiles
        };
        let assert_same = |got: &[E], expected: Vec<f64>, what: &str| {
            for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
                let expected = stored::<E>(expected).to_f32();
                let same = got.to_f32().to_bits() == expected.to_bits()
                    || got.to_f32().is_nan() && expected.is_nan();
                assert!(same, "{what} at {index}: expected {expected:e}, got {got:?}");
            }
        };
        let (data, plain) = operand(rows, columns, specials);
        let scales = tiles(&plain, rows, columns.div_ceil(BLOCK));
        for_thread_counts(|| {
            let mut got = poisoned::<E>(rows * columns);
            dequantize_rows(&data, &scales, columns, &mut got);
            let expected = mx::dequantize_rows(&data, &plain, rows, columns);
            assert_same(&got, expected, &format!("rows of {what}"));
            got.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>()
        });
        let (data, plain) = operand(columns, rows, specials);
        let scales = tiles(&plain, columns, rows.div_ceil(BLOCK));
        let mut got = poisoned::<E>(rows * columns);
        dequantize_columns(&data, &scales, columns, &mut got);
        let expected = mx::dequantize_transposed(&data, &plain, rows, columns);
        assert_same(&got, expected, &format!("columns of {what}"));
    }

    #[test]
    fn values_are_those_of_the_definition() {
        for (rows, columns) in
            [(0, 32), (3, 0), (1, 1), (31, 33), (32, 32), (33, 31), (130, 96), (257, 160)]
        {
            for specials in [false, true] {
                check::<f32>(rows, columns, specials);
                check::<bf16>(rows, columns, specials);
            }
        }
    }

    /// As the op documents for BF16: exact except at both ends of the range.
    #[test]
    fn bf16_is_exact_but_at_the_ends_of_its_range() {
        let columns = 256;
        let data: Vec<u8> = (0..=u8::MAX).collect();
        for scale in 0..=254u8 {
            let scales = vec![scale; scale_tiles::tiled_len(1, columns / BLOCK)];
            let mut narrow = poisoned::<bf16>(columns);
            let mut wide = poisoned::<f32>(columns);
            dequantize_rows(&data, &scales, columns, &mut narrow);
            dequantize_rows(&data, &scales, columns, &mut wide);
            for (narrow, wide) in narrow.iter().zip(wide).filter(|(_, wide)| !wide.is_nan()) {
                let narrow = f64::from(narrow.to_f32());
                let is_exact = narrow == f64::from(wide);
                let is_small = f64::from(wide).abs() < 2f64.powi(-126) && scale < 127 - 124;
                assert!(is_exact || is_small, "{wide:e} became {narrow:e}");
                assert!(!narrow.is_infinite() || scale > 127 + 119, "{wide:e} under 2^{scale}");
            }
        }
    }
}
