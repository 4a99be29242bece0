//! The projection of a router: FP32 GEMMs, of which one operand may be BF16. The oracle is that of
//! the [linear layer](crate::ops::linear::oracle).

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cpu::add_bias::bias_add_forward_in_place;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{self, DataKind, GemmError, Operand, Output, Tier, gemm};
use crate::runtime::cpu::operands::{Operands, Run, by_float};

/// Sizes of a router's projection.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows of x.
    pub tokens: usize,
    /// Outputs of the projection.
    pub experts: usize,
    /// Inputs of the projection.
    pub width: usize,
}

/// Computes `logits = x w^T (+ bias)`: `x` `[tokens, width]`, `w` `[experts, width]`.
///
/// # Errors
///
/// If slices or the workspace are too short.
pub fn router_logits<E: Element>(
    Sizes { tokens, experts, width }: Sizes,
    x: &[E],
    w: &[f32],
    bias: Option<&[f32]>,
    logits: &mut [f32],
    workspace: &mut [u8],
) -> Result<(), GemmError> {
    let (a, b) = (Operand::rows(x, width), Operand::rows_f32(w, width));
    let out = Output::F32 { data: logits, accumulate: false };
    gemm(Tier::F32, tokens, experts, width, a, b, out, workspace)?;
    if let Some(bias) = bias {
        bias_add_forward_in_place(logits, bias);
    }
    Ok(())
}

/// Computes `dx = dlogits w` and `dw (+)= dlogits^T x`.
///
/// # Errors
///
/// If slices or the workspace are too short.
pub fn router_logits_backward<E: Element>(
    Sizes { tokens, experts, width }: Sizes,
    dlogits: &[f32],
    (x, w): (&[E], &[f32]),
    dx: &mut [E],
    (dw, accumulate): (&mut [f32], bool),
    workspace: &mut [u8],
) -> Result<(), GemmError> {
    let rows = Operand::rows_f32(dlogits, experts);
    let weight = Operand::rows_f32(w, width).transposed();
    let out = Output::overwrite(dx);
    gemm(Tier::F32, tokens, width, experts, rows, weight, out, workspace)?;
    let x = Operand::rows(x, width).transposed();
    let out = Output::F32 { data: dw, accumulate };
    gemm(Tier::F32, experts, width, tokens, rows.transposed(), x, out, workspace)
}

fn sizes_of(x: &[usize], w: &[usize]) -> Sizes {
    Sizes { tokens: x[0], experts: w[0], width: x[1] }
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::RouterLogits(op) = op else { return Err(operands.unknown_kernel()) };
    let sizes = sizes_of(operands.shape(0), operands.shape(1));
    let w = operands.input::<f32>(1)?;
    let bias = op.bias.then(|| operands.input::<f32>(2)).transpose()?;
    let logits = operands.target::<f32>(operands.output(0))?;
    let workspace = operands.workspace::<u8>()?;
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let bias = bias.as_ref().map(|bias| bias.of(arena));
            let (x, w, logits) = (x.of(arena), w.of(arena), logits.of(arena));
            router_logits(sizes, x, w, bias, logits, workspace.of(arena))
                .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let sizes = sizes_of(operands.shape(1), operands.shape(2));
    let (dlogits, w) = (operands.input::<f32>(0)?, operands.input::<f32>(2)?);
    let dw = operands.target::<f32>(operands.output(1))?;
    let adds = operands.adds();
    let workspace = operands.workspace::<u8>()?;
    by_float!(operands, 1, E => {
        let x = operands.input::<E>(1)?;
        let dx = operands.target::<E>(operands.output(0))?;
        Ok(Box::new(move |arena| {
            let dlogits = dlogits.of(arena);
            let operands = (x.of(arena), w.of(arena));
            let dx = dx.of(arena);
            let dw = (dw.of(arena), adds);
            let workspace = workspace.of(arena);
            router_logits_backward(sizes, dlogits, operands, dx, dw, workspace)
                .map_err(|error| error.to_string())
        }))
    })
}

/// Scratch bytes of the larger GEMM.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let is_backward = matches!(request.op, Op::RouterLogitsBackward(_));
    let x = &request.operands[usize::from(is_backward)];
    let w = usize::from(is_backward) + 1;
    let Sizes { tokens, experts, width } = sizes_of(&x.shape, &request.operands[w].shape);
    let kind = match x.dtype {
        deepwell_ir::DType::Bf16 => DataKind::Bf16,
        _ => DataKind::F32,
    };
    let bytes = |m, n, k, b| gemm::workspace_bytes(Tier::F32, m, n, k, DataKind::F32, b);
    if !is_backward {
        return gemm::workspace_bytes(Tier::F32, tokens, experts, width, kind, DataKind::F32);
    }
    bytes(tokens, width, experts, DataKind::F32).max(bytes(experts, width, tokens, kind))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::linear::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close_each, for_thread_counts, poisoned, to_f64,
    };

    fn check<E: Element>(tokens: usize, experts: usize, width: usize) {
        let sizes = Sizes { tokens, experts, width };
        let mut random = Random::new((tokens + experts) as u64);
        let x: Vec<E> = random.normals(tokens * width);
        let (w, bias): (Vec<f32>, Vec<f32>) =
            (random.normals(experts * width), random.normals(experts));
        let dlogits: Vec<f32> = random.normals(tokens * experts);
        let mut workspace = vec![0; 1 << 22];
        let wide_x = to_f64(&x);
        let wide_w = to_f64(&w);
        let wide_bias = to_f64(&bias);
        let wide_dlogits = to_f64(&dlogits);
        let magnitudes = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
        // A sum of k terms in FP32, `(k + 2) 2^-24` of the sum of magnitudes, and the bias.
        let allowed = |sizes: Vec<f64>, k: usize| -> Vec<f64> {
            sizes.iter().map(|size| (k + 3) as f64 * 2f64.powi(-24) * size).collect()
        };
        let (of_x, of_w) = (magnitudes(&wide_x), magnitudes(&wide_w));
        let of_dlogits = magnitudes(&wide_dlogits);
        for bias in [None, Some(&bias)] {
            let wide_bias = bias.map(|_| wide_bias.as_slice());
            let expected = oracle::forward(&wide_x, &wide_w, wide_bias, width);
            let of_bias = wide_bias.map(magnitudes);
            let absolute = oracle::forward(&of_x, &of_w, of_bias.as_deref(), width);
            let absolute = allowed(absolute, width);
            let mut logits = poisoned::<f32>(tokens * experts);
            let bias = bias.map(Vec::as_slice);
            router_logits(sizes, &x, &w, bias, &mut logits, &mut workspace).unwrap();
            assert_close_each("logits", &logits, &expected, 0.0, &absolute);
        }
        let dx = oracle::data_gradient(&wide_dlogits, &wide_w, width);
        let dx_allowed = allowed(oracle::data_gradient(&of_dlogits, &of_w, width), experts);
        let dw = oracle::weight_gradient(&wide_dlogits, &wide_x, experts, width);
        let of_dw = oracle::weight_gradient(&of_dlogits, &of_x, experts, width);
        let dw_allowed = allowed(of_dw, tokens);
        for_thread_counts(|| {
            let mut workspace = vec![0; 1 << 22];
            let mut own_dx = poisoned::<E>(tokens * width);
            let mut own_dw = poisoned(experts * width);
            for accumulate in [false, true] {
                let operands = (x.as_slice(), w.as_slice());
                let of_dw = (own_dw.as_mut_slice(), accumulate);
                router_logits_backward(
                    sizes,
                    &dlogits,
                    operands,
                    &mut own_dx,
                    of_dw,
                    &mut workspace,
                )
                .unwrap();
                let times = if accumulate { 2.0 } else { 1.0 };
                let scaled = |values: &[f64]| values.iter().map(|x| times * x).collect::<Vec<_>>();
                let relative = f64::from(E::UNIT_ROUNDOFF);
                assert_close_each("dx", &own_dx, &dx, relative, &dx_allowed);
                assert_close_each("dw", &own_dw, &scaled(&dw), 1e-7, &scaled(&dw_allowed));
            }
            (own_dx, own_dw)
        });
    }

    #[test]
    fn matches_the_oracle() {
        for tokens in [1, 31, 33, 129] {
            for (experts, width) in [(1, 1), (8, 64), (33, 100)] {
                check::<f32>(tokens, experts, width);
                check::<bf16>(tokens, experts, width);
            }
        }
    }
}
