//! Stochastic rounding of a quantized operand's elements: see `deepwell_ir::ops::StochasticRound`.

use deepwell_ir::ops::{Axis, PartOfColumns, StochasticRound};
use deepwell_ir::{ALIGNMENT_BYTES, KernelRequest, Op};
use deepwell_precision::hadamard::POINTS;
use deepwell_precision::{
    BLOCK, Philox, QuantFormat, QuantizeError, ScaleFormat, Source, e8m0, nvfp4, packed,
    scale_tiles,
};
use rayon::prelude::*;

use crate::KernelError;
use crate::ops::quantize::cpu::outer_and_k;
use crate::ops::quantize::nvfp4::{Scope, Target, quantize_part};
use crate::ops::quantize::packed::Gather;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{Carver, Tier};
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::vectorized;

/// Rounds the elements of an MX operand quantized from `x` `[rows, columns]`: `data` are packed
/// elements `[rows, columns]`, or along columns `[columns, rows]`, and `scales` are the operand's
/// scales, in tiles. The random word of an element is that of `philox` at the element's index in
/// the operand; `words` are the index of the first element and the distance from row to row if the
/// operand is a part of a larger one.
///
/// # Panics
///
/// If a slice is too short, or a transform does not divide the contraction into groups of 16.
pub fn stochastic_round<E: Element + Source>(
    x: &[E],
    columns: usize,
    format: &QuantFormat,
    axis: Axis,
    scales: &[u8],
    (philox, words): (Philox, Option<(u64, u64)>),
    data: &mut [u8],
) {
    if x.is_empty() {
        return;
    }
    let rows = x.len() / columns;
    let (outer, k) = outer_and_k(axis, rows, columns);
    let (element, hadamard) = (format.element, format.hadamard);
    let row_bytes = packed::len(element, 1, k);
    assert_eq!(outer * row_bytes, data.len(), "`data` is not of the length of `x`");
    assert!(hadamard.is_none() || k.is_multiple_of(POINTS), "expected groups of {POINTS} in {k}");
    let source = Gather { x, columns, axis, hadamard };
    let blocks = k.div_ceil(BLOCK);
    let (first_word, stride) = words.unwrap_or((0, k as u64));
    // As many rows of the operand as fill whole cache lines of x along a column.
    data.par_chunks_mut(BLOCK * row_bytes).enumerate().for_each(|(chunk, data)| {
        vectorized(
            #[inline(always)]
            || {
                let (mut words, mut values, mut codes) = ([0; BLOCK], [0.0; BLOCK], [0; BLOCK]);
                for block in 0..blocks {
                    for (row, data) in data.chunks_mut(row_bytes).enumerate() {
                        let outer = chunk * BLOCK + row;
                        let first = block * BLOCK;
                        let len = BLOCK.min(k - first);
                        philox.fill(first_word + outer as u64 * stride + first as u64, &mut words);
                        let scale = scales[scale_tiles::offset(outer, block, blocks)];
                        let factor = e8m0::reciprocal(scale);
                        source.row(outer, first..first + len, &mut values[..len]);
                        for ((code, &x), &word) in codes.iter_mut().zip(&values).zip(&words) {
                            *code = element.encode_stochastic(x * factor, word);
                        }
                        let bytes = packed::len(element, 1, len);
                        let data = &mut data[packed::len(element, 1, first)..][..bytes];
                        let is_packed = packed::pack(element, &codes[..len], 1, len, data);
                        is_packed.expect("a block of this length");
                    }
                }
            },
        );
    });
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::StochasticRound(op) = op else { return Err(operands.unknown_kernel()) };
    let &[rows, columns] = operands.shape(0) else {
        return Err(operands.unexpected(0, "a matrix"));
    };
    let scales = operands.input::<u8>(1)?;
    let key = operands.input::<u64>(op.key_input())?;
    let data = operands.target::<u8>(operands.output(0))?;
    let workspace = operands.workspace::<u8>()?;
    let (axis, format, part) = (op.axis, op.format, op.columns);
    let scope = Scope::new(operands, op.key_input() + 1)?;
    let stream = StochasticRound::stream(&operands.call.name);
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let key = key.of(arena);
            let philox = Philox { seed: key[0], stream: stream | u64::from(key[1] as u32) };
            let (x, data) = (x.of(arena), data.of(arena));
            if let ScaleFormat::E8m0(_) = format.scale {
                let words = part.map(|part| words_of_part(part, [rows, columns], axis));
                let scales = scales.of(arena);
                stochastic_round(x, columns, &format, axis, scales, (philox, words), data);
                return Ok(());
            }
            // Recomputes the scales, which come out unchanged.
            let shape = [rows, columns];
            let (outer, k) = if axis == Axis::Column { (columns, rows) } else { (rows, columns) };
            let plain = Carver::new(workspace.of(arena)).take::<u8>(nvfp4::scales_len(outer, k));
            if let Scope::Groups(_) = scope {
                data.fill(0);
            }
            let words = part.map(|part| words_of_part(part, shape, axis));
            let text = |error: QuantizeError| error.to_string();
            for group in scope.parts(rows, arena)? {
                let of_group = &x[group.start * columns..group.end * columns];
                let amax = scope.amax(of_group, [group.len(), columns], &format, axis, arena);
                let constants = (amax.map_err(text)?, Some(philox), words);
                let target = Target { axis, data: &mut *data, plain: &mut *plain };
                quantize_part(x, shape, group, &format, constants, target).map_err(text)?;
            }
            Ok(())
        }))
    })
}

/// Words of a part of the columns of a tensor: index of the first element in the whole operand, and
/// elements of a row of the whole operand.
pub(super) fn words_of_part(
    part: PartOfColumns,
    [rows, columns]: [usize; 2],
    axis: Axis,
) -> (u64, u64) {
    let (first, whole) = (part.place * columns, part.parts * columns);
    let (first, stride) = match axis {
        Axis::Column => (first * rows, rows),
        _ => (first, whole),
    };
    (first as u64, stride as u64)
}

/// Scratch for recomputed scales, in formats whose kernel computes scales and elements together.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let Op::StochasticRound(op) = request.op else { return 0 };
    match op.format.scale {
        ScaleFormat::E8m0(_) => 0,
        _ => request.operands[1].storage_bytes().unwrap_or(usize::MAX / 2) + 2 * ALIGNMENT_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use deepwell_precision::{
        ElementFormat, Hadamard16, quantize_rows, quantize_rows_stochastic, scales_len,
    };
    use half::bf16;

    use super::*;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts};

    const PHILOX: Philox = Philox { seed: 11, stream: 5 << 32 | 3 };

    fn tiles(plain: &[u8], outer: usize, k: usize) -> Vec<u8> {
        let blocks = k.div_ceil(BLOCK);
        let mut tiles = vec![0; scale_tiles::tiled_len(outer, blocks)];
        scale_tiles::to_tiles(plain, outer, blocks, &mut tiles).unwrap();
        tiles
    }

    fn source(rows: usize, columns: usize) -> Vec<bf16> {
        let normals = Random::new((rows * 31 + columns) as u64).normals(rows * columns);
        let spread = |(index, x): (usize, f32)| match index % 977 {
            500 => bf16::NAN,
            700 => bf16::INFINITY,
            _ => bf16::from_f32(x * 2f32.powi((index % 13) as i32 - 6)),
        };
        normals.into_iter().enumerate().map(spread).collect()
    }

    /// Packs codes of `[outer, k]`.
    fn packed_of(format: &QuantFormat, codes: &[u8], outer: usize, k: usize) -> Vec<u8> {
        let mut data = vec![0; packed::len(format.element, outer, k)];
        packed::pack(format.element, codes, outer, k, &mut data).unwrap();
        data
    }

    /// Rowwise, the bytes equal those of `deepwell-precision`; columnwise, those of the transposed
    /// matrix quantized rowwise.
    #[test]
    fn data_is_that_of_the_definition() {
        for (rows, columns) in [(0, 32), (1, 1), (33, 31), (64, 96), (70, 130)] {
            for &element in ElementFormat::ALL {
                check_data(rows, columns, QuantFormat::mx(element));
            }
        }
    }

    fn check_data(rows: usize, columns: usize, spec: QuantFormat) {
        {
            let x = source(rows, columns);
            let mut expected = vec![0; x.len()];
            let mut plain = vec![0; scales_len(rows, columns)];
            quantize_rows_stochastic(&x, rows, columns, &spec, PHILOX, &mut expected, &mut plain)
                .unwrap();
            let scales = tiles(&plain, rows, columns);
            let expected = packed_of(&spec, &expected, rows, columns);
            for_thread_counts(|| {
                let mut data = vec![0xEE; expected.len()];
                stochastic_round(&x, columns, &spec, Axis::Row, &scales, (PHILOX, None), &mut data);
                assert_eq!(data, expected, "{spec} rows of {rows}x{columns}");
                let transposed: Vec<bf16> = (0..x.len())
                    .map(|index| x[index % rows.max(1) * columns + index / rows.max(1)])
                    .collect();
                let mut turned = vec![0; x.len()];
                let mut of_columns = vec![0; scales_len(columns, rows)];
                quantize_rows_stochastic(
                    &transposed,
                    columns,
                    rows,
                    &spec,
                    PHILOX,
                    &mut turned,
                    &mut of_columns,
                )
                .unwrap();
                let scales = tiles(&of_columns, columns, rows);
                let turned = packed_of(&spec, &turned, columns, rows);
                let mut data = vec![0xEE; turned.len()];
                stochastic_round(
                    &x,
                    columns,
                    &spec,
                    Axis::Column,
                    &scales,
                    (PHILOX, None),
                    &mut data,
                );
                assert_eq!(data, turned, "{spec} columns of {rows}x{columns}");
                data
            });
        }
    }

    /// With a transform, the elements are those of the transformed matrix.
    #[test]
    fn a_transform_comes_before_rounding() {
        let (rows, columns) = (96, 64);
        let x = source(rows, columns);
        let format = QuantFormat::MXFP4;
        let transform = Hadamard16::TRAINING;
        for axis in [Axis::Row, Axis::Column] {
            let (outer, k) = outer_and_k(axis, rows, columns);
            let place = |index: usize| match axis {
                Axis::Column => index % k * columns + index / k,
                _ => index,
            };
            let mut values: Vec<f32> = (0..x.len()).map(|i| f32::from(x[place(i)])).collect();
            for group in values.as_chunks_mut::<POINTS>().0 {
                transform.forward_bf16(group);
            }
            let mut codes = vec![0; x.len()];
            let mut plain = vec![0; scales_len(outer, k)];
            quantize_rows_stochastic(&values, outer, k, &format, PHILOX, &mut codes, &mut plain)
                .unwrap();
            let expected = packed_of(&format, &codes, outer, k);
            let mut data = vec![0xEE; expected.len()];
            let scales = tiles(&plain, outer, k);
            let turned = format.with_hadamard(Some(transform));
            stochastic_round(&x, columns, &turned, axis, &scales, (PHILOX, None), &mut data);
            assert_eq!(data, expected, "{axis:?}");
        }
    }

    /// The halves of a matrix's columns have the words of the whole.
    #[test]
    fn parts_have_the_words_of_the_whole() {
        let (rows, columns, format) = (64, 128, QuantFormat::MXFP4);
        let x: Vec<f32> = source(rows, columns).into_iter().map(f32::from).collect();
        let round = |x: &[f32], columns: usize, axis: Axis, words: Option<(u64, u64)>| {
            let (outer, k) = outer_and_k(axis, rows, columns);
            // Every scale is 1.
            let scales = vec![127; scale_tiles::tiled_len(outer, k.div_ceil(BLOCK))];
            let mut data = vec![0; packed::len(format.element, outer, k)];
            stochastic_round(x, columns, &format, axis, &scales, (PHILOX, words), &mut data);
            let mut codes = vec![0; outer * k];
            packed::unpack(format.element, &data, outer, k, &mut codes).unwrap();
            codes
        };
        for axis in [Axis::Row, Axis::Column] {
            let whole = round(&x, columns, axis, None);
            for place in 0..2 {
                let half = columns / 2;
                let range =
                    |row: usize| row * columns + place * half..row * columns + place * half + half;
                let part: Vec<f32> = (0..rows).flat_map(|row| x[range(row)].to_vec()).collect();
                let of_part = PartOfColumns { place, parts: 2 };
                let words = words_of_part(of_part, [rows, half], axis);
                let got = round(&part, half, axis, Some(words));
                let expected: Vec<u8> = match axis {
                    Axis::Column => whole[place * half * rows..][..half * rows].to_vec(),
                    _ => (0..rows).flat_map(|row| whole[range(row)].to_vec()).collect(),
                };
                assert_eq!(got, expected, "part {place} {axis:?}");
                let own = round(&part, half, axis, None);
                assert!(place == 0 && axis == Axis::Column || own != expected, "part {place}");
            }
        }
    }

    /// Over many streams the mean is the value, which rounding to nearest misses; only the two
    /// neighbours occur, and both do.
    #[test]
    fn the_mean_is_the_value() {
        let (rows, columns) = (32, 64);
        // The largest element of a block is 448, so the scale is 1 and representable numbers are 32
        // apart at 300.
        let value = |index: usize| if index.is_multiple_of(BLOCK) { 448.0 } else { 301.0 };
        let x: Vec<f32> = (0..rows * columns).map(value).collect();
        let mut nearest = vec![0; x.len()];
        let mut plain = vec![0; scales_len(rows, columns)];
        let spec = QuantFormat::MXFP8;
        quantize_rows(&x, rows, columns, &spec, &mut nearest, &mut plain).unwrap();
        let scales = tiles(&plain, rows, columns);
        let (mut sum, mut count) = (0.0f64, 0u32);
        for step in 0..64 {
            let mut data = vec![0; x.len()];
            let philox = Philox { stream: step, ..PHILOX };
            stochastic_round(&x, columns, &spec, Axis::Row, &scales, (philox, None), &mut data);
            for (&x, &bits) in x.iter().zip(&data).filter(|(x, _)| **x == 301.0) {
                let got = ElementFormat::E4M3.decode(bits);
                assert!([288.0, 320.0].contains(&got), "{x} became {got}");
                sum += f64::from(got);
                count += 1;
            }
        }
        // 126,976 draws of two values 32 apart: the mean's standard deviation is 0.045.
        let mean = sum / f64::from(count);
        assert!((mean - 301.0).abs() < 5.0 * 0.045, "{mean} of {count}");
    }
}
