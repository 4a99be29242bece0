//! GEMMs that read dequantized operands: checks of their inputs and of the dequantized values.

use deepwell_ir::ops::{Axis, Dequantize};
use deepwell_ir::{Call, DType, GemmKind, Program};
use deepwell_kernels::KernelError;
use deepwell_precision::GemmPrecision;
use deepwell_precision::hadamard::POINTS;
use half::bf16;
use rayon::prelude::*;

use super::planes::{Planes, Tables};
use super::report::AuditReport;
use super::structure::{Origins, wanted_axes};
use super::view::{Memory, View, view};

/// Checks that an unquantized GEMM reads a dequantized operand exactly where `gemm` emulates one,
/// along the axis that a quantized GEMM uses, and the other operands unchanged.
pub(super) fn check_operands(
    origins: &Origins<'_>,
    call: &Call,
    kind: GemmKind,
    gemm: GemmPrecision,
    add: &mut dyn FnMut(String),
) {
    let wanted = wanted_axes(kind);
    let kind = kind.name();
    for (side, operand) in call.operands.iter().take(2).enumerate() {
        let name = &origins.program().value(operand.value).name;
        let axis = wanted[side].name();
        match (gemm.quantized[side], origins.dequantized_axis(operand.value)) {
            (false, Some(_)) => {
                add(format!("{kind} reads `{name}`, expected a tensor that was not quantized"));
            }
            (true, None) => {
                add(format!(
                    "{kind} reads `{name}`, expected one dequantized from {axis}wise data"
                ));
            }
            (true, Some(got)) if got != wanted[side] => {
                let got = got.name();
                add(format!("{kind} reads `{name}`, {got}wise, expected it {axis}wise"));
            }
            _ => {}
        }
    }
}

/// Compares every element of a dequantization with the definition, rounded as it is stored.
pub(super) fn check_dequantize(
    report: &mut AuditReport,
    program: &Program,
    call: &Call,
    op: &Dequantize,
    memory: &Memory<'_>,
    tables: &Tables,
) -> Result<(), KernelError> {
    report.calls_checked += 1;
    let stack = view(program, call.operands[0].value, memory)?.stack();
    for index in 0..stack.unwrap_or(1) {
        let operand = |at: usize| -> Result<View<'_>, KernelError> {
            Ok(view(program, call.operands[at].value, memory)?.part(index, stack.is_some()))
        };
        check_matrix(report, call, op, &operand, tables)?;
    }
    Ok(())
}

/// Checks one matrix of a stack; `operand` returns that matrix's slice of an operand.
fn check_matrix<'a>(
    report: &mut AuditReport,
    call: &Call,
    op: &Dequantize,
    operand: &dyn Fn(usize) -> Result<View<'a>, KernelError>,
    tables: &Tables,
) -> Result<(), KernelError> {
    let data = operand(0)?;
    let scales = operand(1)?;
    let target = operand(call.input_count)?;
    let tensor_scale = if call.input_count == 3 { Some(operand(2)?) } else { None };
    let planes = Planes { format: op.format, data, scales, tensor_scale, groups: None };
    report.count_tensor(target.len());
    let columns = target.shape[1];
    let expected = |index: usize| {
        let (row, column) = (index / columns, index % columns);
        let (outer, k) = if op.axis == Axis::Column { (column, row) } else { (row, column) };
        let number = |k: usize| planes.at(tables, outer, k) as f32;
        let value = match op.format.hadamard {
            None => number(k),
            Some(transform) => {
                let mut group: [f32; POINTS] = std::array::from_fn(|i| number(k - k % POINTS + i));
                transform.inverse(&mut group);
                group[k % POINTS]
            }
        };
        match target.dtype {
            DType::Bf16 => bf16::from_f32(value).to_f32(),
            _ => value,
        }
    };
    let wrong = |&index: &usize| {
        let (expected, got) = (expected(index), target.float(index));
        expected.to_bits() != got.to_bits() && !(expected.is_nan() && got.is_nan())
    };
    let indices = 0..target.len();
    let count = indices.clone().into_par_iter().filter(wrong).count();
    if let Some(first) = indices.into_par_iter().find_first(wrong) {
        let what = format!(
            "`{}`: {count} of {} elements are not those of the quantized operand, first at {}: \
             expected {:e}, got {:e}",
            target.name,
            target.len(),
            target.coordinate(first),
            expected(first),
            target.float(first),
        );
        report.add(&call.name, what);
    }
    Ok(())
}
