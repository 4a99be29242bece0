//! SwiGLU without its linear layers.

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `gate * sigmoid(gate) * up`, element by element.
pub fn forward(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u).collect()
}

/// The gradients of `gate` and `up` for `dout`.
pub fn backward(dout: &[f64], gate: &[f64], up: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut dgate = Vec::with_capacity(gate.len());
    let mut dup = Vec::with_capacity(gate.len());
    for ((&d, &g), &u) in dout.iter().zip(gate).zip(up) {
        let s = sigmoid(g);
        // 1 - sigmoid(g) computed as sigmoid(-g), which is accurate for large g.
        dgate.push(d * u * (s + g * s * sigmoid(-g)));
        dup.push(d * g * s);
    }
    (dgate, dup)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let mut gate = varied(20, 1);
        gate.extend([-9.0, -1.2784645, 0.0, 6.0]);
        let (up, dout) = (varied(gate.len(), 2), varied(gate.len(), 3));
        let (dgate, dup) = backward(&dout, &gate, &up);
        check("dgate", &gate, &dgate, |gate| dot(&forward(gate, &up), &dout));
        check("dup", &up, &dup, |up| dot(&forward(&gate, up), &dout));
    }
}
