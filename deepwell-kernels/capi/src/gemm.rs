//! Quantization to MXFP8 and GEMMs.

use std::ffi::c_void;

use deepwell_ir::ops::{Axis, Linear, Quantize, ScaledGemm};
use deepwell_ir::{DType, GemmKind};
use deepwell_precision::{BLOCK, BlockShape, Granularity, QuantFormat, scale_tiles};

use crate::session::{Memory, Request, not_null, run, size};
use crate::status::{DwStatus, Failure, guard};

/// Element types. Matrices in high precision are BF16 or FP32.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DwDType {
    /// BF16.
    Bf16 = 0,
    /// FP32.
    F32 = 1,
    /// 32-bit signed integers.
    I32 = 2,
    /// 64-bit signed integers.
    I64 = 3,
    /// 64-bit unsigned integers.
    U64 = 4,
    /// Booleans of one byte.
    Bool = 5,
    /// OCP E4M3 elements.
    E4M3 = 6,
    /// OCP E8M0 scales.
    E8M0 = 7,
    /// OCP E2M1 elements, two per byte.
    E2M1 = 8,
    /// Unsigned scales with four exponent and three mantissa bits.
    UE4M3 = 9,
}

/// Converts the value of a [`DwDType`]; C may pass any integer.
pub(crate) fn dtype(name: &str, value: i32) -> Result<DType, Failure> {
    match value {
        0 => Ok(DType::Bf16),
        1 => Ok(DType::F32),
        other => Err(Failure::InvalidArgument(format!(
            "`{name}`: expected 0 (BF16) or 1 (FP32), got {other}"
        ))),
    }
}

/// MXFP8 with one exponent per `granularity` elements of a row, or per square block.
pub(crate) fn format(name: &str, granularity: i32, square: i32) -> Result<QuantFormat, Failure> {
    let granularity = match granularity {
        32 => Granularity::G32,
        128 => Granularity::G128,
        other => {
            return Err(Failure::InvalidArgument(format!(
                "`{name}`: expected 32 or 128 elements that share an exponent, got {other}"
            )));
        }
    };
    let shape = if square != 0 { BlockShape::Square } else { BlockShape::Row };
    Ok(QuantFormat::MXFP8.with_granularity(granularity).with_shape(shape))
}

pub(crate) fn scale_shape(rows: usize, columns: usize) -> Vec<usize> {
    scale_tiles::shape(rows, columns.div_ceil(BLOCK)).to_vec()
}

/// Bytes of the scales of a matrix of `rows` x `columns` that is quantized rowwise; for the
/// columnwise operand use `dw_mxfp8_scale_bytes(columns, rows)`. Scales are stored in tiles of 128
/// rows by four scales of 32 elements, 512 bytes each, the layout of cuBLAS and `tcgen05.mma`.
/// Returns 0 if a size is negative.
#[unsafe(no_mangle)]
pub extern "C" fn dw_mxfp8_scale_bytes(rows: i32, columns: i32) -> usize {
    match (usize::try_from(rows), usize::try_from(columns)) {
        (Ok(rows), Ok(columns)) => scale_shape(rows, columns).iter().product(),
        _ => 0,
    }
}

/// Quantizes `x` `[rows, columns]` (`x_dtype` is a `DwDType`) to MXFP8, E4M3 data with E8M0 scales
/// by the RCEIL rule: rowwise into `data` `[rows, columns]` and `scales`, columnwise, transposed,
/// into `data_t` `[columns, rows]` and `scales_t`, or both. Pointers of an omitted operand are
/// null. `granularity` elements, 32 or 128, share an exponent; if `square` is not 0, so do
/// `granularity` rows.
///
/// # Safety
/// Each non-null pointer is memory of the chosen device with the stated number of elements (scales:
/// [`dw_mxfp8_scale_bytes`] bytes). No other code may access the outputs during the call.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_mxfp8_quantize(
    x: *const c_void,
    x_dtype: i32,
    rows: i32,
    columns: i32,
    granularity: i32,
    square: i32,
    data: *mut c_void,
    scales: *mut c_void,
    data_t: *mut c_void,
    scales_t: *mut c_void,
) -> DwStatus {
    guard(|| {
        not_null(&[("x", x)])?;
        let (rows, columns) = (size("rows", rows)?, size("columns", columns)?);
        let axis = match [data, scales, data_t, scales_t].map(|pointer| !pointer.is_null()) {
            [true, true, false, false] => Axis::Row,
            [false, false, true, true] => Axis::Column,
            [true, true, true, true] => Axis::Both,
            _ => {
                return Err(Failure::InvalidArgument(
                    "expected `data` with `scales`, `data_t` with `scales_t`, or all four; got one \
                     without the other, or none"
                        .to_string(),
                ));
            }
        };
        let mut outputs = Vec::new();
        if axis != Axis::Column {
            outputs.push(Memory::output("data", data, DType::E4m3, &[rows, columns]));
            outputs.push(Memory::output(
                "scales",
                scales,
                DType::E8m0,
                &scale_shape(rows, columns),
            ));
        }
        if axis != Axis::Row {
            outputs.push(Memory::output("data_t", data_t, DType::E4m3, &[columns, rows]));
            outputs.push(Memory::output(
                "scales_t",
                scales_t,
                DType::E8m0,
                &scale_shape(columns, rows),
            ));
        }
        outputs.push(Memory::scratch("statistics", DType::U64, &[Quantize::STATISTICS]));
        let format = format("granularity", granularity, square)?;
        let x = Memory::input("x", x, dtype("x_dtype", x_dtype)?, &[rows, columns]);
        run(&Request::new(Quantize { format, axis }, vec![x], outputs))
    })
}

/// `out [m, n] = a [m, k] · b [n, k]ᵀ` of two operands quantized along `k` by
/// [`dw_mxfp8_quantize`], accumulated in FP32. `a_granularity` and `b_granularity` are the
/// granularities of the operands; `b_square` says whether `b` has square blocks. `out_dtype` is a
/// `DwDType`; if it is FP32 and `accumulate` is not 0, the result is added to `out`.
///
/// # Safety
/// Each pointer is memory of the chosen device with the stated number of elements (scales:
/// [`dw_mxfp8_scale_bytes`] bytes). No other code may access the outputs during the call.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_mxfp8_gemm(
    a: *const c_void,
    a_scales: *const c_void,
    b: *const c_void,
    b_scales: *const c_void,
    out: *mut c_void,
    out_dtype: i32,
    m: i32,
    n: i32,
    k: i32,
    a_granularity: i32,
    b_granularity: i32,
    b_square: i32,
    accumulate: i32,
) -> DwStatus {
    guard(|| {
        let read = [("a", a), ("a_scales", a_scales), ("b", b), ("b_scales", b_scales)];
        not_null(&read)?;
        not_null(&[("out", out)])?;
        let (m, n, k) = (size("m", m)?, size("n", n)?, size("k", k)?);
        let output = dtype("out_dtype", out_dtype)?;
        if output == DType::Bf16 && accumulate != 0 {
            return Err(Failure::InvalidArgument(
                "`accumulate`: expected 0, as sums are kept in FP32 and `out_dtype` is BF16"
                    .to_string(),
            ));
        }
        // An FP32 result is the wgrad GEMM's, which accumulates or overwrites.
        let kind = if output == DType::F32 { GemmKind::Wgrad } else { GemmKind::Fprop };
        let op = ScaledGemm {
            kind,
            output: DType::Bf16,
            bias: false,
            a: format("a_granularity", a_granularity, 0)?,
            b: format("b_granularity", b_granularity, b_square)?,
        };
        let inputs = vec![
            Memory::input("a", a, DType::E4m3, &[m, k]),
            Memory::input("a_scales", a_scales, DType::E8m0, &scale_shape(m, k)),
            Memory::input("b", b, DType::E4m3, &[n, k]),
            Memory::input("b_scales", b_scales, DType::E8m0, &scale_shape(n, k)),
        ];
        let outputs = vec![Memory::output("out", out, output, &[m, n])];
        run(&Request { accumulate: accumulate != 0, ..Request::new(op, inputs, outputs) })
    })
}

/// `out [m, n] = a [m, k] · b [n, k]ᵀ` in BF16, accumulated in FP32.
///
/// # Safety
/// Each pointer is memory of the chosen device with the stated number of BF16 numbers. No other
/// code may access the outputs during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_bf16_gemm(
    a: *const c_void,
    b: *const c_void,
    out: *mut c_void,
    m: i32,
    n: i32,
    k: i32,
) -> DwStatus {
    guard(|| {
        not_null(&[("a", a), ("b", b), ("out", out)])?;
        let (m, n, k) = (size("m", m)?, size("n", n)?, size("k", k)?);
        let inputs = vec![
            Memory::input("a", a, DType::Bf16, &[m, k]),
            Memory::input("b", b, DType::Bf16, &[n, k]),
        ];
        let outputs = vec![Memory::output("out", out, DType::Bf16, &[m, n])];
        run(&Request::new(Linear { bias: false }, inputs, outputs))
    })
}
