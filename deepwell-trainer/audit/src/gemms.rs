//! Samples of the GEMMs of linear layers, against dot products in `f64`.
//!
//! # Tolerance
//!
//! With `u = 2^-24` (the unit roundoff of FP32), `k` terms and `s = sum |a| |b|` over the exact
//! operand values, a sum in FP32 in any order errs by at most `(k + 2) u s`: the bound that
//! `deepwell_kernels::cpu::gemm` states for each of its tiers. Added to this are
//! - per product `2^-126 max(1, |a|, |b|)`, where matrix units take subnormals as zero;
//! - for an accumulating call one rounding of the accumulated sum for each 512 of `k`, and two
//!   more;
//! - for a BF16 output half a unit in its last place, twice where a bias is added afterwards;
//! - for tensor cores two more roundings: they align the terms of one instruction (8 of `k` or
//!   more, and the sum so far) to the largest, cut below `2^-23` of it, and round towards zero:
//!   `(k / 8 + 2)` ulp of at most `s`, which is below `(k + 4) u s`.
//!
//! Hopper's FP8 tensor cores, used where one scale serves 128 elements, keep fewer bits: each of
//! the 33 terms of an instruction (32 of `k`, and the sum so far) is cut at `2^-13` of the largest
//! term (MMA-Sim, arXiv 2511.10909); four instructions run between two promotions to FP32. The
//! error of a span of 128 is therefore at most `4 * 33 * 2^-13` of the span's largest product or
//! partial sum, each rounded up to a power of two. This tolerance finds a wrong operand, scale or
//! sum, not the loss of a bit.

use std::ops::Range;

use deepwell_ir::ops::Epilogue;
use deepwell_ir::{Call, DType, GemmKind, MathUnit, Op, Program, Storage};
use deepwell_kernels::KernelError;
use deepwell_kernels::cuda::Architecture;
use deepwell_precision::QuantFormat;
use half::bf16;
use rayon::prelude::*;

use super::planes::{Planes, Tables};
use super::report::AuditReport;
use super::view::{Memory, View, sample_indices, view};

/// Unit roundoff of FP32, `2^-24`.
const ROUNDOFF: f64 = 1.0 / (1 << 24) as f64;

/// Elements of `k` between two promotions of Hopper's FP8 accumulator to FP32.
const PROMOTED_EVERY: usize = 128;

/// Error of four instructions of 32 terms, relative to the power of two above the largest term.
const FP8_SPAN_LOSS: f64 = 4.0 * 33.0 / (1 << 13) as f64;

/// Whether the op is a GEMM of a linear layer, alone or with an epilogue: the op's first output is
/// the GEMM's result, or the GEMM's result plus a residual.
pub(super) fn is_gemm(op: &Op) -> bool {
    match op {
        Op::ScaledGemm(_)
        | Op::Linear(_)
        | Op::LinearDgrad(_)
        | Op::LinearWgrad(_)
        | Op::GroupedGemm(_)
        | Op::GroupedGemmDgrad(_)
        | Op::GroupedGemmWgrad(_)
        | Op::ScaledGroupedGemm(_) => true,
        Op::Fused(fused) => (fused.is_stored(0) || is_sum(op)) && is_gemm(&fused.core),
        _ => false,
    }
}

/// Whether the op returns only the sum of the GEMM's result and a residual, its last input.
fn is_sum(op: &Op) -> bool {
    matches!(op.epilogue(), [Epilogue::Residual { of: 0 }])
}

/// An operand as a matrix `[outer, k]`.
struct Factor<'a> {
    data: View<'a>,
    /// All planes and tables, of quantized data.
    planes: Option<(Planes<'a>, &'a Tables)>,
    is_transposed: bool,
}

impl Factor<'_> {
    fn contraction(&self) -> usize {
        self.data.shape[usize::from(!self.is_transposed)]
    }

    fn at(&self, outer: usize, k: usize) -> f64 {
        let columns = self.data.shape[1];
        let index = if self.is_transposed { k * columns + outer } else { outer * columns + k };
        match &self.planes {
            None => f64::from(self.data.float(index)),
            Some((planes, tables)) => planes.at(tables, outer, k),
        }
    }
}

/// Expected value of an output, with its tolerance.
struct Expected {
    value: f64,
    tolerance: f64,
    /// The largest magnitude of any operand, product or partial sum.
    largest: f64,
}

/// Groups of rows, each multiplied by its own matrix.
struct Groups {
    /// First row of each group, and the end of the last.
    offsets: Vec<usize>,
    /// Whether the contraction is over rows.
    is_wgrad: bool,
}

/// Quantized operands whose rows are in groups, each group with a tensor scale: `a`, and of wgrad
/// `b`. Returns the parts of a GEMM without bias.
fn of_groups<'a>(
    mut a: Factor<'a>,
    mut b: Vec<Factor<'a>>,
    groups: Option<Groups>,
) -> (Factor<'a>, Vec<Factor<'a>>, Option<Groups>, Option<usize>) {
    if let Some(Groups { offsets, is_wgrad }) = &groups {
        let of_rows = b.iter_mut().filter(|_| *is_wgrad).chain([&mut a]);
        for (planes, _) in of_rows.filter_map(|factor| factor.planes.as_mut()) {
            planes.groups = Some((offsets[1..].to_vec(), *is_wgrad));
        }
    }
    (a, b, groups, None)
}

struct Gemm<'a> {
    a: Factor<'a>,
    /// A matrix for each group of rows, or a single matrix.
    b: Vec<Factor<'a>>,
    groups: Option<Groups>,
    bias: Option<View<'a>>,
    /// Added after the bias.
    residual: Option<View<'a>>,
    output: View<'a>,
    /// Whether Hopper's FP8 tensor cores multiply.
    has_short_accumulator: bool,
}

impl<'a> Gemm<'a> {
    fn new(
        program: &'a Program,
        call: &Call,
        memory: &'a Memory<'_>,
        tables: &'a Tables,
    ) -> Result<Gemm<'a>, KernelError> {
        let operand = |index: usize| view(program, call.operands[index].value, memory);
        let plain = |index: usize, is_transposed: bool| -> Result<Factor<'a>, KernelError> {
            Ok(Factor { data: operand(index)?, planes: None, is_transposed })
        };
        let scaled = |index: usize, format: QuantFormat, part: usize, is_stack: bool| {
            let data = operand(index)?.part(part, is_stack);
            let scales = operand(index + 1)?.part(part, is_stack);
            let has_tensor_scale = Storage::plane_count(&format) == 3;
            let tensor_scale = has_tensor_scale.then(|| operand(index + 2)).transpose()?;
            let tensor_scale = tensor_scale.map(|scale| scale.part(part, is_stack));
            let planes = Planes { format, data, scales, tensor_scale, groups: None };
            let planes = Some((planes, tables));
            Ok::<_, KernelError>(Factor { data, planes, is_transposed: false })
        };
        // The matrices of a stack, each by itself.
        let stack = |is_transposed: bool| -> Result<Vec<Factor<'a>>, KernelError> {
            let all = operand(1)?;
            let part = |index| all.part(index, true);
            let factor = |index| Factor { data: part(index), planes: None, is_transposed };
            Ok((0..all.shape[0]).map(factor).collect())
        };
        let groups = |input: usize, is_wgrad: bool| -> Result<Option<Groups>, KernelError> {
            let offsets = operand(input)?;
            let offsets = (0..offsets.len()).map(|index| offsets.index(index)).collect();
            Ok(Some(Groups { offsets, is_wgrad }))
        };
        let (a, b, groups, bias) = match call.op.leading() {
            Op::ScaledGemm(op) => {
                let bias = op.bias.then_some(op.plane_inputs());
                let a = scaled(0, op.a, 0, false)?;
                (a, vec![scaled(op.b_input(), op.b, 0, false)?], None, bias)
            }
            Op::LinearDgrad(_) => (plain(0, false)?, vec![plain(1, true)?], None, None),
            Op::LinearWgrad(_) => (plain(0, true)?, vec![plain(1, true)?], None, None),
            Op::Linear(op) => {
                (plain(0, false)?, vec![plain(1, false)?], None, op.bias.then_some(2))
            }
            Op::GroupedGemm(_) => (plain(0, false)?, stack(false)?, groups(2, false)?, None),
            Op::GroupedGemmDgrad(_) => (plain(0, false)?, stack(true)?, groups(2, false)?, None),
            Op::GroupedGemmWgrad(_) => {
                (plain(0, true)?, vec![plain(1, true)?], groups(2, true)?, None)
            }
            Op::ScaledGroupedGemm(op) => {
                let is_wgrad = op.kind == GemmKind::Wgrad;
                let count = if is_wgrad { 1 } else { op.grouped.groups };
                let b = (0..count).map(|index| scaled(op.b_input(), op.b, index, !is_wgrad));
                let b = b.collect::<Result<Vec<_>, _>>()?;
                of_groups(scaled(0, op.a, 0, false)?, b, groups(op.plane_inputs(), is_wgrad)?)
            }
            other => {
                return Err(KernelError::Run {
                    call: call.name.clone(),
                    what: format!("`{}` is no matrix gemm", other.name()),
                });
            }
        };
        let output = view(program, call.outputs()[0].value, memory)?;
        let is_coarse = match call.op.leading() {
            Op::ScaledGemm(op) => [op.a, op.b].iter().all(|spec| spec.block.k == 128),
            _ => false,
        };
        let has_short_accumulator = is_coarse
            && call.unit == MathUnit::Mxfp8
            && program.target.arch == Architecture::Sm90a.target_name();
        let bias = bias.map(operand).transpose()?;
        let residual = is_sum(&call.op).then_some(call.input_count - 1);
        let residual = residual.map(operand).transpose()?;
        Ok(Gemm { a, b, groups, bias, residual, output, has_short_accumulator })
    }

    /// Maps a row of the output to the row of `a`, the group, and the range of the contraction.
    fn place(&self, row: usize) -> (usize, usize, Range<usize>) {
        let all = 0..self.a.contraction();
        match &self.groups {
            None => (row, 0, all),
            Some(Groups { offsets, is_wgrad: true }) => {
                let rows = self.output.shape[1];
                let group = row / rows;
                (row % rows, group, offsets[group]..offsets[group + 1])
            }
            Some(Groups { offsets, is_wgrad: false }) => {
                // Rows after the last group are zeros.
                let group = offsets[1..].iter().position(|&end| row < end);
                group.map_or((row, 0, 0..0), |group| (row, group, all))
            }
        }
    }

    /// Computes output `index`, given its previous value if the call accumulates.
    fn expected(&self, index: usize, previous: Option<f32>) -> Expected {
        let columns = *self.output.shape.last().unwrap_or(&1);
        let (row, column) = (index / columns, index % columns);
        let (row, group, terms) = self.place(row);
        let contraction = terms.len();
        let b = &self.b[group.min(self.b.len() - 1)];
        let (mut value, mut size, mut largest, mut flushed) = (0.0, 0.0f64, 0.0f64, 0.0);
        // The current span's sum, and its largest product or partial sum.
        let (mut span_sum, mut span_largest, mut span_loss) = (0.0f64, 0.0f64, 0.0f64);
        for (k, at) in terms.enumerate() {
            let (a, b) = (self.a.at(row, at), b.at(column, at));
            value += a * b;
            span_sum += a * b;
            span_largest = span_largest.max((a * b).abs()).max(span_sum.abs());
            if (k + 1).is_multiple_of(PROMOTED_EVERY) || k + 1 == contraction {
                span_loss += 2.0 * span_largest * FP8_SPAN_LOSS;
                (span_sum, span_largest) = (0.0, 0.0);
            }
            size += (a * b).abs();
            let larger = a.abs().max(b.abs());
            largest = largest.max(larger);
            flushed += f64::from(f32::MIN_POSITIVE) * larger.max(1.0);
        }
        let k = contraction as f64;
        let mut tolerance = (k + 4.0) * ROUNDOFF * size + flushed + f64::from(f32::MIN_POSITIVE);
        if self.has_short_accumulator {
            tolerance += span_loss;
        }
        if let Some(previous) = previous.map(f64::from) {
            value += previous;
            size += previous.abs();
            tolerance += (k / 512.0 + 2.0) * ROUNDOFF * size;
        }
        let is_bf16 = self.output.dtype == DType::Bf16;
        let half_unit = |value: f64, tolerance: f64| {
            if is_bf16 { half_unit_bf16(value.abs() + tolerance) } else { 0.0 }
        };
        tolerance += half_unit(value, tolerance);
        let bias = self.bias.as_ref().map(|bias| bias.float(column));
        let residual = self.residual.as_ref().map(|residual| residual.float(index));
        for added in [bias, residual].into_iter().flatten().map(f64::from) {
            value += added;
            size += added.abs();
            tolerance += ROUNDOFF * (value.abs() + tolerance);
            tolerance += half_unit(value, tolerance);
        }
        Expected { value, tolerance, largest: largest.max(size) }
    }
}

/// Half a unit in the last place of the BF16 numbers around `magnitude`: 8 significant bits.
fn half_unit_bf16(magnitude: f64) -> f64 {
    2f64.powi((magnitude.log2().floor().max(-126.0)) as i32 - 8)
}

impl Expected {
    fn allows(&self, got: f32) -> bool {
        let got = f64::from(got);
        // If an intermediate value exceeds BF16's range (slightly smaller than FP32's), infinities
        // are possible, and NaN as their difference. For example an E4M3 code of 448 under a scale
        // of 2^120.
        let may_overflow = self.largest + self.tolerance >= f64::from(bf16::MAX);
        (got - self.value).abs() <= self.tolerance
            || (!got.is_finite() && (!self.value.is_finite() || may_overflow))
    }
}

/// Reads the sampled outputs before a call that will accumulate into them.
pub(super) fn sampled_output(
    program: &Program,
    call: &Call,
    memory: &Memory<'_>,
) -> Result<Vec<f32>, KernelError> {
    let output = view(program, call.outputs()[0].value, memory)?;
    let indices = sample_indices(&call.name, output.len());
    Ok(indices.into_iter().map(|index| output.float(index)).collect())
}

/// Compares sampled outputs; `previous` holds their values from before an accumulating call.
pub(super) fn check(
    report: &mut AuditReport,
    program: &Program,
    call: &Call,
    memory: &Memory<'_>,
    tables: &Tables,
    previous: &[f32],
) -> Result<(), KernelError> {
    let gemm = Gemm::new(program, call, memory, tables)?;
    let (output, bias) = (gemm.output, gemm.bias.is_some());
    let indices = sample_indices(&call.name, output.len());
    report.calls_checked += 1;
    report.count_tensor(indices.len());
    // The backend cannot be shared between threads; its bytes can.
    let expected: Vec<Expected> = indices
        .par_iter()
        .enumerate()
        .map(|(at, &index)| gemm.expected(index, previous.get(at).copied()))
        .collect();
    let wrong: Vec<(usize, &Expected)> = indices
        .iter()
        .copied()
        .zip(&expected)
        .filter(|(index, expected)| !expected.allows(output.float(*index)))
        .collect();
    if let Some((index, expected)) = wrong.first() {
        let what = format!(
            "`{}`: {} of {} sampled outputs are not the dot product of the operands{}{}, first at \
             {}: expected {:e} to within {:.1e}, got {:e}",
            output.name,
            wrong.len(),
            indices.len(),
            if bias { " and the bias" } else { "" },
            if previous.is_empty() { "" } else { " added to what was there" },
            output.coordinate(*index),
            expected.value,
            expected.tolerance,
            output.float(*index),
        );
        report.add(&call.name, what);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_units_by_hand() {
        // 1.0 and 1.0 + 2^-7 are neighbours; subnormals are 2^-133 apart.
        for (magnitude, expected) in [
            (1.0, 2f64.powi(-8)),
            (1.99, 2f64.powi(-8)),
            (2.0, 2f64.powi(-7)),
            (2f64.powi(-126), 2f64.powi(-134)),
            (2f64.powi(-130), 2f64.powi(-134)),
            (0.0, 2f64.powi(-134)),
        ] {
            assert_eq!(half_unit_bf16(magnitude), expected, "{magnitude:e}");
        }
    }

    #[test]
    fn what_is_allowed() {
        let expected = |value: f64, tolerance| Expected { value, tolerance, largest: value.abs() };
        let cancelled = Expected { value: 1.0, tolerance: 1e32, largest: 1e39 };
        for (expected, got, allowed) in [
            (expected(1.0, 1e-3), 1.0009, true),
            (expected(1.0, 1e-3), 1.0011, false),
            (expected(1.0, 1e-3), f32::NAN, false),
            (expected(1.0, 1e-3), f32::INFINITY, false),
            (expected(f64::NAN, f64::NAN), f32::NAN, true),
            (expected(f64::NAN, f64::NAN), 1.0, false),
            (expected(1e39, 1e32), f32::INFINITY, true),
            (expected(1e38, 1e31), f32::INFINITY, false),
            (cancelled, f32::NAN, true),
        ] {
            assert_eq!(expected.allows(got), allowed, "{} {got}", expected.value);
        }
    }
}
