//! Output head and cross-entropy for a rank's rows of the vocabulary, by chunks of tokens.
//!
//! The sums are over the rank's own logits. From the sums of all ranks, [`cross_entropy_gradients`]
//! recomputes the logits and continues with each chunk as on one rank. With a single rank, the
//! results have the bits of `linear_cross_entropy`.

use deepwell_ir::ops::{VocabParallelSums, VocabSlice};
use deepwell_ir::{DType, KernelRequest, Op};
use half::bf16;
use rayon::prelude::*;

use crate::KernelError;
use crate::ops::linear_cross_entropy::cpu::{
    CrossEntropyError, HeadGradients, IGNORED_TARGET, check_lengths, check_targets, chunk_tokens,
    exponentiate_row, workspace_bytes,
};
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{self, Carver, Operand, Output, Tier};
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::vectorized;
use crate::runtime::cpu::softmax::greatest;

/// Values per token.
const SUMS: usize = VocabParallelSums::COUNT;

/// Rows per task.
const ROWS_PER_TASK: usize = 16;

/// Inputs of the head, see [`VocabParallelSums`].
#[derive(Clone, Copy, Debug)]
pub struct Head<'a, E> {
    /// `[targets.len(), hidden]`.
    pub x: &'a [E],
    /// `[slice.rows, hidden]`.
    pub w: &'a [E],
    /// Tokens as indices in the whole vocabulary, or [`IGNORED_TARGET`].
    pub targets: &'a [i32],
    /// This rank's rows of the vocabulary, which are the rows of w.
    pub slice: VocabSlice,
    /// Width of x and w.
    pub hidden: usize,
}

impl<E: Element> Head<'_, E> {
    fn check(&self, with_gradients: bool, workspace: usize) -> Result<(), CrossEntropyError> {
        let Head { x, w, targets, slice, hidden } = *self;
        let (tokens, vocab) = (targets.len(), slice.rows);
        if vocab == 0 || hidden == 0 {
            return Err(CrossEntropyError::Empty { vocab, hidden });
        }
        check_lengths(&[("x", x.len(), tokens * hidden), ("w", w.len(), vocab * hidden)])?;
        check_targets(targets, slice.vocab)?;
        let needed = workspace_bytes::<E>(tokens, hidden, vocab, with_gradients);
        if workspace < needed {
            return Err(CrossEntropyError::WorkspaceTooSmall { needed, got: workspace });
        }
        Ok(())
    }

    /// The logits of `rows` tokens from `first` on.
    fn logits(
        &self,
        tier: Tier,
        first: usize,
        rows: usize,
        logits: &mut [f32],
        workspace: &mut [u8],
    ) -> Result<(), CrossEntropyError> {
        let Head { x, w, slice, hidden, .. } = *self;
        let x = Operand::rows(&x[first * hidden..(first + rows) * hidden], hidden);
        let out = Output::F32 { data: logits, accumulate: false };
        gemm::gemm(tier, rows, slice.rows, hidden, x, Operand::rows(w, hidden), out, workspace)?;
        Ok(())
    }
}

/// Computes for each token the largest logit, the sum of `exp(logit - largest)` and the target's
/// logit, over this rank's rows; sums is `[tokens, 3]`.
///
/// # Errors
///
/// As [`linear_cross_entropy`](crate::ops::linear_cross_entropy::cpu::linear_cross_entropy).
pub fn sums_of_logits<E: Element>(
    tier: Tier,
    head: &Head<'_, E>,
    sums: &mut [f32],
    workspace: &mut [u8],
) -> Result<(), CrossEntropyError> {
    let (tokens, rows_of_w) = (head.targets.len(), head.slice.rows);
    head.check(false, workspace.len())?;
    check_lengths(&[("sums", sums.len(), tokens * SUMS)])?;
    let chunk = chunk_tokens(tokens, rows_of_w);
    let mut carver = Carver::new(workspace);
    let buffer = carver.take::<f32>(chunk * rows_of_w);
    let gemm_workspace = carver.rest();
    for first in (0..tokens).step_by(chunk.max(1)) {
        let rows = chunk.min(tokens - first);
        let logits = &mut buffer[..rows * rows_of_w];
        head.logits(tier, first, rows, logits, gemm_workspace)?;
        logits
            .par_chunks_mut(ROWS_PER_TASK * rows_of_w)
            .zip(head.targets[first..first + rows].par_chunks(ROWS_PER_TASK))
            .zip(sums[first * SUMS..(first + rows) * SUMS].par_chunks_mut(ROWS_PER_TASK * SUMS))
            .for_each(|((logits, targets), sums)| {
                vectorized(
                    #[inline(always)]
                    || {
                        let rows = logits.chunks_exact_mut(rows_of_w).zip(targets);
                        for ((logits, &target), sums) in rows.zip(sums.chunks_exact_mut(SUMS)) {
                            let of_target =
                                head.slice.row_of(target).map_or(0.0, |row| logits[row]);
                            let largest = greatest(logits);
                            let sum = exponentiate_row(logits, largest);
                            sums.copy_from_slice(&[largest, sum, of_target]);
                        }
                    },
                );
            });
    }
    Ok(())
}

/// Combines the sums of all ranks, `[ranks · tokens, 3]`, for one token: largest logit, sum of
/// `exp(logit - largest)`, and the target's logit. The sum is NaN if any rank's is.
#[inline(always)]
fn of_all_ranks(sums: &[f32], tokens: usize, token: usize) -> [f32; SUMS] {
    let of_rank = || sums.chunks_exact(SUMS).skip(token).step_by(tokens);
    let largest = of_rank().map(|sums| sums[0]).fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    let mut of_target = 0.0;
    for sums in of_rank() {
        // `max` drops NaN; the rank's sum keeps it.
        total += sums[1] * (sums[0] - largest).exp();
        of_target += sums[2];
    }
    [largest, total, of_target]
}

/// Sums the losses of all tokens in order, each rounded to `f32`.
fn sum_of_losses(sums: &[f32], targets: &[i32]) -> f64 {
    let counted = targets.iter().enumerate().filter(|(_, target)| **target != IGNORED_TARGET);
    let losses = counted.map(|(token, _)| {
        let [largest, total, of_target] = of_all_ranks(sums, targets.len(), token);
        f64::from((largest - of_target) + total.ln())
    });
    losses.sum()
}

fn write_loss(loss: &mut f32, loss_sum: f64, accumulate: bool) {
    *loss = if accumulate { (f64::from(*loss) + loss_sum) as f32 } else { loss_sum as f32 };
}

/// Writes the loss from the sums of all ranks, or accumulates it if `accumulate` is set.
///
/// # Errors
///
/// For a target outside the whole vocabulary.
pub fn cross_entropy(
    sums: &[f32],
    targets: &[i32],
    vocab: usize,
    loss_scale: f32,
    loss: &mut f32,
    accumulate: bool,
) -> Result<(), CrossEntropyError> {
    check_targets(targets, vocab)?;
    write_loss(loss, f64::from(loss_scale) * sum_of_losses(sums, targets), accumulate);
    Ok(())
}

/// [`cross_entropy`] with the contribution of this rank's rows to the gradient of x, and the
/// gradient of w.
///
/// # Errors
///
/// As [`sums_of_logits`].
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn cross_entropy_gradients<E: Element>(
    tier: Tier,
    head: &Head<'_, E>,
    sums: &[f32],
    loss_scale: f32,
    loss: &mut f32,
    gradients: HeadGradients<'_, E>,
    accumulate: bool,
    workspace: &mut [u8],
) -> Result<(), CrossEntropyError> {
    let Head { x, w, targets, slice, hidden } = *head;
    let (tokens, rows_of_w) = (targets.len(), slice.rows);
    head.check(true, workspace.len())?;
    let HeadGradients { dx, dw } = gradients;
    check_lengths(&[("dx", dx.len(), x.len()), ("dw", dw.len(), w.len())])?;
    let chunk = chunk_tokens(tokens, rows_of_w);
    let mut carver = Carver::new(workspace);
    let logits_buffer = carver.take::<f32>(chunk * rows_of_w);
    let dlogits_buffer = carver.take::<E>(chunk * rows_of_w);
    let gemm_workspace = carver.rest();
    if tokens == 0 && !accumulate {
        dw.fill(0.0);
    }
    for first in (0..tokens).step_by(chunk.max(1)) {
        let rows = chunk.min(tokens - first);
        let logits = &mut logits_buffer[..rows * rows_of_w];
        head.logits(tier, first, rows, logits, gemm_workspace)?;
        let dlogits = &mut dlogits_buffer[..rows * rows_of_w];
        logits
            .par_chunks_mut(rows_of_w)
            .zip(dlogits.par_chunks_mut(rows_of_w))
            .with_min_len(ROWS_PER_TASK)
            .enumerate()
            .for_each(|(row, (logits, dlogits))| {
                vectorized(
                    #[inline(always)]
                    || {
                        let target = targets[first + row];
                        let [largest, total, _] = of_all_ranks(sums, tokens, first + row);
                        exponentiate_row(logits, largest);
                        differentiate_row(logits, total, target, &slice, loss_scale, dlogits);
                    },
                );
            });
        let dlogits = Operand::rows(&*dlogits, rows_of_w);
        let out = Output::overwrite(&mut dx[first * hidden..(first + rows) * hidden]);
        let w_columns = Operand::rows(w, hidden).transposed();
        gemm::gemm(tier, rows, hidden, rows_of_w, dlogits, w_columns, out, gemm_workspace)?;
        let out = Output::F32 { data: dw, accumulate: accumulate || first > 0 };
        let x_columns =
            Operand::rows(&x[first * hidden..(first + rows) * hidden], hidden).transposed();
        let dlogits = dlogits.transposed();
        gemm::gemm(tier, rows_of_w, hidden, rows, dlogits, x_columns, out, gemm_workspace)?;
    }
    write_loss(loss, f64::from(loss_scale) * sum_of_losses(sums, targets), accumulate);
    Ok(())
}

/// `loss_scale * (softmax - one_hot)` of a rank's part of a row, from the part's exponentials and
/// the sum over all ranks.
#[inline(always)]
fn differentiate_row<E: Element>(
    exponentials: &[f32],
    total: f32,
    target: i32,
    slice: &VocabSlice,
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
    if let Some(row) = slice.row_of(target) {
        dlogits[row] = E::from_f32(loss_scale * (exponentials[row] * scale - 1.0));
    }
}

pub(super) fn prepare_sums(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::VocabParallelSums(op) = op else { return Err(operands.unknown_kernel()) };
    let tier = operands.tier()?;
    let slice = op.slice;
    let hidden = operands.shape(0)[1];
    let workspace = operands.workspace::<u8>()?;
    let targets = operands.input::<i32>(2)?;
    let sums = operands.target::<f32>(3)?;
    by_float!(operands, 0, E => {
        let (x, w) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        Ok(Box::new(move |arena| {
            let x = x.of(arena);
            let w = w.of(arena);
            let targets = targets.of(arena);
            let head = Head { x, w, targets, slice, hidden };
            sums_of_logits(tier, &head, sums.of(arena), workspace.of(arena))
                .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn prepare_loss(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::VocabParallelCrossEntropy(op) = op else { return Err(operands.unknown_kernel()) };
    let (vocab, accumulate) = (op.slice.vocab, operands.adds());
    let targets = operands.input::<i32>(2)?;
    let loss_scale = operands.input::<f32>(3)?;
    let sums = operands.input::<f32>(4)?;
    let loss = operands.target::<f32>(5)?;
    Ok(Box::new(move |arena| {
        let sums = sums.of(arena);
        let targets = targets.of(arena);
        let scale = loss_scale.of(arena)[0];
        cross_entropy(sums, targets, vocab, scale, &mut loss.of(arena)[0], accumulate)
            .map_err(|error| error.to_string())
    }))
}

pub(super) fn prepare_gradients(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::VocabParallelCrossEntropyGrad(op) = op else { return Err(operands.unknown_kernel()) };
    let tier = operands.tier()?;
    let slice = op.slice;
    let hidden = operands.shape(0)[1];
    let accumulate = operands.adds();
    let workspace = operands.workspace::<u8>()?;
    let targets = operands.input::<i32>(2)?;
    let loss_scale = operands.input::<f32>(3)?;
    let sums = operands.input::<f32>(4)?;
    let loss = operands.target::<f32>(5)?;
    let dw = operands.target::<f32>(7)?;
    by_float!(operands, 0, E => {
        let (x, w) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let dx = operands.target::<E>(6)?;
        Ok(Box::new(move |arena| {
            let x = x.of(arena);
            let w = w.of(arena);
            let targets = targets.of(arena);
            cross_entropy_gradients(
                tier,
                &Head { x, w, targets, slice, hidden },
                sums.of(arena),
                loss_scale.of(arena)[0],
                &mut loss.of(arena)[0],
                HeadGradients { dx: dx.of(arena), dw: dw.of(arena) },
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
    let gradients = matches!(request.op, Op::VocabParallelCrossEntropyGrad(_));
    match request.operands[0].dtype {
        DType::Bf16 => workspace_bytes::<bf16>(tokens, hidden, vocab, gradients),
        _ => workspace_bytes::<f32>(tokens, hidden, vocab, gradients),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear_cross_entropy::cpu::linear_cross_entropy_on;
    use crate::ops::linear_cross_entropy::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };

    struct Case<E> {
        hidden: usize,
        vocab: usize,
        x: Vec<E>,
        w: Vec<E>,
        targets: Vec<i32>,
    }

    const SCALE: f32 = 1.0 / 64.0;

    impl<E: Element> Case<E> {
        fn random(tokens: usize, hidden: usize, vocab: usize) -> Self {
            let mut random = Random::new((tokens * 31 + hidden * 7 + vocab) as u64);
            let target = |random: &mut Random, token| match token % 5 {
                3 => IGNORED_TARGET,
                _ => random.below(vocab) as i32,
            };
            let targets = (0..tokens).map(|token| target(&mut random, token)).collect();
            let x = random.normals(tokens * hidden);
            let small = |_| E::from_f32(0.3 * random.normal() as f32);
            Case { hidden, vocab, x, w: (0..vocab * hidden).map(small).collect(), targets }
        }

        fn head(&self, place: usize, parts: usize) -> Head<'_, E> {
            let slice = VocabSlice::of(self.vocab, place, parts).unwrap();
            let w = &self.w[slice.first * self.hidden..][..slice.rows * self.hidden];
            Head { x: &self.x, w, targets: &self.targets, slice, hidden: self.hidden }
        }

        fn workspace(&self, with_gradients: bool) -> Vec<u8> {
            let tokens = self.targets.len();
            vec![0; workspace_bytes::<E>(tokens, self.hidden, self.vocab, with_gradients)]
        }

        /// The gathered sums of all ranks.
        fn sums(&self, parts: usize) -> Vec<f32> {
            let of_rank = |place| {
                let mut sums = poisoned(self.targets.len() * SUMS);
                let head = self.head(place, parts);
                let mut workspace = self.workspace(false);
                sums_of_logits(gemm::best_tier(), &head, &mut sums, &mut workspace).unwrap();
                sums
            };
            (0..parts).flat_map(of_rank).collect()
        }

        /// Loss, dx and dw of a rank.
        fn grad(&self, place: usize, parts: usize, before: Option<f32>) -> (f32, Vec<E>, Vec<f32>) {
            let head = self.head(place, parts);
            let mut loss = before.unwrap_or(f32::NAN);
            let mut dx = poisoned(self.x.len());
            let mut dw = vec![before.unwrap_or(f32::NAN); head.w.len()];
            let gradients = HeadGradients { dx: &mut dx, dw: &mut dw };
            let sums = self.sums(parts);
            let mut workspace = self.workspace(true);
            let tier = gemm::best_tier();
            let adds = before.is_some();
            cross_entropy_gradients(
                tier,
                &head,
                &sums,
                SCALE,
                &mut loss,
                gradients,
                adds,
                &mut workspace,
            )
            .unwrap();
            let mut alone = before.unwrap_or(f32::NAN);
            cross_entropy(&sums, &self.targets, self.vocab, SCALE, &mut alone, adds).unwrap();
            assert_eq!(alone.to_bits(), loss.to_bits());
            (loss, dx, dw)
        }
    }

    fn check<E: Element>(tokens: usize, hidden: usize, vocab: usize, parts: usize) {
        let case = Case::<E>::random(tokens, hidden, vocab);
        let (x, w) = (to_f64(&case.x), to_f64(&case.w));
        let loss = oracle::forward(&x, &w, &case.targets, hidden, f64::from(SCALE));
        let expected = oracle::backward(&x, &w, &case.targets, hidden, f64::from(SCALE));
        let unit = f64::from(E::UNIT_ROUNDOFF).max(2f64.powi(-24));
        // Logits are dot products of `hidden` terms; exponentials and their sums have errors of a
        // few more units; a softmax has twice the error of a logit. Each dlogit is rounded to E.
        let largest = |values: &[f64]| values.iter().fold(0f64, |a, b| a.max(b.abs()));
        let logit_error = (hidden as f64 + 8.0) * 2f64.powi(-24) * largest(&x) * largest(&w);
        let per_token = 2.0 * hidden as f64 * logit_error + 16.0 * 2f64.powi(-24);
        let dlogit_error = f64::from(SCALE) * (per_token + unit);
        let mut dx_of_all = vec![0f64; x.len()];
        for place in 0..parts {
            let slice = case.head(place, parts).slice;
            for before in [None, Some(0.5)] {
                for_thread_counts(|| case.grad(place, parts, before));
                let (got, dx, dw) = case.grad(place, parts, before);
                let start = f64::from(before.unwrap_or(0.0));
                let error = (tokens as f64 * f64::from(SCALE)) * per_token + 4e-6;
                assert!((f64::from(got) - loss - start).abs() <= error, "{got} {loss}");
                let rows = slice.first * hidden..(slice.first + slice.rows) * hidden;
                let of_rank: Vec<f64> = expected.dw[rows].iter().map(|dw| dw + start).collect();
                let error = tokens as f64 * largest(&x) * dlogit_error + 1e-6;
                assert_close("dw", &dw, &of_rank, 0.0, error);
                if before.is_none() {
                    dx_of_all.iter_mut().zip(to_f64(&dx)).for_each(|(sum, dx)| *sum += dx);
                }
            }
        }
        for (index, (sum, expected)) in dx_of_all.iter().zip(&expected.dx).enumerate() {
            // Probabilities are at most 1 and sum to 1, so the vocabulary's roundings count as two
            // of a probability of 1; each rank's sum is rounded to E once more.
            let error = largest(&w) * (2.0 * dlogit_error + vocab as f64 * f64::from(SCALE) * 1e-7)
                + (parts as f64 + 1.0) * unit * f64::from(SCALE) * largest(&w);
            assert!((sum - expected).abs() <= error, "dx {index}: {sum} {expected} {error}");
        }
    }

    #[test]
    fn ranks_together_match_the_oracle() {
        for (tokens, hidden, vocab, parts) in
            [(1, 1, 2, 2), (5, 3, 4, 4), (33, 17, 96, 3), (300, 32, 256, 2), (64, 8, 64, 1)]
        {
            check::<f32>(tokens, hidden, vocab, parts);
            check::<bf16>(tokens, hidden, vocab, parts);
        }
    }

    /// With a single rank, all results equal those without ranks to the bit.
    #[test]
    fn one_rank_has_the_bits_of_the_whole_head() {
        let case = Case::<bf16>::random(70, 32, 96);
        let (loss, dx, dw) = case.grad(0, 1, None);
        let mut expected = (f32::NAN, poisoned::<bf16>(dx.len()), vec![f32::NAN; dw.len()]);
        let gradients = HeadGradients { dx: &mut expected.1, dw: &mut expected.2 };
        let mut workspace = case.workspace(true);
        linear_cross_entropy_on(
            gemm::best_tier(),
            &case.x,
            &case.w,
            &case.targets,
            case.hidden,
            SCALE,
            &mut expected.0,
            Some(gradients),
            false,
            &mut workspace,
        )
        .unwrap();
        assert_eq!((loss, dx, dw), expected);
    }

    #[test]
    fn targets_and_values_that_cannot_be() {
        let mut case = Case::<f32>::random(4, 4, 8);
        case.x[5] = f32::NAN;
        for place in 0..2 {
            let (loss, dx, _) = case.grad(place, 2, None);
            assert!(loss.is_nan() && dx[4..8].iter().all(|dx| dx.is_nan()), "{loss} {dx:?}");
        }
        case.targets[2] = 8;
        let mut sums = vec![0.0; 12];
        let mut workspace = case.workspace(false);
        let error = sums_of_logits(gemm::best_tier(), &case.head(0, 2), &mut sums, &mut workspace);
        let expected = CrossEntropyError::Target { token: 2, target: 8, vocab: 8 };
        assert_eq!(error, Err(expected));
    }
}
