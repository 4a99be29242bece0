//! Samples of operands and the error of products, on the CPU.

use deepwell_ir::ops::{Axis, ProductError, SAMPLED_ROWS};
use deepwell_ir::{ALIGNMENT_BYTES, KernelRequest, Op, Storage};
use deepwell_precision::{QuantFormat, ScaleFormat, e8m0, packed, scale_tiles, ue4m3};

use super::window::Part;
use crate::KernelError;
use crate::runtime::cpu::arena::{Arena, In};
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{Carver, Tier};
use crate::runtime::cpu::operands::{Operands, Run, by_float};

pub(super) fn prepare_sample(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::SampleOperand(op) = op else { return Err(operands.unknown_kernel()) };
    let shape = operands.shape(0);
    let &[.., rows, columns] = shape else {
        return Err(operands.unexpected(0, "a matrix or a stack of matrices"));
    };
    let offsets = offsets_of(operands, 1)?;
    let part = Part::of_source(shape, op.axis, offsets.is_some());
    let is_column = op.axis == Axis::Column;
    let width = if is_column { SAMPLED_ROWS } else { op.depth };
    let sizes = if is_column { [columns, rows] } else { [rows, columns] };
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        let sample = operands.target::<E>(operands.output(0))?;
        Ok(Box::new(move |arena| {
            let window = part.window(offsets_in(&offsets, arena), sizes);
            let x = &x.of(arena)[window.matrix * rows * columns..];
            for (row, target) in sample.of(arena).chunks_mut(width).enumerate() {
                for (column, target) in target.iter_mut().enumerate() {
                    let place = match is_column {
                        true => window.at(column, row).map(|[outer, along]| [along, outer]),
                        false => window.at(row, column),
                    };
                    *target = match place {
                        Some([row, column]) => x[row * columns + column],
                        None => E::from_f32(0.0),
                    };
                }
            }
            Ok(())
        }))
    })
}

/// The offsets of groups, where the input at this index is there.
fn offsets_of(operands: &Operands<'_>, index: usize) -> Result<Option<In<i32>>, KernelError> {
    (operands.output(0) > index).then(|| operands.input(index)).transpose()
}

fn offsets_in<'a>(offsets: &Option<In<i32>>, arena: &'a Arena) -> &'a [i32] {
    offsets.as_ref().map_or(&[], |offsets| offsets.of(arena))
}

/// Planes of a quantized operand.
struct Planes {
    data: In<u8>,
    scales: In<u8>,
    tensor_scale: Option<In<f32>>,
    part: Part,
    outer: usize,
    k: usize,
    format: QuantFormat,
}

impl Planes {
    fn new(
        operands: &Operands<'_>,
        first: usize,
        format: QuantFormat,
        part: Part,
    ) -> Result<Planes, KernelError> {
        let &[.., outer, k] = operands.shape(first) else {
            return Err(operands.unexpected(first, "a matrix or a stack of matrices"));
        };
        let tensor_scale = match Storage::plane_count(&format) {
            3 => Some(operands.input(first + 2)?),
            _ => None,
        };
        let (data, scales) = (operands.input(first)?, operands.input(first + 1)?);
        Ok(Planes { data, scales, tensor_scale, part, outer, k, format })
    }

    /// Writes the sampled rows, `[128, depth]`; zeros beyond the operand.
    fn dequantize(&self, arena: &Arena, offsets: &[i32], depth: usize, target: &mut [f32]) {
        let &Planes { outer: rows, k, format, part, .. } = self;
        let window = part.window(offsets, [rows, k]);
        let tensor_scale = self.tensor_scale.as_ref();
        let tensor_scale = tensor_scale.map_or(1.0, |scale| scale.of(arena)[window.group]);
        let every = format.scale.stored_every();
        let tiles = scale_tiles::tiled_len(rows, k.div_ceil(every));
        let of_matrix = packed::len(format.element, rows, k);
        let data = &self.data.of(arena)[window.matrix * of_matrix..];
        let scales = &self.scales.of(arena)[window.matrix * tiles..];
        for (row, target) in target.chunks_mut(depth.max(1)).enumerate() {
            for (along, target) in target.iter_mut().enumerate() {
                let Some([outer, along]) = window.at(row, along) else {
                    *target = 0.0;
                    continue;
                };
                let place = scale_tiles::offset(outer, along / every, k.div_ceil(every));
                let scale = match format.scale {
                    ScaleFormat::Ue4m3(_) => ue4m3::decode(scales[place]),
                    _ => e8m0::decode(scales[place]),
                };
                let of_row = &data[packed::len(format.element, outer, k)..];
                let code = packed::code(format.element, of_row, along);
                *target = format.element.decode(code) * scale * tensor_scale;
            }
        }
    }
}

/// A sample as rows `[128, depth]`.
fn rows_of_sample<E: Element>(sample: &[E], axis: Axis, depth: usize, target: &mut [f32]) {
    let stride = sample.len() / SAMPLED_ROWS;
    for (row, target) in target.chunks_mut(depth.max(1)).enumerate() {
        for (along, target) in target.iter_mut().enumerate() {
            let at = match axis {
                Axis::Column => along * SAMPLED_ROWS + row,
                _ => row * stride + along,
            };
            *target = sample[at].to_f32();
        }
    }
}

pub(super) fn prepare_error(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::ProductError(op) = op else { return Err(operands.unknown_kernel()) };
    let axes = op.axes();
    let [a_planes, b_planes] = op.data_inputs();
    let offsets = offsets_of(operands, op.offsets_input())?;
    let part = |index| Part::of_planes(op, index, offsets.is_some());
    let planes = [
        Planes::new(operands, a_planes, op.a, part(0))?,
        Planes::new(operands, b_planes, op.b, part(1))?,
    ];
    let depth = depth(op, |index| operands.shape(index));
    let sums = operands.target::<f32>(operands.output(0))?;
    let workspace = operands.workspace::<u8>()?;
    by_float!(operands, 0, A => by_float!(operands, 1, B => {
        let (a, b) = (operands.input::<A>(0)?, operands.input::<B>(1)?);
        Ok(Box::new(move |arena| {
            let mut carver = Carver::new(workspace.of(arena));
            let mut rows = || carver.take::<f32>(SAMPLED_ROWS * depth);
            let (x, y, x_quantized, y_quantized) = (rows(), rows(), rows(), rows());
            rows_of_sample(a.of(arena), axes[0], depth, x);
            rows_of_sample(b.of(arena), axes[1], depth, y);
            let offsets = offsets_in(&offsets, arena);
            planes[0].dequantize(arena, offsets, depth, x_quantized);
            planes[1].dequantize(arena, offsets, depth, y_quantized);
            sums.of(arena).copy_from_slice(&errors([x, y], [x_quantized, y_quantized], depth));
            Ok(())
        }))
    }))
}

/// Elements of the sampled contraction.
pub(super) fn depth<'a>(op: &ProductError, shape: impl Fn(usize) -> &'a [usize]) -> usize {
    let of_sample = |index: usize| {
        let along = if op.axes()[index] == Axis::Column { 0 } else { 1 };
        shape(index).get(along).copied().unwrap_or(0)
    };
    let of_operand = |index: usize| shape(index).last().copied().unwrap_or(0);
    let [a, b] = op.data_inputs().map(of_operand);
    of_sample(0).min(of_sample(1)).min(a).min(b)
}

/// Sums of squares of the product and of its error.
fn errors([a, b]: [&[f32]; 2], [a_quantized, b_quantized]: [&[f32]; 2], depth: usize) -> [f32; 2] {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
    let depth = depth.max(1);
    let mut sums = [0f64; 2];
    for (a, a_quantized) in a.chunks(depth).zip(a_quantized.chunks(depth)) {
        for (b, b_quantized) in b.chunks(depth).zip(b_quantized.chunks(depth)) {
            let product = dot(a, b);
            let error = dot(a_quantized, b_quantized) - product;
            sums[0] += f64::from(product) * f64::from(product);
            sums[1] += f64::from(error) * f64::from(error);
        }
    }
    sums.map(|sum| sum as f32)
}

/// Four operands of 128 rows in FP32.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let Op::ProductError(op) = request.op else { return 0 };
    let depth = depth(op, |index| &request.operands[index].shape);
    4 * SAMPLED_ROWS * depth * size_of::<f32>() + 5 * ALIGNMENT_BYTES
}
