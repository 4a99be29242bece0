//! The F32 tier: operands converted to `f32`, multiplied by the `gemm-f32` crate.
//!
//! If nothing needs converting, this is one call of the crate. Otherwise blocks of at most 1024
//! rows of each operand are converted into the workspace and multiplied one after another, which
//! bounds the workspace of a very large GEMM.
#![allow(unsafe_code)]

use gemm_common::Parallelism;
use half::bf16;

use super::carve::{align, whole_elements};
use super::elements::{unpack_block, values_of};
use super::operand::{DataKind, Operand, OperandData, Output};
use super::{ALIGNMENT, OUTER_BLOCK, Threads};
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::parallel::vectorized;

/// Bytes of the `f32` copies of operand blocks and of an output block. An F32 operand needs no
/// copy.
pub(super) fn workspace_bytes(m: usize, n: usize, k: usize, a: DataKind, b: DataKind) -> usize {
    let copy = |kind: DataKind, outer: usize| {
        if kind == DataKind::F32 { 0 } else { outer.min(OUTER_BLOCK) * k }
    };
    let output = m.min(OUTER_BLOCK) * n.min(OUTER_BLOCK);
    (copy(a, m) + copy(b, n) + output) * size_of::<f32>() + ALIGNMENT
}

/// Runs the GEMM. All arguments are validated, and no size is zero.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub(super) fn run(
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'_>,
    b: Operand<'_>,
    out: &mut Output<'_>,
    workspace: &mut [u8],
    threads: Threads,
) {
    let workspace: &mut [f32] = whole_elements(align(workspace));
    let copy = |operand: &Operand<'_>, outer: usize| {
        if operand.kind() == DataKind::F32 { 0 } else { outer.min(OUTER_BLOCK) * k }
    };
    let (a_copy, rest) = workspace.split_at_mut(copy(&a, m));
    let (b_copy, c_copy) = rest.split_at_mut(copy(&b, n));

    // F32 operands are not split into blocks; a BF16 output is.
    let a_block = if a_copy.is_empty() { m } else { OUTER_BLOCK };
    let b_block = if b_copy.is_empty() { n } else { OUTER_BLOCK };
    let (a_block, b_block) = match out {
        Output::F32 { .. } => (a_block, b_block),
        Output::Bf16 { .. } => (a_block.min(OUTER_BLOCK), b_block.min(OUTER_BLOCK)),
    };

    for column in (0..n).step_by(b_block) {
        let columns = (n - column).min(b_block);
        let b_part = convert(&b, column, columns, k, b_copy, threads);
        for row in (0..m).step_by(a_block) {
            let rows = (m - row).min(a_block);
            let a_part = convert(&a, row, rows, k, a_copy, threads);
            match out {
                Output::F32 { data, accumulate } => {
                    let data = &mut data[row * n + column..];
                    multiply(rows, columns, k, &a_part, &b_part, data, n, *accumulate, threads);
                }
                Output::Bf16 { data } => {
                    let part = &mut c_copy[..rows * columns];
                    multiply(rows, columns, k, &a_part, &b_part, part, columns, false, threads);
                    let rows = data[row * n..].chunks_mut(n).zip(part.chunks_exact(columns));
                    for (data, part) in rows {
                        round_row(part, &mut data[column..column + columns]);
                    }
                }
            }
        }
    }
}

fn round_row(source: &[f32], target: &mut [bf16]) {
    vectorized(
        #[inline(always)]
        || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target = Element::from_f32(source);
            }
        },
    );
}

/// Some outer rows of an operand, as `f32`.
struct F32Rows<'a> {
    data: &'a [f32],
    outer_stride: usize,
    k_stride: usize,
}

/// Returns outer rows `first..first + count`, in place or converted into `copy` as `[count, k]`.
fn convert<'a>(
    operand: &'a Operand<'a>,
    first: usize,
    count: usize,
    k: usize,
    copy: &'a mut [f32],
    threads: Threads,
) -> F32Rows<'a> {
    let (outer_stride, k_stride) = (operand.outer_stride, operand.k_stride);
    if let OperandData::F32(data) = operand.data {
        return F32Rows { data: &data[first * outer_stride..], outer_stride, k_stride };
    }
    let copy = &mut copy[..count * k];
    const ROWS_PER_TASK: usize = 32;
    let chunk = ROWS_PER_TASK * k;
    let convert_chunk = |index: usize, rows: &mut [f32]| {
        for (row, target) in rows.chunks_exact_mut(k).enumerate() {
            let row = first + index * ROWS_PER_TASK + row;
            match operand.data {
                OperandData::F32(_) => {}
                OperandData::Bf16(data) if k_stride == 1 => {
                    widen_row(&data[row * outer_stride..][..k], target);
                }
                OperandData::Bf16(data) => {
                    for (column, target) in target.iter_mut().enumerate() {
                        *target = Element::to_f32(data[row * outer_stride + column * k_stride]);
                    }
                }
                OperandData::Mx { element, data, scales } => {
                    let values = values_of(element);
                    for (block, target) in target.chunks_mut(32).enumerate() {
                        let mut codes = [0; 32];
                        let data = &data[operand.mx_from(row, block * 32)..];
                        let codes = unpack_block(element, data, &mut codes[..target.len()]);
                        let scale = scales[operand.scale_offset(row, block, k)];
                        decode_block(values, codes, scale, target);
                    }
                }
            }
        }
    };
    if threads == Threads::One {
        copy.chunks_mut(chunk).enumerate().for_each(|(index, rows)| convert_chunk(index, rows));
    } else {
        use rayon::prelude::*;
        let chunks = copy.par_chunks_mut(chunk).enumerate();
        chunks.for_each(|(index, rows)| convert_chunk(index, rows));
    }
    F32Rows { data: copy, outer_stride: k, k_stride: 1 }
}

fn widen_row(source: &[bf16], target: &mut [f32]) {
    vectorized(
        #[inline(always)]
        || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target = Element::to_f32(source);
            }
        },
    );
}

/// Decodes one block; a value outside `f32`'s normal range is rounded once.
fn decode_block(values: &[f32; 256], codes: &[u8], scale: u8, target: &mut [f32]) {
    let scale = scale_value(scale);
    for (target, &code) in target.iter_mut().zip(codes) {
        *target = values[usize::from(code)] * scale;
    }
}

/// `2^(code - 127)`, subnormal for code 0, NaN for `0xFF`.
fn scale_value(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        0xff => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// One call of the `gemm-f32` crate: `c[rows, columns] (+)= a b^T`.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
fn multiply(
    m: usize,
    n: usize,
    k: usize,
    a: &F32Rows<'_>,
    b: &F32Rows<'_>,
    c: &mut [f32],
    c_row_stride: usize,
    accumulate: bool,
    threads: Threads,
) {
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::Pool => Parallelism::Rayon(0),
    };
    // A slice is at most isize::MAX bytes long, so strides inside a slice fit into isize. A stride
    // over a single row or column may be anything and is never used.
    let stride = |stride: usize| isize::try_from(stride).unwrap_or(0);
    assert!((m - 1) * c_row_stride + n <= c.len());
    // The crate's kernels write C in column-major order. A row-major C is computed as its
    // transpose, b a^T.
    let row_stride = stride(c_row_stride);
    let (left, m, right, n, column_stride, row_stride) = match row_stride > 1 {
        true => (b, n, a, m, row_stride, 1),
        false => (a, m, b, n, 1, row_stride),
    };
    // SAFETY: `Operand::validate` (or `convert`'s own copy) puts every element of A and B inside
    // its slice, and the assertion every element of C; C is borrowed mutably, so nothing aliases C.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            k,
            c.as_mut_ptr(),
            column_stride,
            row_stride,
            accumulate,
            left.data.as_ptr(),
            stride(left.k_stride),
            stride(left.outer_stride),
            right.data.as_ptr(),
            stride(right.outer_stride),
            stride(right.k_stride),
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_values() {
        assert_eq!(scale_value(127), 1.0);
        assert_eq!(scale_value(0), 2f32.powi(-127));
        assert_eq!(scale_value(254), 2f32.powi(127));
        assert!(scale_value(0xff).is_nan());
    }
}
