//! GEMMs of groups of rows, such as the tokens of each expert of a mixture.

use std::ffi::c_void;

use deepwell_ir::ops::{
    GroupedGemm, GroupedGemmDgrad, GroupedGemmWgrad, GroupedRows, ScaledGroupedGemm,
};
use deepwell_ir::{DType, GemmKind, Op};

use crate::gemm::{dtype, format, scale_shape};
use crate::session::{Memory, Request, not_null, run, size};
use crate::status::{DwStatus, Failure, guard};

/// `groups` groups, each of a multiple of `align` rows.
fn grouped(groups: i32, align: i32) -> Result<GroupedRows, Failure> {
    Ok(GroupedRows::new(size("groups", groups)?, size("align", align)?))
}

fn offsets_input(offsets: *const c_void, grouped: &GroupedRows) -> Memory {
    Memory::input("offsets", offsets, DType::I32, &[grouped.groups + 1])
}

/// Shape of the scales of a stack of separately quantized matrices.
fn stacked_scale_shape(matrices: usize, rows: usize, columns: usize) -> Vec<usize> {
    [vec![matrices], scale_shape(rows, columns)].concat()
}

/// The three GEMMs in BF16: `b` is `[rows, k]` for wgrad, otherwise a stack `[groups, n, k]`.
fn gemm_bf16(
    kind: GemmKind,
    [a, b, offsets]: [*const c_void; 3],
    out: *mut c_void,
    [groups, align, rows, n, k]: [i32; 5],
    accumulate: bool,
) -> Result<(), Failure> {
    not_null(&[("a", a), ("b", b), ("offsets", offsets), ("out", out)])?;
    let grouped = grouped(groups, align)?;
    let (rows, n, k) = (size("rows", rows)?, size("n", n)?, size("k", k)?);
    let stack = vec![grouped.groups, n, k];
    let (op, of_a, of_b, of_out) = match kind {
        GemmKind::Fprop => (Op::from(GroupedGemm { grouped }), vec![rows, k], stack, vec![rows, n]),
        GemmKind::Dgrad => {
            (GroupedGemmDgrad { grouped }.into(), vec![rows, n], stack, vec![rows, k])
        }
        GemmKind::Wgrad => {
            (GroupedGemmWgrad { grouped }.into(), vec![rows, n], vec![rows, k], stack)
        }
    };
    let output = if kind == GemmKind::Wgrad { DType::F32 } else { DType::Bf16 };
    let inputs = vec![
        Memory::input("a", a, DType::Bf16, &of_a),
        Memory::input("b", b, DType::Bf16, &of_b),
        offsets_input(offsets, &grouped),
    ];
    let outputs = vec![Memory::output("out", out, output, &of_out)];
    run(&Request { accumulate, ..Request::new(op, inputs, outputs) })
}

/// fprop: the rows of group e of `out [rows, n]` are the rows of group e of `a [rows, k]` times
/// matrix e of `b [groups, n, k]`, transposed, in BF16 and accumulated in FP32. Group e has the
/// rows `offsets[e]..offsets[e + 1]`, a multiple of `align`, possibly none; `offsets` are `groups +
/// 1` INT32 in device memory, ascending from 0. Rows after the last group become zeros.
///
/// # Safety
/// Each pointer is memory of the chosen device with the stated number of elements, and no offset is
/// larger than `rows`. No other code may access the outputs during the call.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_grouped_gemm_bf16(
    a: *const c_void,
    b: *const c_void,
    offsets: *const c_void,
    out: *mut c_void,
    groups: i32,
    align: i32,
    rows: i32,
    n: i32,
    k: i32,
) -> DwStatus {
    guard(|| {
        let sizes = [groups, align, rows, n, k];
        gemm_bf16(GemmKind::Fprop, [a, b, offsets], out, sizes, false)
    })
}

/// dgrad: the rows of group e of `out [rows, k]` are the rows of group e of `a [rows, n]` times
/// matrix e of `b [groups, n, k]`; everything else is as in [`dw_grouped_gemm_bf16`].
///
/// # Safety
/// As [`dw_grouped_gemm_bf16`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_grouped_gemm_bf16_dgrad(
    a: *const c_void,
    b: *const c_void,
    offsets: *const c_void,
    out: *mut c_void,
    groups: i32,
    align: i32,
    rows: i32,
    n: i32,
    k: i32,
) -> DwStatus {
    guard(|| {
        let sizes = [groups, align, rows, n, k];
        gemm_bf16(GemmKind::Dgrad, [a, b, offsets], out, sizes, false)
    })
}

/// wgrad: matrix e of `out [groups, n, k]`, in FP32, is the transpose of the rows of group e of `a
/// [rows, n]` times the rows of group e of `b [rows, k]`, both in BF16. If `accumulate` is not 0
/// the result is added to `out`; otherwise the matrix of a group without rows becomes zeros.
/// Offsets are as in [`dw_grouped_gemm_bf16`].
///
/// # Safety
/// As [`dw_grouped_gemm_bf16`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_grouped_gemm_bf16_wgrad(
    a: *const c_void,
    b: *const c_void,
    offsets: *const c_void,
    out: *mut c_void,
    groups: i32,
    align: i32,
    rows: i32,
    n: i32,
    k: i32,
    accumulate: i32,
) -> DwStatus {
    guard(|| {
        let sizes = [groups, align, rows, n, k];
        gemm_bf16(GemmKind::Wgrad, [a, b, offsets], out, sizes, accumulate != 0)
    })
}

/// fprop and dgrad of MXFP8 operands: the rows of group e of `out [rows, n]` are the rows of group
/// e of `a [rows, k]` times matrix e of `b [groups, n, k]`, transposed, accumulated in FP32. Both
/// operands are quantized along `k` as by `dw_mxfp8_quantize`: `a` as one matrix, and each matrix
/// of `b` separately, with contiguous scales. For dgrad, `b` is the weight quantized columnwise.
/// `out_dtype` is a `DwDType`. Offsets are as in [`dw_grouped_gemm_bf16`]. Granularity 128 requires
/// groups of a multiple of 128 rows.
///
/// # Safety
/// As [`dw_grouped_gemm_bf16`], with scales of `dw_mxfp8_scale_bytes` bytes for each matrix.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_grouped_gemm_mxfp8(
    a: *const c_void,
    a_scales: *const c_void,
    b: *const c_void,
    b_scales: *const c_void,
    offsets: *const c_void,
    out: *mut c_void,
    out_dtype: i32,
    groups: i32,
    align: i32,
    rows: i32,
    n: i32,
    k: i32,
    granularity: i32,
    b_square: i32,
) -> DwStatus {
    guard(|| {
        not_null(&[("a", a), ("a_scales", a_scales), ("b", b), ("b_scales", b_scales)])?;
        not_null(&[("offsets", offsets), ("out", out)])?;
        let grouped = grouped(groups, align)?;
        let (rows, n, k) = (size("rows", rows)?, size("n", n)?, size("k", k)?);
        let output = dtype("out_dtype", out_dtype)?;
        let op = ScaledGroupedGemm {
            kind: GemmKind::Fprop,
            grouped,
            output,
            a: format("granularity", granularity, 0)?,
            b: format("granularity", granularity, b_square)?,
        };
        let b_scale_shape = stacked_scale_shape(grouped.groups, n, k);
        let inputs = vec![
            Memory::input("a", a, DType::E4m3, &[rows, k]),
            Memory::input("a_scales", a_scales, DType::E8m0, &scale_shape(rows, k)),
            Memory::input("b", b, DType::E4m3, &[grouped.groups, n, k]),
            Memory::input("b_scales", b_scales, DType::E8m0, &b_scale_shape),
            offsets_input(offsets, &grouped),
        ];
        let outputs = vec![Memory::output("out", out, output, &[rows, n])];
        run(&Request::new(op, inputs, outputs))
    })
}

/// wgrad of MXFP8 operands: matrix e of `out [groups, m, n]`, in FP32, is the columns of group e of
/// `a [m, rows]` times the transposed columns of group e of `b [n, rows]`. Both operands are
/// quantized along `rows`: columnwise, from matrices whose rows belong to groups. `accumulate` and
/// offsets are as in [`dw_grouped_gemm_bf16_wgrad`]; `align` is a multiple of `granularity`.
///
/// # Safety
/// As [`dw_grouped_gemm_mxfp8`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_grouped_gemm_mxfp8_wgrad(
    a: *const c_void,
    a_scales: *const c_void,
    b: *const c_void,
    b_scales: *const c_void,
    offsets: *const c_void,
    out: *mut c_void,
    groups: i32,
    align: i32,
    rows: i32,
    m: i32,
    n: i32,
    granularity: i32,
    accumulate: i32,
) -> DwStatus {
    guard(|| {
        not_null(&[("a", a), ("a_scales", a_scales), ("b", b), ("b_scales", b_scales)])?;
        not_null(&[("offsets", offsets), ("out", out)])?;
        let grouped = grouped(groups, align)?;
        let (rows, m, n) = (size("rows", rows)?, size("m", m)?, size("n", n)?);
        let format = format("granularity", granularity, 0)?;
        if !grouped.align.is_multiple_of(usize::from(format.block.k)) {
            return Err(Failure::InvalidArgument(format!(
                "`align`: expected a multiple of `granularity`, {granularity}, got {align}"
            )));
        }
        let op = ScaledGroupedGemm {
            kind: GemmKind::Wgrad,
            grouped,
            output: DType::F32,
            a: format,
            b: format,
        };
        let inputs = vec![
            Memory::input("a", a, DType::E4m3, &[m, rows]),
            Memory::input("a_scales", a_scales, DType::E8m0, &scale_shape(m, rows)),
            Memory::input("b", b, DType::E4m3, &[n, rows]),
            Memory::input("b_scales", b_scales, DType::E8m0, &scale_shape(n, rows)),
            offsets_input(offsets, &grouped),
        ];
        let outputs = vec![Memory::output("out", out, DType::F32, &[grouped.groups, m, n])];
        run(&Request { accumulate: accumulate != 0, ..Request::new(op, inputs, outputs) })
    })
}
