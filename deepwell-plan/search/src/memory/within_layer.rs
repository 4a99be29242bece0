//! Memory within the backward pass of a layer.

use super::{MemoryRules, RecomputedModules, StageLayers, layer_activation_bytes};
use crate::model_shape::ExpertShape;
use crate::{ActivationRecompute, ModelShape, Strategy};

/// Bytes that live only within the backward pass of a stage's largest layer: gradients of the
/// feed-forward part and of the hidden states, and all saved tensors of a layer that is recomputed.
pub(super) fn within_layer_bytes(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    seq: usize,
    layers: &StageLayers,
) -> f64 {
    let tokens = (seq / at.cp * at.micro_batch) as f64;
    let whole = Strategy { recompute: ActivationRecompute::None, ..*at };
    let of_layer = |layer: usize| {
        let hidden = tokens * shape.hidden as f64;
        let factor = shape.gate_factor() + 1.0;
        let gradients = match shape.experts.filter(|_| shape.has_experts(layer)) {
            None => tokens * shape.ffn as f64 / at.tp as f64 * factor,
            Some(experts) => {
                let rows = expert_rows(&experts, at, rules, tokens);
                let routed = rows * experts.ffn as f64 / at.etp as f64;
                let shared = tokens * experts.shared_ffn as f64 / at.tp as f64;
                // Rows that Deepwell does not save: outputs and their gradients.
                let moved = rules.expert_operand_bytes.map_or(0.0, |_| 2.0 * shape.hidden as f64);
                (routed + shared) * factor + rows * moved
            }
        };
        let gradients = gradients + hidden;
        let again = match at.recompute {
            ActivationRecompute::Full => layer_activation_bytes(shape, &whole, rules, seq, layer),
            _ => 0.0,
        };
        2.0 * gradients + again
    };
    let (dense, expert) = layers.kinds(shape);
    let ends = [(dense, 0), (expert, shape.layers.saturating_sub(1))];
    let there = ends.into_iter().filter(|(count, _)| *count > 0);
    there.map(|(_, layer)| of_layer(layer)).fold(0.0, f64::max)
}

/// Rows of the experts' buffers on a rank.
pub(super) fn expert_rows(
    of: &ExpertShape,
    at: &Strategy,
    rules: &MemoryRules,
    tokens: f64,
) -> f64 {
    let room = |factor| of.room_over_mean(factor, at.ep);
    let over_mean = rules.capacity_factor.map_or(rules.expert_imbalance, room);
    tokens * of.top_k as f64 * at.etp as f64 / at.tp as f64 * over_mean
}

/// Bytes saved for a row of the experts' buffers.
pub(super) fn expert_row_bytes(
    shape: &ModelShape,
    of: &ExpertShape,
    at: &Strategy,
    rules: &MemoryRules,
    again: RecomputedModules,
) -> f64 {
    let (hidden, ffn) = (shape.hidden as f64, of.ffn as f64 / at.etp as f64);
    let acts = if again.expert_activation { 0.0 } else { 1.0 };
    match rules.expert_operand_bytes {
        Some(bytes) => bytes * (hidden + acts * ffn) + 2.0 * shape.gate_factor() * ffn,
        // Permuted inputs and outputs; the output of the first GEMM, of the activation, and of the
        // multiplication by the router's weight.
        None => 4.0 * hidden + 2.0 * (shape.gate_factor() + 2.0 * acts) * ffn,
    }
}

#[cfg(test)]
mod tests {
    use super::super::stage_memory_estimate;
    use super::*;

    /// A layer that is recomputed holds all of its tensors for a while. Public runs with full
    /// recomputation that ran out of memory were predicted to fit.
    #[test]
    fn a_recomputed_layer_is_counted() {
        let shape = ModelShape::gpt(8, 1024, 16, 51200, 2048);
        let rules = MemoryRules::megatron();
        let at = Strategy { micro_batch: 4, pp: 2, micro_batches: 2, ..Strategy::SINGLE };
        let full = Strategy { recompute: ActivationRecompute::Full, ..at };
        let of = |at: &Strategy, stage| stage_memory_estimate(&shape, at, &rules, 2048, stage);
        let layer = |at: &Strategy| layer_activation_bytes(&shape, at, &rules, 2048, 0);
        let hidden = 4.0 * 2048.0 * 1024.0;
        // Gradients of 4 hidden sizes before and after the activation, and of the hidden states.
        let gradients = 2.0 * (2.0 * 4.0 + 1.0) * hidden;
        let check = |at: &Strategy, within: f64| {
            // Two micro-batches of four layers, and the embedding's dropout mask.
            let saved = 8.0 * layer(at) + hidden;
            assert_eq!(of(at, 0).activations, saved + within, "{at}");
        };
        check(&at, gradients);
        check(&full, gradients + layer(&at));
        // On the last stage the logits are larger, and gone before a layer's backward pass.
        let last = of(&at, 1);
        assert!(last.logits > gradients, "{last:?}");
        assert_eq!(last.activations, 4.0 * layer(&at) + 4.0 * hidden);
    }
}
