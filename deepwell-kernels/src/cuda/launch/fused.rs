//! What kernels quantize of the outputs of an op in one go with it, as far as the op alone says:
//! fusions are made before anything has a shape.

use deepwell_ir::Op;
use deepwell_ir::ops::WithQuantize;
use deepwell_precision::ElementFormat;

/// The outputs of a producer that its kernels quantize.
fn quantizable(producer: &Op) -> &'static [usize] {
    match producer {
        Op::RmsNorm(_) | Op::LayerNorm(_) => &[0],
        // The first is the sum before the normalization, which no product reads.
        Op::AddRmsNorm(_) | Op::AddLayerNorm(_) => &[1],
        Op::SwiGlu(_) | Op::Gelu(_) | Op::GeluBackward(_) => &[0],
        Op::SwiGluBackward(_) => &[0, 1],
        Op::Linear(_) | Op::LinearInputGrad(_) | Op::MxGemm(_) => &[0],
        // What the activation gives.
        Op::WithActivation(op) => match op.keep {
            true => &[1],
            false => &[0],
        },
        _ => &[],
    }
}

/// Why no kernel makes these quantizations, whatever the operands are.
pub(crate) fn reject(op: &WithQuantize) -> Option<String> {
    let name = op.producer.name();
    let known = quantizable(&op.producer);
    if op.quantized.is_empty() {
        return Some(format!("quantizes an output of `{name}`, not none"));
    }
    for (index, entry) in op.quantized.iter().enumerate() {
        let output = entry.output;
        if !known.contains(&output) {
            return Some(format!("quantizes outputs {known:?} of `{name}`, not {output}"));
        }
        if op.quantized[..index].iter().any(|earlier| earlier.output == output) {
            return Some(format!("quantizes output {output} of `{name}` in one way, not in more"));
        }
        if entry.quantize.spec.element != ElementFormat::E4M3 {
            return Some(format!("quantizes to e4m3, not {}", entry.quantize.spec.element));
        }
    }
    let axis = op.quantized[0].quantize.axis;
    let all = op.quantized.len() == known.len();
    if !all || op.quantized.iter().any(|entry| entry.quantize.axis != axis) {
        return Some(format!("quantizes outputs {known:?} of `{name}` together, along one axis"));
    }
    None
}
