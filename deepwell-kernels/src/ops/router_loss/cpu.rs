//! The auxiliary losses of a router, as [`deepwell_moe`] defines. This definition is also the
//! oracle, and is checked there by finite differences.

use deepwell_ir::Op;
use deepwell_ir::ops::{IGNORED_TARGET, RouterLoss};
use deepwell_moe::{MoeError, router_losses};

use crate::KernelError;
use crate::runtime::cpu::operands::{Operands, Run};

/// Inputs of the losses.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// `[tokens, experts]`.
    pub logits: &'a [f32],
    /// `[tokens, top_k]`.
    pub chosen: &'a [i32],
    /// `[tokens]`.
    pub targets: &'a [i32],
    /// One over the number of the step's counted targets.
    pub loss_scale: f32,
}

/// Writes the losses of a micro-batch, times the micro-batch's share of the step's tokens, to
/// `loss`, or accumulates; writes the losses' gradient `[tokens, experts]`, if `dlogits` is given.
///
/// # Errors
///
/// If lengths do not fit, or an expert does not exist.
pub fn router_loss(
    op: &RouterLoss,
    [experts, top_k]: [usize; 2],
    routed: Routed<'_>,
    (loss, accumulate): (&mut f32, bool),
    dlogits: Option<&mut [f32]>,
) -> Result<(), MoeError> {
    let Routed { logits, chosen, targets, loss_scale } = routed;
    let counted = targets.iter().filter(|&&target| target != IGNORED_TARGET).count();
    let share = f64::from(loss_scale) * counted as f64;
    let own = router_losses(op, logits, experts, chosen, top_k)?;
    let before = if accumulate { f64::from(*loss) } else { 0.0 };
    *loss = (before + share * own.loss) as f32;
    if let Some(dlogits) = dlogits {
        let of_rank = share / f64::from(op.ranks);
        for (target, own) in dlogits.iter_mut().zip(own.dlogits) {
            *target = (of_rank * f64::from(own)) as f32;
        }
    }
    Ok(())
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let (op, with_gradient) = match op {
        Op::RouterLoss(op) => (op.clone(), false),
        Op::RouterLossGrad(op) => (op.forward.clone(), true),
        _ => return Err(operands.unknown_kernel()),
    };
    let sizes = [operands.shape(0)[1], operands.shape(1)[1]];
    let logits = operands.input::<f32>(0)?;
    let chosen = operands.input::<i32>(1)?;
    let targets = operands.input::<i32>(2)?;
    let scale = operands.input::<f32>(3)?;
    let (loss, adds) = (operands.target::<f32>(4)?, operands.adds());
    let dlogits = with_gradient.then(|| operands.target::<f32>(5)).transpose()?;
    Ok(Box::new(move |arena| {
        let routed = Routed {
            logits: logits.of(arena),
            chosen: chosen.of(arena),
            targets: targets.of(arena),
            loss_scale: scale.of(arena)[0],
        };
        let loss = (&mut loss.of(arena)[0], adds);
        let dlogits = dlogits.as_ref().map(|dlogits| dlogits.of(arena));
        router_loss(&op, sizes, routed, loss, dlogits).map_err(|error| error.to_string())
    }))
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::RouteScore;

    use super::*;
    use crate::runtime::cpu::test_support::Random;

    /// A step's loss is the average over micro-batches, for any number of these; micro-batches
    /// without targets are excluded.
    #[test]
    fn micro_batches_are_averaged() {
        let op = RouterLoss { score: RouteScore::Softmax, balance: 0.1, z: 0.01, ranks: 1 };
        let (experts, top_k, tokens) = (4, 2, 6);
        let logits: Vec<f32> = Random::new(1).normals(tokens * experts);
        let chosen: Vec<i32> = (0..tokens).flat_map(|token| [token as i32 % 4, 3]).collect();
        let chosen: Vec<i32> = chosen.chunks(2).flat_map(|pair| [pair[0] % 3, pair[1]]).collect();
        let once = router_losses(&op, &logits, experts, &chosen, top_k).unwrap();
        for micro_batches in [1usize, 4] {
            let scale = 1.0 / (tokens * micro_batches) as f32;
            let mut loss = f32::NAN;
            let mut dlogits = vec![f32::NAN; logits.len()];
            for index in 0..micro_batches {
                let routed = Routed {
                    logits: &logits,
                    chosen: &chosen,
                    targets: &vec![1; tokens],
                    loss_scale: scale,
                };
                let of_loss = (&mut loss, index > 0);
                router_loss(&op, [experts, top_k], routed, of_loss, Some(&mut dlogits)).unwrap();
            }
            // One rounding per micro-batch, and one of the scale.
            let allowed = 4.0 * 6e-8 * once.loss;
            assert!((f64::from(loss) - once.loss).abs() < allowed, "{loss} {}", once.loss);
            for (got, expected) in dlogits.iter().zip(&once.dlogits) {
                let expected = expected / micro_batches as f32;
                assert!((got - expected).abs() <= 3e-7 * expected.abs(), "{got} {expected}");
            }
        }
        let routed = Routed {
            logits: &logits,
            chosen: &chosen,
            targets: &vec![IGNORED_TARGET; tokens],
            loss_scale: 1.0,
        };
        let mut loss = f32::NAN;
        router_loss(&op, [experts, top_k], routed, (&mut loss, false), None).unwrap();
        assert_eq!(loss, 0.0);
    }
}
