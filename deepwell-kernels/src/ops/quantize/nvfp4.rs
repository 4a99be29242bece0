//! NVFP4 on the CPU: matrices, slices of a tensor, stacks of matrices, and groups of rows.

use std::ops::Range;

use deepwell_ir::DType;
use deepwell_ir::ops::Axis;
use deepwell_precision::nvfp4::{self, Common};
use deepwell_precision::{Philox, QuantFormat, QuantStats, QuantizeError, Source, packed};

use super::cpu::{PlanesOut, outer_and_k, tile_all, tiles};
use crate::KernelError;
use crate::runtime::cpu::arena::{Arena, In};
use crate::runtime::cpu::operands::Operands;

/// The numbers that share a tensor scale.
pub(crate) enum Scope {
    /// Each matrix.
    Matrix,
    /// A tensor of which the matrix is a slice; its amax.
    Tensor(In<f32>),
    /// Each group of rows; the offsets of the groups.
    Groups(In<i32>),
}

impl Scope {
    /// The scope that the input `index` of a call says, if the call has this input.
    pub(crate) fn new(operands: &Operands<'_>, index: usize) -> Result<Scope, KernelError> {
        if index >= operands.output(0) {
            return Ok(Scope::Matrix);
        }
        match operands.dtype(index) {
            DType::I32 => operands.input(index).map(Scope::Groups),
            _ => operands.input(index).map(Scope::Tensor),
        }
    }

    /// The parts of `rows` rows with a tensor scale each.
    pub(crate) fn parts(&self, rows: usize, arena: &Arena) -> Result<Vec<Range<usize>>, String> {
        let Scope::Groups(offsets) = self else { return Ok(std::iter::once(0..rows).collect()) };
        let offsets = offsets.of(arena);
        let at = |offset: i32| usize::try_from(offset).ok().filter(|&offset| offset <= rows);
        let groups = offsets.windows(2).map(|pair| Some(at(pair[0])?..at(pair[1])?));
        let groups: Option<Vec<Range<usize>>> = groups.collect();
        let is_ascending = |groups: &Vec<Range<usize>>| groups.iter().all(|it| it.start <= it.end);
        groups.filter(is_ascending).ok_or_else(|| {
            format!("expected offsets that ascend from 0 to {rows}, got {offsets:?}")
        })
    }

    /// The amax of a part of the rows of `x`, `[.., columns]`.
    pub(crate) fn amax<S: Source>(
        &self,
        x: &[S],
        [rows, columns]: [usize; 2],
        format: &QuantFormat,
        axis: Axis,
        arena: &Arena,
    ) -> Result<f32, QuantizeError> {
        match self {
            Scope::Tensor(amax) => Ok(amax.of(arena)[0]),
            _ => nvfp4_amax(x, [rows, columns], format, axis),
        }
    }
}

/// The amax of a matrix quantized along an axis.
pub(crate) fn nvfp4_amax<S: Source>(
    x: &[S],
    [rows, columns]: [usize; 2],
    format: &QuantFormat,
    axis: Axis,
) -> Result<f32, QuantizeError> {
    match axis {
        Axis::Column => nvfp4::amax_of_columns(x, rows, columns, format),
        _ => nvfp4::amax_of_rows(x, rows, columns, format),
    }
}

/// Matrices of a stack, each `shape`.
pub(super) struct Matrices<'a, S> {
    pub(super) x: &'a [S],
    pub(super) count: usize,
    pub(super) shape: [usize; 2],
}

/// An operand that a part of a matrix is written to: data and row-major scales of the whole matrix.
pub(crate) struct Target<'a> {
    pub(crate) axis: Axis,
    pub(crate) data: &'a mut [u8],
    pub(crate) plain: &'a mut [u8],
}

/// Quantizes the rows `part` of a matrix and returns their tensor scale.
pub(crate) fn quantize_part<S: Source>(
    x: &[S],
    [rows, columns]: [usize; 2],
    part: Range<usize>,
    format: &QuantFormat,
    (amax, philox, words): (f32, Option<Philox>, Option<(u64, u64)>),
    Target { axis, data, plain }: Target<'_>,
) -> Result<(f32, QuantStats), QuantizeError> {
    if axis == Axis::Column {
        let common = Common { amax, philox, words };
        return nvfp4::quantize_columns_of(x, (rows, columns), part, format, &common, data, plain);
    }
    let words = words.unwrap_or(((part.start * columns) as u64, columns as u64));
    let common = Common { amax, philox, words: Some(words) };
    let blocks = nvfp4::scales_len(1, columns);
    let bytes = packed::fp4_len(1, columns);
    nvfp4::quantize_rows(
        &x[part.start * columns..part.end * columns],
        part.len(),
        columns,
        format,
        &common,
        &mut data[part.start * bytes..part.end * bytes],
        &mut plain[part.start * blocks..part.end * blocks],
    )
}

pub(super) fn quantize<S: Source>(
    Matrices { x, count, shape: shape @ [rows, columns] }: Matrices<'_, S>,
    format: &QuantFormat,
    scope: &Scope,
    planes: &[PlanesOut],
    arena: &Arena,
) -> Result<QuantStats, String> {
    let text = |error: QuantizeError| error.to_string();
    let parts = scope.parts(rows, arena)?;
    let mut stats = QuantStats::default();
    for index in 0..count {
        let x = &x[index * rows * columns..][..rows * columns];
        for PlanesOut { data, scales, tensor_scale, axis } in planes {
            let (outer, k) = outer_and_k(*axis, rows, columns);
            let bytes = packed::fp4_len(outer, k);
            let data = &mut data.of(arena)[index * bytes..][..bytes];
            let first = index * tiles(outer, k, format);
            let plain = &mut scales.of(arena)[first..][..nvfp4::scales_len(outer, k)];
            if let Scope::Groups(_) = scope {
                // Rows after the last group.
                data.fill(0);
                plain.fill(0);
            }
            for (number, part) in parts.iter().enumerate() {
                let of_part = &x[part.start * columns..part.end * columns];
                let amax = scope.amax(of_part, [part.len(), columns], format, *axis, arena);
                let constants = (amax.map_err(text)?, None, None);
                let target = Target { axis: *axis, data: &mut *data, plain: &mut *plain };
                let (scale, of_part) =
                    quantize_part(x, shape, part.clone(), format, constants, target)
                        .map_err(text)?;
                if let Some(tensor_scale) = tensor_scale {
                    tensor_scale.of(arena)[index * parts.len() + number] = scale;
                }
                stats.merge(&of_part);
            }
        }
        tile_all(planes, shape, format, index, arena).map_err(text)?;
    }
    Ok(stats)
}
