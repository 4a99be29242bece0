//! The router of a mixture of experts: token by token, as [`deepwell_moe`] defines.

use deepwell_ir::Op;
use deepwell_ir::ops::{Route, RouteBackward};
use deepwell_moe::{MoeError, TokenRouter};
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};

/// Tokens that a thread processes at a time.
const TOKENS_PER_CHUNK: usize = 64;

/// Chooses `top_k` experts for each token of `logits` `[tokens, experts]`: `gates` and `chosen` are
/// `[tokens, top_k]`.
///
/// Non-finite logits give gates of NaN, so that the step is recognized as one to skip.
///
/// # Errors
///
/// If settings or the bias do not fit, or the bias is not finite.
///
/// # Panics
///
/// If a slice's length does not fit the settings.
pub fn route_forward<E: Element>(
    settings: &Route,
    logits: &[E],
    selection_bias: Option<&[E]>,
    gates: &mut [f32],
    chosen: &mut [i32],
) -> Result<(), MoeError> {
    let bias: Option<Vec<f64>> =
        selection_bias.map(|bias| bias.iter().map(|&b| f64::from(b.to_f32())).collect());
    let router = TokenRouter::new(settings, bias.as_deref())?;
    let Route { experts, top_k, .. } = *settings;
    let tokens = logits.len() / experts;
    assert_eq!(logits.len(), tokens * experts, "`logits` is not [tokens, experts]");
    assert_eq!(gates.len(), tokens * top_k, "`gates` is not [tokens, top_k]");
    assert_eq!(chosen.len(), tokens * top_k, "`chosen` is not [tokens, top_k]");
    logits
        .par_chunks(TOKENS_PER_CHUNK * experts)
        .zip(gates.par_chunks_mut(TOKENS_PER_CHUNK * top_k))
        .zip(chosen.par_chunks_mut(TOKENS_PER_CHUNK * top_k))
        .for_each_with(router, |router, ((logits, gates), chosen)| {
            let (mut row, mut row_chosen) = (vec![0f64; experts], vec![0; top_k]);
            let mut row_gates = vec![0.0; top_k];
            let rows = logits.chunks_exact(experts).zip(gates.chunks_exact_mut(top_k));
            for ((logits, gates), chosen) in rows.zip(chosen.chunks_exact_mut(top_k)) {
                row.iter_mut().zip(logits).for_each(|(x, logit)| *x = logit.to_f32().into());
                router.choose(&row, &mut row_chosen, &mut row_gates);
                gates
                    .iter_mut()
                    .zip(&row_gates)
                    .for_each(|(gate, &row_chosen)| *gate = row_chosen as f32);
                chosen
                    .iter_mut()
                    .zip(&row_chosen)
                    .for_each(|(expert, &row_chosen)| *expert = row_chosen as i32);
            }
        });
    Ok(())
}

/// Computes the gradient of the logits from that of the gates, for the chosen experts.
///
/// # Errors
///
/// If settings do not fit, or an expert does not exist.
///
/// # Panics
///
/// If a slice's length does not fit the settings.
pub fn route_backward<E: Element>(
    settings: &Route,
    dgates: &[f32],
    logits: &[E],
    chosen: &[i32],
    dlogits: &mut [E],
) -> Result<(), MoeError> {
    // The bias only affects the choice, which is given.
    let settings = Route { selection_bias: false, ..settings.clone() };
    let router = TokenRouter::new::<f64>(&settings, None)?;
    let Route { experts, top_k, .. } = settings;
    let tokens = logits.len() / experts;
    assert_eq!(logits.len(), tokens * experts, "`logits` is not [tokens, experts]");
    assert_eq!(dlogits.len(), tokens * experts, "`dlogits` is not [tokens, experts]");
    assert_eq!(dgates.len(), tokens * top_k, "`dgates` is not [tokens, top_k]");
    assert_eq!(chosen.len(), tokens * top_k, "`chosen` is not [tokens, top_k]");
    let is_expert = |&expert: &i32| usize::try_from(expert).is_ok_and(|expert| expert < experts);
    if let Some(index) = chosen.iter().position(|expert| !is_expert(expert)) {
        return Err(MoeError::ExpertOutOfRange { index, expert: chosen[index] as u32, experts });
    }
    logits
        .par_chunks(TOKENS_PER_CHUNK * experts)
        .zip(dlogits.par_chunks_mut(TOKENS_PER_CHUNK * experts))
        .zip(dgates.par_chunks(TOKENS_PER_CHUNK * top_k))
        .zip(chosen.par_chunks(TOKENS_PER_CHUNK * top_k))
        .for_each_with(router, |router, (((logits, dlogits), dgates), chosen)| {
            let (mut row, mut drow) = (vec![0f64; experts], vec![0f64; experts]);
            let mut own = vec![0; top_k];
            let rows = logits.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts));
            let choices = dgates.chunks_exact(top_k).zip(chosen.chunks_exact(top_k));
            for ((logits, dlogits), (dgates, chosen)) in rows.zip(choices) {
                row.iter_mut().zip(logits).for_each(|(x, logit)| *x = logit.to_f32().into());
                own.iter_mut().zip(chosen).for_each(|(own, &expert)| *own = expert as u32);
                router.backward(&row, &own, dgates, &mut drow);
                dlogits.iter_mut().zip(&drow).for_each(|(d, &own)| *d = E::from_f32(own as f32));
            }
        });
    Ok(())
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Route(op) = op else { return Err(operands.unknown_kernel()) };
    let settings = op.clone();
    let (gates, chosen) = (operands.output(0), operands.output(1));
    by_float!(operands, 0, E => {
        let logits = operands.input::<E>(0)?;
        let bias = op.selection_bias.then(|| operands.input::<E>(1)).transpose()?;
        let gates = operands.target::<f32>(gates)?;
        let chosen = operands.target::<i32>(chosen)?;
        Ok(Box::new(move |arena| {
            let bias = bias.as_ref().map(|bias| bias.of(arena));
            let (gates, chosen) = (gates.of(arena), chosen.of(arena));
            route_forward(&settings, logits.of(arena), bias, gates, chosen)
                .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::RouteBackward(RouteBackward { forward: op }) = op else {
        return Err(operands.unknown_kernel());
    };
    let settings = op.clone();
    by_float!(operands, 1, E => {
        let dgates = operands.input::<f32>(0)?;
        let logits = operands.input::<E>(1)?;
        let chosen = operands.input::<i32>(2)?;
        let dlogits = operands.target::<E>(3)?;
        Ok(Box::new(move |arena| {
            let dgates = dgates.of(arena);
            let logits = logits.of(arena);
            let chosen = chosen.of(arena);
            route_backward(&settings, dgates, logits, chosen, dlogits.of(arena))
                .map_err(|error| error.to_string())
        }))
    })
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{RouteGroups, RouteScore};
    use half::bf16;

    use super::*;
    use crate::ops::route::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };

    fn settings(experts: usize, top_k: usize, score: RouteScore) -> Route {
        let normalize = score == RouteScore::Sigmoid;
        Route {
            experts,
            top_k,
            score,
            normalize,
            scaling: if normalize { 2.5 } else { 1.0 },
            groups: (experts == 8).then_some(RouteGroups { count: 4, chosen: 2 }),
            selection_bias: normalize,
        }
    }

    fn check<E: Element>(settings: &Route, tokens: usize) {
        let Route { experts, top_k, .. } = *settings;
        let mut random = Random::new(3 + tokens as u64);
        let logits: Vec<E> = random.normals(tokens * experts);
        let bias: Vec<E> = random.normals(experts);
        let bias = settings.selection_bias.then_some(bias.as_slice());
        let dgates: Vec<f32> = random.normals(tokens * top_k);
        let wide_bias = bias.map(to_f64);
        let expected = oracle::forward(settings, &to_f64(&logits), wide_bias.as_deref());
        let chosen = &expected.experts;
        for_thread_counts(|| {
            let mut gates = poisoned::<f32>(tokens * top_k);
            let mut chosen_again = vec![-1; tokens * top_k];
            route_forward(settings, &logits, bias, &mut gates, &mut chosen_again).unwrap();
            assert_eq!(chosen_again, *chosen);
            // One rounding to f32.
            assert_close("gates", &gates, &expected.gates, 2f64.powi(-24), 1e-45);
            gates
        });
        let wide_dgates = to_f64(&dgates);
        let expected = oracle::backward(settings, &wide_dgates, &to_f64(&logits), chosen);
        for_thread_counts(|| {
            let mut dlogits = poisoned::<E>(tokens * experts);
            route_backward(settings, &dgates, &logits, chosen, &mut dlogits).unwrap();
            // One rounding to f32 and one to the type.
            let relative = f64::from(E::UNIT_ROUNDOFF) + 2f64.powi(-23);
            assert_close("dlogits", &dlogits, &expected, relative, 1e-40);
            dlogits
        });
    }

    #[test]
    fn matches_the_oracle() {
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            for (experts, top_k) in [(1, 1), (4, 2), (8, 3), (33, 6)] {
                for tokens in [0, 1, 63, 64, 65, 200] {
                    check::<f32>(&settings(experts, top_k, score), tokens);
                    check::<bf16>(&settings(experts, top_k, score), tokens);
                }
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_seen_in_the_gates() {
        let settings = settings(4, 2, RouteScore::Softmax);
        let logits = [0.0f32, 1.0, 2.0, 3.0, 0.0, f32::NAN, 0.0, 0.0];
        let (mut gates, mut chosen) = ([0.0; 4], [0; 4]);
        route_forward(&settings, &logits, None, &mut gates, &mut chosen).unwrap();
        assert!(gates[..2].iter().all(|gate| gate.is_finite()), "{gates:?}");
        assert!(gates[2..].iter().all(|gate| gate.is_nan()), "{gates:?}");
        let mut dlogits = [0.0f32; 8];
        for expert in [-1, 4] {
            let error =
                route_backward(&settings, &[1.0; 4], &logits, &[0, 1, 2, expert], &mut dlogits);
            assert!(matches!(error, Err(MoeError::ExpertOutOfRange { index: 3, .. })), "{error:?}");
        }
    }
}
