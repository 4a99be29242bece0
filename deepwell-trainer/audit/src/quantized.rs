//! Quantized operands and cast weights, byte for byte.
//!
//! An operand with its contraction along `k` is quantized in groups: 1 x 32 or 1 x 128 elements (32
//! x 32 or 128 x 128 for square blocks), shorter at the edges. The scale of a group follows from
//! its largest magnitude; every element is multiplied by the inverse of the scale, rounded to
//! nearest even and saturated. A scale byte covers 32 elements for every group size. NVFP4 has
//! groups of 1 x 16 or 16 x 16 and a tensor scale.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{Call, DType, Op, Phase, Program, Quantization, Storage, ValueId};
use deepwell_kernels::KernelError;
use deepwell_precision::{Philox, QuantFormat, scale_tiles};
use half::bf16;
use rayon::prelude::*;

use super::planes::{Encoders, Transformed, code_at};
use super::report::AuditReport;
use super::view::{Memory, View, view};

/// Positions of differing bytes.
#[derive(Clone, Copy, Default)]
struct Differences {
    count: u64,
    /// Index, expected, got; the lowest index.
    first: Option<(usize, u32, u32)>,
}

impl Differences {
    fn note(&mut self, index: usize, expected: u32, got: u32) {
        if expected != got {
            let single = Differences { count: 1, first: Some((index, expected, got)) };
            *self = self.merged(single);
        }
    }

    fn merged(self, other: Differences) -> Differences {
        let first = match (self.first, other.first) {
            (Some(one), Some(two)) => Some(if one.0 <= two.0 { one } else { two }),
            (one, two) => one.or(two),
        };
        Differences { count: self.count + other.count, first }
    }
}

/// Differences of data and of scales.
#[derive(Clone, Copy, Default)]
struct CopyDifferences {
    data: Differences,
    scales: Differences,
}

impl CopyDifferences {
    fn merged(self, other: CopyDifferences) -> CopyDifferences {
        CopyDifferences {
            data: self.data.merged(other.data),
            scales: self.scales.merged(other.scales),
        }
    }

    fn is_empty(&self) -> bool {
        self.data.count + self.scales.count == 0
    }
}

/// A quantized operand: the source in the operand's orientation, and the written planes.
#[derive(Clone, Copy)]
struct MxOperand<'a> {
    source: View<'a>,
    transformed: &'a Transformed,
    /// Whether the operand is quantized along the columns of the source.
    is_column: bool,
    /// Strides in the source along the operand's rows and along the contraction.
    strides: (usize, usize),
    /// Rows of the operand.
    outer: usize,
    contraction: usize,
    format: QuantFormat,
    encoders: &'a Encoders,
    /// Random words of the elements, if they are rounded stochastically.
    philox: Option<Philox>,
    data: View<'a>,
    scales: View<'a>,
}

impl<'a> MxOperand<'a> {
    fn new(
        (source, transformed): (View<'a>, &'a Transformed),
        is_column: bool,
        (encoders, philox): (&'a Encoders, Option<Philox>),
        format: QuantFormat,
        data: View<'a>,
        scales: View<'a>,
    ) -> MxOperand<'a> {
        let (rows, columns) = (source.shape[0], source.shape[1]);
        let (outer, contraction, strides) =
            if is_column { (columns, rows, (1, columns)) } else { (rows, columns, (columns, 1)) };
        MxOperand {
            source,
            transformed,
            is_column,
            strides,
            outer,
            contraction,
            format,
            encoders,
            philox,
            data,
            scales,
        }
    }

    fn has_the_right_size(&self) -> bool {
        let blocks = self.contraction.div_ceil(self.format.scale.stored_every());
        self.data.shape == [self.outer, self.contraction]
            && self.scales.bytes.len() == scale_tiles::tiled_len(self.outer, blocks)
    }

    fn at(&self, outer: usize, k: usize) -> f32 {
        let of_source = || self.source.float(outer * self.strides.0 + k * self.strides.1);
        self.transformed.at(outer, k).unwrap_or_else(of_source)
    }

    fn differences(&self) -> CopyDifferences {
        let group_rows = usize::from(self.format.block.rows);
        (0..self.outer.div_ceil(group_rows))
            .into_par_iter()
            .map(|group| {
                let end = ((group + 1) * group_rows).min(self.outer);
                self.differences_of_rows(group * group_rows, end)
            })
            .reduce(CopyDifferences::default, CopyDifferences::merged)
    }

    /// Differences in rows with common groups.
    fn differences_of_rows(&self, start: usize, end: usize) -> CopyDifferences {
        let mut differences = CopyDifferences::default();
        let every = self.format.scale.stored_every();
        let blocks = self.contraction.div_ceil(every);
        let group = usize::from(self.format.block.k);
        let mut elements = Vec::new();
        for k_start in (0..self.contraction).step_by(group) {
            let k_end = (k_start + group).min(self.contraction);
            elements.clear();
            let run = if self.is_column || end - start == 1 {
                let of_row = |outer| (k_start..k_end).map(move |k| self.at(outer, k));
                elements.extend((start..end).flat_map(of_row));
                k_end - k_start
            } else {
                // A square by the columns of the source.
                let of_column = |k| (start..end).map(move |outer| self.at(outer, k));
                elements.extend((k_start..k_end).flat_map(of_column));
                end - start
            };
            // A block has rows of one group.
            let encoder = self.encoders.of_row(if self.is_column { k_start } else { start });
            let scale = encoder.scale(&elements, run);
            let factor = encoder.factor(scale);
            for outer in start..end {
                for block in k_start / every..k_end.div_ceil(every) {
                    let got = self.scales.bytes[scale_tiles::offset(outer, block, blocks)];
                    differences.scales.note(outer * blocks + block, scale.into(), got.into());
                }
                for k in k_start..k_end {
                    let index = outer * self.contraction + k;
                    let number = self.at(outer, k);
                    let code = match self.philox {
                        None => encoder.code(number, factor),
                        Some(philox) => {
                            let word = philox.word(index as u64);
                            self.format.element.encode_stochastic(number * factor, word)
                        }
                    };
                    let got = code_at(&self.format, &self.data, outer, k);
                    differences.data.note(index, code.into(), got.into());
                }
            }
        }
        differences
    }
}

/// Returns how a finding opens, and the name of the source that it is compared with.
fn phrases(source: &View<'_>, call: &Call, moment: &str) -> (String, String) {
    let source = source.name;
    let of = if matches!(call.phase, Phase::Weights | Phase::Optimizer) {
        format!("the present master weight `{source}`")
    } else {
        format!("`{source}`")
    };
    (moment.to_string(), of)
}

fn describe(kind: &str, of: &str, target: &View<'_>, differences: Differences) -> Option<String> {
    let (index, expected, got) = differences.first?;
    let hex = 2 + target.dtype.bits() as usize / 4;
    Some(format!(
        "`{}`: {} of {} {kind} differ from those of {of}, first at {}: \
         expected {expected:#0hex$x}, got {got:#0hex$x}",
        target.name,
        differences.count,
        target.shape.iter().product::<usize>(),
        target.coordinate(index),
    ))
}

/// Compares every code and scale of a quantization with the definition, if the quantized tensor is
/// stored.
pub(super) fn check_quantize(
    report: &mut AuditReport,
    program: &Program,
    call: &Call,
    quantization: &Quantization<'_>,
    memory: &Memory<'_>,
    moment: &str,
) -> Result<(), KernelError> {
    let Some(source) = quantization.source else { return Ok(()) };
    report.calls_checked += 1;
    let stack = view(program, source, memory)?.stack();
    for index in 0..stack.unwrap_or(1) {
        let part = |id: ValueId| Ok(view(program, id, memory)?.part(index, stack.is_some()));
        let scope = match (&call.op, call.input_count) {
            (Op::Quantize(_), 2) => Some(view(program, call.operands[1].value, memory)?),
            _ => None,
        };
        let philox = philox_of(program, call, quantization, memory)?;
        check_matrix(report, call, quantization, (&part, scope, philox), moment)?;
    }
    Ok(())
}

/// Random words of a quantization that rounds stochastically.
fn philox_of(
    program: &Program,
    call: &Call,
    quantization: &Quantization<'_>,
    memory: &Memory<'_>,
) -> Result<Option<Philox>, KernelError> {
    let Op::QuantizeOperands(op) = &call.op else { return Ok(None) };
    let is_column = quantization.quantize.axis == Axis::Column;
    let Some(stream) = op.streams[usize::from(is_column)] else { return Ok(None) };
    let key = view(program, call.operands[1].value, memory)?;
    let stream = stream | u64::from(key.counter(1) as u32);
    Ok(Some(Philox { seed: key.counter(0), stream }))
}

/// Compares the tensor scale of each group with the definition.
fn check_tensor_scales(
    report: &mut AuditReport,
    call: &Call,
    encoders: &Encoders,
    scale: &View<'_>,
    moment: &str,
) {
    for (group, encoder) in encoders.all().iter().enumerate() {
        let (expected, got) = (encoder.tensor_scale(), scale.float(group));
        if expected.to_bits() != got.to_bits() {
            let name = scale.name;
            let what = format!("{moment}`{name}`: expected {expected:e}, got {got:e}");
            report.add(&call.name, what);
        }
    }
}

/// A matrix of a stack: its slice of a value.
type Part<'p, 'a> = dyn Fn(ValueId) -> Result<View<'a>, KernelError> + 'p;

/// Checks one matrix of a stack; `part` returns that matrix's slice of a value, `scope` is what the
/// tensor scales are for, as [`Encoders::new`] takes it, `philox` has the random words of elements.
fn check_matrix<'a>(
    report: &mut AuditReport,
    call: &Call,
    quantization: &Quantization<'_>,
    (part, scope, philox): (&Part<'_, 'a>, Option<View<'a>>, Option<Philox>),
    moment: &str,
) -> Result<(), KernelError> {
    let Some(source) = quantization.source.map(part).transpose()? else { return Ok(()) };
    let (moment, of) = phrases(&source, call, moment);
    let output = |index: usize| part(quantization.outputs[index].value);
    let quantize @ &Quantize { format, .. } = quantization.quantize;
    let planes = Storage::plane_count(&format);
    let is_columns = quantize.axes().iter().map(|&axis| axis == Axis::Column);
    let prepared: Vec<(bool, Transformed, Encoders)> = is_columns
        .map(|is_column| {
            let transformed = Transformed::new(&source, is_column, &format);
            let encoders = Encoders::new(format, &source, &transformed, is_column, scope);
            (is_column, transformed, encoders)
        })
        .collect();
    let mut wrong = Vec::new();
    for (index, (is_column, transformed, encoders)) in prepared.iter().enumerate() {
        let is_column = *is_column;
        let data = output(planes * index)?;
        let scales = output(planes * index + 1)?;
        let codes = (encoders, philox);
        let operand = MxOperand::new((source, transformed), is_column, codes, format, data, scales);
        if planes == 3 {
            check_tensor_scales(report, call, encoders, &output(planes * index + 2)?, &moment);
        }
        let name = if is_column { "column" } else { "row" };
        if !operand.has_the_right_size() {
            let what =
                format!("`{}`: the {name}wise operand has another size than its source", data.name);
            report.add(&call.name, what);
            continue;
        }
        report.count_tensor(data.len());
        report.count_tensor(scales.len());
        let differences = operand.differences();
        // Messages index scales by row, for every layout.
        let by_rows = [operand.outer, operand.contraction.div_ceil(format.scale.stored_every())];
        let scales = View { shape: &by_rows, ..scales };
        for (kind, target, differences) in
            [("scales", &scales, differences.scales), ("data", &data, differences.data)]
        {
            let kind = format!("{name}wise {kind}");
            if let Some(what) = describe(&kind, &of, target, differences) {
                report.add(&call.name, format!("{moment}{what}"));
            }
        }
        if !differences.is_empty() {
            wrong.push(operand);
        }
    }
    // A likely reason, for matrices whose operands are distinguishable only by their bytes.
    if let [row, column] = wrong[..]
        && is_in_place_of(row, column)
        && is_in_place_of(column, row)
    {
        let what =
            format!("{moment}rowwise and columnwise operands of `{}` are swapped", source.name);
        report.add(&call.name, what);
    }
    Ok(())
}

/// Whether the planes of `other` hold what `operand` should.
fn is_in_place_of(operand: MxOperand<'_>, other: MxOperand<'_>) -> bool {
    let held = MxOperand { data: other.data, scales: other.scales, ..operand };
    held.has_the_right_size() && held.differences().is_empty()
}

/// Compares every element of a cast of `source` to `target` with the source, rounded to nearest
/// even.
pub(super) fn check_cast(
    report: &mut AuditReport,
    program: &Program,
    call: &Call,
    (source, target): (ValueId, ValueId),
    memory: &Memory<'_>,
    moment: &str,
) -> Result<(), KernelError> {
    let source = view(program, source, memory)?;
    let target = view(program, target, memory)?;
    let (moment, of) = phrases(&source, call, moment);
    report.calls_checked += 1;
    report.count_tensor(target.len());
    let differences = (0..target.len())
        .into_par_iter()
        .fold(Differences::default, |mut differences, index| {
            let (x, got) = (source.float(index), target.float(index));
            // A NaN may change its payload.
            if !(x.is_nan() && got.is_nan()) {
                if target.dtype == DType::Bf16 {
                    let expected = bf16::from_f32(x).to_bits();
                    differences.note(index, expected.into(), got.to_bits() >> 16);
                } else {
                    differences.note(index, x.to_bits(), got.to_bits());
                }
            }
            differences
        })
        .reduce(Differences::default, Differences::merged);
    let kind = format!("{} elements", target.dtype);
    if let Some(what) = describe(&kind, &of, &target, differences) {
        report.add(&call.name, format!("{moment}{what}"));
    }
    Ok(())
}
