//! Output head and cross-entropy in one pass, by chunks of tokens, so that only one chunk of logits
//! exists at a time.
//!
//! `logits = x w^T`, `loss (+)= loss_scale * sum over tokens of (lse - logit[target])`, where `lse`
//! is the logarithm of the sum of exponentials of a token's logits. The training variant continues
//! with the chunk's gradients: `dlogits = loss_scale * (softmax - one_hot)`, `dx = dlogits w` and
//! `dw (+)= dlogits^T x`.
//!
//! | tensor | shape |
//! |---|---|
//! | x, dx | `[tokens, hidden]` |
//! | w, dw | `[vocab, hidden]`; dw is `f32` |
//! | targets | `[tokens]`, below vocab, or [`IGNORED_TARGET`] |
//! | loss | one `f32` |
//!
//! The logits are `f32` and the softmax is FP32; `dlogits` is rounded to the element type before
//! the GEMMs; the losses of a call are summed in `f64`, token by token, and rounded once. Chunks
//! depend on the shape alone, so results have the same bits at any number of threads.

#[cfg(test)]
mod tests;

use deepwell_ir::{DType, KernelRequest, Op};
use half::bf16;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{
    self, ALIGNMENT, Carver, DataKind, GemmError, Operand, Output, Tier, carved_bytes,
};
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{LANES, sum_lanes, vectorized};
use crate::runtime::cpu::softmax::{exp_or_zero, greatest};

/// Tokens with this target are excluded from the loss, as in PyTorch.
pub const IGNORED_TARGET: i32 = -100;

/// Tokens per chunk of logits: 256, or 128 if 256 rows would exceed 32 MiB (a vocabulary above
/// 32768). Smaller chunks would spend too much time packing the weight.
pub(crate) fn chunk_tokens(tokens: usize, vocab: usize) -> usize {
    const BYTES_MAX: usize = 32 << 20;
    let rows = if 256 * vocab * size_of::<f32>() <= BYTES_MAX { 256 } else { 128 };
    rows.min(tokens)
}

/// Compares the lengths of tensors with the expected lengths; the first difference is an error.
pub(crate) fn check_lengths(
    tensors: &[(&'static str, usize, usize)],
) -> Result<(), CrossEntropyError> {
    match tensors.iter().find(|(_, got, expected)| got != expected) {
        Some(&(tensor, got, expected)) => Err(CrossEntropyError::Length { tensor, expected, got }),
        None => Ok(()),
    }
}

pub(crate) fn check_targets(targets: &[i32], vocab: usize) -> Result<(), CrossEntropyError> {
    let is_valid = |target: i32| {
        target == IGNORED_TARGET || usize::try_from(target).is_ok_and(|target| target < vocab)
    };
    match targets.iter().position(|&target| !is_valid(target)) {
        Some(token) => Err(CrossEntropyError::Target { token, target: targets[token], vocab }),
        None => Ok(()),
    }
}

/// Reason for refusing a call. In all cases nothing has been written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CrossEntropyError {
    /// A target outside the vocabulary.
    #[error(
        "linear_cross_entropy: target of token {token}: expected 0 to {} or {IGNORED_TARGET}, \
         got {target}\nhint: the vocabulary has {vocab} entries; was the data tokenized for \
         another model?",
        *vocab as i64 - 1
    )]
    Target {
        /// The token's index in x.
        token: usize,
        /// The token's target.
        target: i32,
        /// Rows of w.
        vocab: usize,
    },
    /// Rows without elements, or no vocabulary.
    #[error("linear_cross_entropy: expected w [1 or more, 1 or more], got [{vocab}, {hidden}]")]
    Empty {
        /// Rows of w.
        vocab: usize,
        /// Width of x and w.
        hidden: usize,
    },
    /// A tensor's number of elements differs from the shape's.
    #[error("linear_cross_entropy: tensor `{tensor}`: expected {expected} elements, got {got}")]
    Length {
        /// The tensor's name.
        tensor: &'static str,
        /// Elements required by the shape.
        expected: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// The workspace is too small.
    #[error("linear_cross_entropy: workspace: expected at least {needed} bytes, got {got}")]
    WorkspaceTooSmall {
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        got: usize,
    },
    /// The GEMMs cannot run.
    #[error(transparent)]
    Gemm(#[from] GemmError),
}

/// Bytes of workspace of [`linear_cross_entropy`]: one chunk of logits and of losses, with
/// gradients also one chunk of the logits' gradient in `E`, and the largest packing of the GEMMs on
/// the most demanding tier.
#[must_use]
pub fn workspace_bytes<E: Element>(
    tokens: usize,
    hidden: usize,
    vocab: usize,
    with_gradients: bool,
) -> usize {
    let rows = chunk_tokens(tokens, vocab);
    let kind = DataKind::of::<E>();
    let gemm = |m, n, k| {
        let on_tier = |tier| gemm::workspace_bytes(tier, m, n, k, kind, kind);
        Tier::ALL.into_iter().map(on_tier).max().unwrap_or(0)
    };
    let buffers = carved_bytes::<f32>(rows * vocab) + carved_bytes::<f32>(rows) + ALIGNMENT;
    let logits = gemm(rows, vocab, hidden);
    if !with_gradients {
        return buffers + logits;
    }
    let gemms = logits.max(gemm(rows, hidden, vocab)).max(gemm(vocab, hidden, rows));
    buffers + carved_bytes::<E>(rows * vocab) + gemms
}

/// Outputs for the gradients of [`linear_cross_entropy`].
#[derive(Debug)]
pub struct HeadGradients<'a, E> {
    /// Gradient of x, `[tokens, hidden]`; overwritten.
    pub dx: &'a mut [E],
    /// Gradient of w, `[vocab, hidden]`; overwritten or accumulated like the loss.
    pub dw: &'a mut [f32],
}

/// Writes the loss, or accumulates it if `accumulate` is set, and with `gradients` also those of x
/// and w in the same pass. The GEMMs run on the best tier.
///
/// `targets` determines the number of tokens and `w` the vocabulary; layouts as in the
/// [module](self)'s table.
///
/// # Errors
///
/// [`CrossEntropyError`] if a target is out of range, `w` is empty, a slice does not fit the
/// shapes, or the workspace is smaller than [`workspace_bytes`].
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn linear_cross_entropy<E: Element>(
    x: &[E],
    w: &[E],
    targets: &[i32],
    hidden: usize,
    loss_scale: f32,
    loss: &mut f32,
    gradients: Option<HeadGradients<'_, E>>,
    accumulate: bool,
    workspace: &mut [u8],
) -> Result<(), CrossEntropyError> {
    let tier = gemm::best_tier();
    linear_cross_entropy_on(
        tier, x, w, targets, hidden, loss_scale, loss, gradients, accumulate, workspace,
    )
}

/// [`linear_cross_entropy`] with the GEMMs on a given tier.
///
/// # Errors
///
/// As [`linear_cross_entropy`], and if `tier` is not available.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn linear_cross_entropy_on<E: Element>(
    tier: Tier,
    x: &[E],
    w: &[E],
    targets: &[i32],
    hidden: usize,
    loss_scale: f32,
    loss: &mut f32,
    mut gradients: Option<HeadGradients<'_, E>>,
    accumulate: bool,
    workspace: &mut [u8],
) -> Result<(), CrossEntropyError> {
    let tokens = targets.len();
    let vocab = w.len().checked_div(hidden).unwrap_or(0);
    if vocab == 0 {
        return Err(CrossEntropyError::Empty { vocab, hidden });
    }
    check_lengths(&[("x", x.len(), tokens * hidden), ("w", w.len(), vocab * hidden)])?;
    if let Some(HeadGradients { dx, dw }) = &gradients {
        check_lengths(&[("dx", dx.len(), x.len()), ("dw", dw.len(), w.len())])?;
    }
    check_targets(targets, vocab)?;
    let needed = workspace_bytes::<E>(tokens, hidden, vocab, gradients.is_some());
    if workspace.len() < needed {
        return Err(CrossEntropyError::WorkspaceTooSmall { needed, got: workspace.len() });
    }
    let chunk = chunk_tokens(tokens, vocab);
    let mut carver = Carver::new(workspace);
    let logits_buffer = carver.take::<f32>(chunk * vocab);
    let losses_buffer = carver.take::<f32>(chunk);
    let dlogits_len = if gradients.is_some() { chunk * vocab } else { 0 };
    let dlogits_buffer = carver.take::<E>(dlogits_len);
    let gemm_workspace = carver.rest();

    if let (0, false, Some(HeadGradients { dw, .. })) = (tokens, accumulate, &mut gradients) {
        dw.fill(0.0);
    }
    let mut loss_sum = 0.0f64;
    for first in (0..tokens).step_by(chunk.max(1)) {
        let rows = chunk.min(tokens - first);
        let x_rows = Operand::rows(&x[first * hidden..(first + rows) * hidden], hidden);
        let w_rows = Operand::rows(w, hidden);
        let logits = &mut logits_buffer[..rows * vocab];
        let out = Output::F32 { data: logits, accumulate: false };
        gemm::gemm(tier, rows, vocab, hidden, x_rows, w_rows, out, gemm_workspace)?;

        let losses = &mut losses_buffer[..rows];
        let dlogits_len = if gradients.is_some() { rows * vocab } else { 0 };
        let dlogits = &mut dlogits_buffer[..dlogits_len];
        let targets = &targets[first..first + rows];
        soften_chunk(logits, targets, loss_scale, losses, dlogits, vocab);
        loss_sum += losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();

        if let Some(HeadGradients { dx, dw }) = &mut gradients {
            let dlogits = Operand::rows(&*dlogits, vocab);
            let dx_rows = &mut dx[first * hidden..(first + rows) * hidden];
            let (w, out) = (w_rows.transposed(), Output::overwrite(dx_rows));
            gemm::gemm(tier, rows, hidden, vocab, dlogits, w, out, gemm_workspace)?;
            let out = Output::F32 { data: dw, accumulate: accumulate || first > 0 };
            let (a, b) = (dlogits.transposed(), x_rows.transposed());
            gemm::gemm(tier, vocab, hidden, rows, a, b, out, gemm_workspace)?;
        }
    }
    let loss_sum = f64::from(loss_scale) * loss_sum;
    *loss = if accumulate { (f64::from(*loss) + loss_sum) as f32 } else { loss_sum as f32 };
    Ok(())
}

/// Computes losses from a chunk of logits and, unless `dlogits` is empty, the gradient of the
/// logits. Overwrites the logits.
fn soften_chunk<E: Element>(
    logits: &mut [f32],
    targets: &[i32],
    loss_scale: f32,
    losses: &mut [f32],
    dlogits: &mut [E],
    vocab: usize,
) {
    const ROWS_PER_TASK: usize = 16;
    let elements = (ROWS_PER_TASK * vocab).max(1);
    let rows = logits.par_chunks_mut(elements).zip(targets.par_chunks(ROWS_PER_TASK));
    let rows = rows.zip(losses.par_chunks_mut(ROWS_PER_TASK));
    if dlogits.is_empty() {
        rows.for_each(|((logits, targets), losses)| {
            vectorized(
                #[inline(always)]
                || {
                    let rows = logits.chunks_exact_mut(vocab).zip(targets).zip(losses);
                    for ((logits, &target), loss) in rows {
                        (*loss, _) = soften_row(logits, target);
                    }
                },
            );
        });
    } else {
        rows.zip(dlogits.par_chunks_mut(elements)).for_each(
            |(((logits, targets), losses), dlogits)| {
                vectorized(
                    #[inline(always)]
                    || {
                        let rows = logits.chunks_exact_mut(vocab).zip(targets).zip(losses);
                        for (((logits, &target), loss), dlogits) in
                            rows.zip(dlogits.chunks_exact_mut(vocab))
                        {
                            let total;
                            (*loss, total) = soften_row(logits, target);
                            differentiate_row(logits, total, target, loss_scale, dlogits);
                        }
                    },
                );
            },
        );
    }
}

/// Replaces a row of logits by `exp(logit - greatest)`; returns the token's loss (zero for an
/// ignored target) and the sum of the exponentials.
#[inline(always)]
fn soften_row(logits: &mut [f32], target: i32) -> (f32, f32) {
    let target_logit = if target == IGNORED_TARGET { 0.0 } else { logits[target as usize] };
    let greatest = greatest(logits);
    let total = exponentiate_row(logits, greatest);
    // The difference comes first: for a likely target it is small and exact.
    let loss = (greatest - target_logit) + total.ln();
    (if target == IGNORED_TARGET { 0.0 } else { loss }, total)
}

/// Replaces a row of logits by `exp(logit - greatest)`; returns the sum of the exponentials.
#[inline(always)]
pub(crate) fn exponentiate_row(logits: &mut [f32], greatest: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (blocks, rest) = logits.as_chunks_mut::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            block[lane] = exp_or_zero(block[lane] - greatest);
            lanes[lane] += block[lane];
        }
    }
    for (lane, logit) in lanes.iter_mut().zip(rest) {
        *logit = exp_or_zero(*logit - greatest);
        *lane += *logit;
    }
    sum_lanes(lanes)
}

/// `loss_scale * (softmax - one_hot)` of a row from its exponentials and their sum.
#[inline(always)]
fn differentiate_row<E: Element>(
    exponentials: &[f32],
    total: f32,
    target: i32,
    loss_scale: f32,
    dlogits: &mut [E],
) {
    if target == IGNORED_TARGET {
        dlogits.fill(E::from_f32(0.0));
        return;
    }
    let scale = 1.0 / total;
    for (dlogit, &exponential) in dlogits.iter_mut().zip(exponentials) {
        *dlogit = E::from_f32(loss_scale * (exponential * scale));
    }
    let target = target as usize;
    dlogits[target] = E::from_f32(loss_scale * (exponentials[target] * scale - 1.0));
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let with_gradients = matches!(op, Op::LinearCrossEntropyGrad(_));
    let tier = operands.tier()?;
    let accumulate = operands.adds();
    let hidden = operands.shape(0)[1];
    let workspace = operands.workspace::<u8>()?;
    let targets = operands.input::<i32>(2)?;
    let loss_scale = operands.input::<f32>(3)?;
    let loss = operands.target::<f32>(4)?;
    by_float!(operands, 0, E => {
        let (x, w) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let gradients = if with_gradients {
            Some((operands.target::<E>(5)?, operands.target::<f32>(6)?))
        } else {
            None
        };
        Ok(Box::new(move |arena| {
            let gradients = gradients
                .as_ref()
                .map(|(dx, dw)| HeadGradients { dx: dx.of(arena), dw: dw.of(arena) });
            linear_cross_entropy_on(
                tier,
                x.of(arena),
                w.of(arena),
                targets.of(arena),
                hidden,
                loss_scale.of(arena)[0],
                &mut loss.of(arena)[0],
                gradients,
                accumulate,
                workspace.of(arena),
            )
            .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn workspace(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let (x, w) = (&request.operands[0].shape, &request.operands[1].shape);
    let (tokens, hidden, vocab) = (x[0], x[1], w[0]);
    let gradients = matches!(request.op, Op::LinearCrossEntropyGrad(_));
    match request.operands[0].dtype {
        DType::Bf16 => workspace_bytes::<bf16>(tokens, hidden, vocab, gradients),
        _ => workspace_bytes::<f32>(tokens, hidden, vocab, gradients),
    }
}
