//! Dequantizes data and tiled scales.
//!
//! An element of an MX format times a power of two is exact in FP32, or infinite. BF16 rounds as
//! documented in `deepwell_ir::ops::Dequantize`.

use deepwell_ir::ops::Axis;
use deepwell_ir::{Op, Storage};
use deepwell_precision::hadamard::POINTS;
use deepwell_precision::{BLOCK, ElementFormat, Hadamard16, e8m0, packed, scale_tiles};
use rayon::prelude::*;

use crate::KernelError;
use crate::ops::scaled_gemm::nvfp4::Planes;
use crate::runtime::cpu::arena::In;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::elements::{unpack_block, values_of};
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::chunk_elements;

/// Planes of an MX operand, with scales in tiles.
#[derive(Clone, Copy, Debug)]
pub struct MxPlanes<'a> {
    /// Format of the elements.
    pub element: ElementFormat,
    /// Transform to undo.
    pub hadamard: Option<Hadamard16>,
    /// Packed elements, `[outer, k]`.
    pub data: &'a [u8],
    /// Tiles of `[outer, ceil(k / 32)]`.
    pub scales: &'a [u8],
}

impl MxPlanes<'_> {
    /// Writes the numbers of block `block` of a row of the operand.
    #[inline(always)]
    fn block(&self, row: usize, block: usize, k: usize, values: &mut [f32]) {
        let MxPlanes { element, hadamard, data, scales } = *self;
        let blocks = k.div_ceil(BLOCK);
        let first = packed::len(element, row, k) + packed::len(element, 1, block * BLOCK);
        let scale = e8m0::decode(scales[scale_tiles::offset(row, block, blocks)]);
        let mut codes = [0; BLOCK];
        let codes = unpack_block(element, &data[first..], &mut codes[..values.len()]);
        let table = values_of(element);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = table[usize::from(code)] * scale;
        }
        if let Some(transform) = hadamard {
            let groups = values.as_chunks_mut::<POINTS>().0;
            groups.iter_mut().for_each(|group| transform.inverse(group));
        }
    }

    /// Dequantizes row `row` of a rowwise operand.
    ///
    /// # Panics
    ///
    /// If a slice is too short.
    #[inline(always)]
    pub fn row<E: Element>(&self, row: usize, target: &mut [E]) {
        let columns = target.len();
        let mut values = [0.0; BLOCK];
        for (block, target) in target.chunks_mut(BLOCK).enumerate() {
            let values = &mut values[..target.len()];
            self.block(row, block, columns, values);
            for (target, &value) in target.iter_mut().zip(&*values) {
                *target = E::from_f32(value);
            }
        }
    }

    /// Dequantizes a rowwise operand to `target` `[rows, columns]`.
    ///
    /// # Panics
    ///
    /// If a slice is too short.
    pub fn rows<E: Element>(&self, columns: usize, target: &mut [E]) {
        let rows_of_chunk = (chunk_elements(columns) / columns.max(1)).max(1);
        let chunks = target.par_chunks_mut(rows_of_chunk * columns.max(1));
        chunks.enumerate().for_each(|(chunk, target)| {
            for (row, target) in target.chunks_mut(columns).enumerate() {
                self.row(chunk * rows_of_chunk + row, target);
            }
        });
    }

    /// Dequantizes a columnwise operand, `[columns, rows]`, and transposes it back to `target`
    /// `[rows, columns]`.
    ///
    /// # Panics
    ///
    /// If a slice is too short.
    pub fn columns<E: Element>(&self, columns: usize, target: &mut [E]) {
        if columns == 0 {
            return;
        }
        let rows = target.len() / columns;
        target.par_chunks_mut(BLOCK * columns).enumerate().for_each(|(block, target)| {
            let mut values = [0.0; BLOCK];
            let values = &mut values[..target.len() / columns];
            for column in 0..columns {
                self.block(column, block, rows, values);
                for (target, &value) in target.chunks_mut(columns).zip(&*values) {
                    target[column] = E::from_f32(value);
                }
            }
        });
    }
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
    let (axis, transform, element) = (op.axis, op.format.hadamard, op.format.element);
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
                    let lengths = [data.len(), scales.len(), target.len()];
                    let [bytes, tiles, elements] = lengths.map(|n| n / matrices.max(1));
                    for index in 0..matrices {
                        let planes = MxPlanes {
                            element,
                            hadamard: transform,
                            data: &data[index * bytes..][..bytes],
                            scales: &scales[index * tiles..][..tiles],
                        };
                        let target = &mut target[index * elements..][..elements];
                        match axis {
                            Axis::Column => planes.columns(columns, target),
                            _ => planes.rows(columns, target),
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

    /// Every bit pattern, one per byte, with different scales in neighbouring blocks; `specials`
    /// includes the ends of the range.
    fn operand(
        element: ElementFormat,
        rows: usize,
        columns: usize,
        specials: bool,
    ) -> (Vec<u8>, Vec<u8>) {
        let mask = ((1u32 << element.bits()) - 1) as u8;
        let code = |index: usize| (index * 37 + index / 256) as u8 & mask;
        let data = (0..rows * columns).map(code).collect();
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

    fn packed_of(element: ElementFormat, codes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
        let mut data = vec![0; packed::len(element, rows, columns)];
        packed::pack(element, codes, rows, columns, &mut data).unwrap();
        data
    }

    fn check<E: Element>(element: ElementFormat, rows: usize, columns: usize, specials: bool) {
        let what = format!("{element} {rows}x{columns} {}", E::NAME);
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
        let (codes, plain) = operand(element, rows, columns, specials);
        let scales = tiles(&plain, rows, columns.div_ceil(BLOCK));
        let data = packed_of(element, &codes, rows, columns);
        for_thread_counts(|| {
            let mut got = poisoned::<E>(rows * columns);
            let planes = MxPlanes { element, hadamard: None, data: &data, scales: &scales };
            planes.rows(columns, &mut got);
            let expected = mx::dequantize_elements(element, &codes, &plain, rows, columns);
            assert_same(&got, expected, &format!("rows of {what}"));
            got.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>()
        });
        let (codes, plain) = operand(element, columns, rows, specials);
        let scales = tiles(&plain, columns, rows.div_ceil(BLOCK));
        let data = packed_of(element, &codes, columns, rows);
        let mut got = poisoned::<E>(rows * columns);
        let planes = MxPlanes { element, hadamard: None, data: &data, scales: &scales };
        planes.columns(columns, &mut got);
        let turned = mx::dequantize_elements(element, &codes, &plain, columns, rows);
        let expected = mx::transpose(&turned, rows, columns);
        assert_same(&got, expected, &format!("columns of {what}"));
    }

    #[test]
    fn values_are_those_of_the_definition() {
        for (rows, columns) in
            [(0, 32), (3, 0), (1, 1), (31, 33), (32, 32), (33, 31), (130, 96), (257, 160)]
        {
            for &element in ElementFormat::ALL {
                for specials in [false, true] {
                    check::<f32>(element, rows, columns, specials);
                    check::<bf16>(element, rows, columns, specials);
                }
            }
        }
    }

    /// A transform is undone, up to the rounding of BF16 and of FP32.
    #[test]
    fn a_transform_is_undone() {
        let (rows, columns, element) = (96, 48, ElementFormat::E2M1);
        let transform = Hadamard16::TRAINING;
        for axis in [Axis::Row, Axis::Column] {
            let (outer, k) = if axis == Axis::Column { (columns, rows) } else { (rows, columns) };
            let (codes, plain) = operand(element, outer, k, false);
            let data = packed_of(element, &codes, outer, k);
            let blocks = k.div_ceil(BLOCK);
            let mut scales = vec![0; scale_tiles::tiled_len(outer, blocks)];
            scale_tiles::to_tiles(&plain, outer, blocks, &mut scales).unwrap();
            let planes =
                MxPlanes { element, hadamard: Some(transform), data: &data, scales: &scales };
            let mut got = vec![0f32; rows * columns];
            match axis {
                Axis::Column => planes.columns(columns, &mut got),
                _ => planes.rows(columns, &mut got),
            }
            let expected = mx::dequantize_elements(element, &codes, &plain, outer, k);
            for row in 0..outer {
                let mut values: Vec<f32> = (0..k)
                    .map(|at| match axis {
                        Axis::Column => got[at * columns + row],
                        _ => got[row * columns + at],
                    })
                    .collect();
                for group in values.as_chunks_mut::<POINTS>().0 {
                    transform.forward(group);
                }
                for (at, value) in values.iter().enumerate() {
                    let expected = expected[row * k + at];
                    let block = &values[at / POINTS * POINTS..][..POINTS];
                    let size = block.iter().fold(0.0f32, |size, x| size.max(x.abs()));
                    // Two transforms of four rounded additions each, in units of the largest value.
                    let tolerance = f64::from(size) * 16.0 * 2f64.powi(-23);
                    assert!((f64::from(*value) - expected).abs() <= tolerance, "{row} {at}");
                }
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
            let (element, hadamard) = (ElementFormat::E4M3, None);
            let planes = MxPlanes { element, hadamard, data: &data, scales: &scales };
            planes.rows(columns, &mut narrow);
            planes.rows(columns, &mut wide);
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
