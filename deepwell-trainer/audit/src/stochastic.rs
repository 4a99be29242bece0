//! Stochastically rounded elements, byte for byte: the random words are known.

use deepwell_ir::ops::{Axis, StochasticRound};
use deepwell_ir::{Call, Program, ValueId};
use deepwell_kernels::KernelError;
use deepwell_precision::{Philox, scale_tiles};
use rayon::prelude::*;

use super::planes::{Encoders, Transformed, code_at};
use super::report::AuditReport;
use super::view::{Memory, fingerprint, view};

/// Compares every element with the definition. Returns the data's value and fingerprint.
pub(super) fn check(
    report: &mut AuditReport,
    program: &Program,
    call: &Call,
    op: &StochasticRound,
    memory: &Memory<'_>,
) -> Result<(ValueId, u64), KernelError> {
    let operand = |index: usize| view(program, call.operands[index].value, memory);
    let (x, scales) = (operand(0)?, operand(1)?);
    let (key, data) = (operand(op.key_input())?, operand(call.input_count)?);
    report.calls_checked += 1;
    report.count_tensor(data.len());
    let (columns, k) = (x.shape[1], data.shape[1]);
    let stream = StochasticRound::stream(&call.name) | u64::from(key.counter(1) as u32);
    let philox = Philox { seed: key.counter(0), stream };
    let every = op.format.scale.stored_every();
    let transformed = Transformed::new(&x, op.axis == Axis::Column, &op.format);
    let scope = op.key_input() + 1;
    let scope = if scope < call.input_count { Some(operand(scope)?) } else { None };
    let encoders = Encoders::new(op.format, &x, &transformed, op.axis == Axis::Column, scope);
    // Words of a slice are those of the whole operand.
    let word = |outer: usize, along: usize| {
        let (parts, place) = op.columns.map_or((1, 0), |part| (part.parts, part.place));
        let index = match op.axis {
            Axis::Column => (outer + place * columns) * k + along,
            _ => outer * columns * parts + place * columns + along,
        };
        philox.word(index as u64)
    };
    let expected = |index: usize| {
        let (outer, along) = (index / k, index % k);
        let at = if op.axis == Axis::Column { along * columns + outer } else { index };
        let scale = scales.bytes[scale_tiles::offset(outer, along / every, k.div_ceil(every))];
        let number = transformed.at(outer, along).unwrap_or_else(|| x.float(at));
        let row = if op.axis == Axis::Column { along } else { outer };
        let scaled = number * encoders.of_row(row).factor(scale);
        op.format.element.encode_stochastic(scaled, word(outer, along))
    };
    let got = |index: usize| code_at(&op.format, &data, index / k, index % k);
    let wrong = |&index: &usize| expected(index) != got(index);
    let indices = 0..data.len();
    let count = indices.clone().into_par_iter().filter(wrong).count();
    if let Some(first) = indices.into_par_iter().find_first(wrong) {
        let what = format!(
            "`{}`: {count} of {} elements are not `{}` rounded at random, first at {}: expected \
             {:#04x}, got {:#04x}",
            data.name,
            data.len(),
            x.name,
            data.coordinate(first),
            expected(first),
            got(first),
        );
        report.add(&call.name, what);
    }
    Ok((call.outputs()[0].value, fingerprint(data.bytes)))
}
