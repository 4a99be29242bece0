//! The gated activation of experts.

use deepwell_ir::ops::ExpertActivation;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The activation of one element, and its derivatives with respect to gate and up projection.
///
/// The derivative is 0 for a projection at or beyond its limit.
pub fn element(activation: ExpertActivation, gate: f64, up: f64) -> (f64, f64, f64) {
    match activation {
        ExpertActivation::SwiGlu => {
            let s = sigmoid(gate);
            (gate * s * up, up * (s + gate * s * sigmoid(-gate)), gate * s)
        }
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
            let s = sigmoid(alpha * g);
            let dgate = (u + 1.0) * (s + alpha * g * s * sigmoid(-alpha * g));
            let passes = [gate < limit, up.abs() < limit].map(|passes| f64::from(u8::from(passes)));
            (g * s * (u + 1.0), passes[0] * dgate, passes[1] * g * s)
        }
    }
}

/// `activation(gate, up)` per row `[rows, columns]`, times the gate of the row's pair; zero for a
/// row without a pair.
pub fn forward(
    activation: ExpertActivation,
    gate: &[f64],
    up: &[f64],
    gates: &[f64],
    pairs: &[i32],
) -> Vec<f64> {
    let columns = gate.len() / pairs.len().max(1);
    let value = |index: usize| match pairs[index / columns] {
        pair if pair >= 0 => element(activation, gate[index], up[index]).0 * gates[pair as usize],
        _ => 0.0,
    };
    (0..gate.len()).map(value).collect()
}

/// The gradients of `gate`, `up` and `gates` for `dout`.
pub fn backward(
    activation: ExpertActivation,
    dout: &[f64],
    gate: &[f64],
    up: &[f64],
    gates: &[f64],
    pairs: &[i32],
) -> [Vec<f64>; 3] {
    let columns = gate.len() / pairs.len().max(1);
    let (mut dgate, mut dup) = (vec![0.0; gate.len()], vec![0.0; gate.len()]);
    let mut dgates = vec![0.0; gates.len()];
    for index in 0..gate.len() {
        let Ok(pair) = usize::try_from(pairs[index / columns]) else { continue };
        let (value, by_gate, by_up) = element(activation, gate[index], up[index]);
        dgate[index] = dout[index] * gates[pair] * by_gate;
        dup[index] = dout[index] * gates[pair] * by_up;
        dgates[pair] += dout[index] * value;
    }
    [dgate, dup, dgates]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 0.7 };
        for activation in [ExpertActivation::SwiGlu, clamped] {
            // Rows 1 and 4 have no pair, pair 2 has no row, pair 3 has a gate of zero.
            let pairs = [1, -1, 0, 3, -1];
            let (gate, up) = (varied(15, 1), varied(15, 2));
            let (gates, dout) = (vec![0.3, -0.8, 0.5, 0.0], varied(15, 3));
            let [dgate, dup, dgates] = backward(activation, &dout, &gate, &up, &gates, &pairs);
            let loss = |gate: &[f64], up: &[f64], gates: &[f64]| {
                dot(&forward(activation, gate, up, gates, &pairs), &dout)
            };
            check("dgate", &gate, &dgate, |gate| loss(gate, &up, &gates));
            check("dup", &up, &dup, |up| loss(&gate, up, &gates));
            check("dgates", &gates, &dgates, |gates| loss(&gate, &up, gates));
            assert!(dgates[2] == 0.0 && dgates[3] != 0.0);
            if activation == clamped {
                assert!(gate.iter().chain(&up).any(|x| x.abs() > 0.7), "something is clamped");
            }
        }
    }

    #[test]
    fn limits_by_hand() {
        let clamped = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        for (gate, up, value, by_gate, by_up) in [
            // At and beyond a limit the gradient is zero; gates have no lower limit.
            (7.0, 0.0, 7.0, false, true),
            (9.0, 0.0, 7.0, false, true),
            (0.0, 7.0, 0.0, true, false),
            (0.0, -9.0, 0.0, true, false),
            (-9.0, 0.0, 0.0, true, true),
        ] {
            let (got, dgate, dup) = element(clamped, gate, up);
            assert!((got - value).abs() < 1e-4, "{gate} {up}: {got}");
            let is_there = |x: f64| x != 0.0;
            // At a gate of 0 the gradient of up is 0 anyway.
            assert_eq!((is_there(dgate), is_there(dup)), (by_gate, by_up && gate != 0.0));
        }
    }
}
