//! Memory of a rank under PyTorch's FSDP without `torch.compile`.

use super::{AttentionKernel, MIB, MemoryRules, StageLayers, StageMemory, layer_activation_bytes};
use crate::{ActivationRecompute, ModelShape, Strategy};

/// Bytes allocated by PyTorch on each rank: FP32 parameters, gradients and two moments sharded over
/// all ranks, BF16 parameters and gradients of whole layers while in use.
///
/// The peak is the larger of two: the loss, with logits and their gradient in addition to the saved
/// tensors of all layers; and the backward pass of a layer, with gradients of its feed-forward
/// part, and with all saved tensors of the layer if recomputed.
pub fn fsdp_memory(
    shape: &ModelShape,
    at: &Strategy,
    seq: usize,
    attention: AttentionKernel,
) -> StageMemory {
    let rules = MemoryRules { attention, ..MemoryRules::lean() };
    let ranks = (at.dp * at.cp) as f64;
    let all = shape.parameters();
    let share = if at.zero > 0 { all / ranks } else { all };
    // An FSDP unit is a layer; the root unit has the tables, and is not resharded between passes.
    let last = shape.layers.saturating_sub(1);
    let layers = [0, last].map(|layer| shape.layer_parameters(layer, 1, 1, 1));
    let unit = layers.iter().map(|layer| layer.dense + layer.routed).fold(0.0, f64::max);
    let tables = (shape.vocab * shape.hidden) as f64 * if shape.tied { 1.0 } else { 2.0 };
    // The unit in use and the next one, and equally large gradients before their reduction.
    let units = 2.0 * unit + tables;
    let gathered = if at.zero >= 3 { units } else { all };
    let tokens = (seq / at.cp * at.micro_batch) as f64;
    let hidden = tokens * shape.hidden as f64;
    let (dense, expert) = StageLayers::even(shape.layers, 0, 1, 1).kinds(shape);
    let kept = |at: &Strategy| {
        [0, last].map(|layer| layer_activation_bytes(shape, at, &rules, seq, layer))
    };
    let [dense_bytes, expert_bytes] = kept(at);
    // Also saved: outputs of the embedding and of the last norm.
    let saved = dense as f64 * dense_bytes + expert as f64 * expert_bytes + 4.0 * hidden;
    let ffn = shape.experts.map_or(shape.ffn, |experts| experts.ffn * experts.top_k).max(shape.ffn);
    let mut backward = 2.0 * tokens * ffn as f64 * (shape.gate_factor() + 1.0) + 2.0 * hidden;
    if at.recompute == ActivationRecompute::Full {
        let whole = Strategy { recompute: ActivationRecompute::None, ..*at };
        backward += kept(&whole).into_iter().fold(0.0, f64::max);
    }
    // BF16 logits. A single loss kernel reads the logits and writes the gradient. The caller keeps
    // the logits until the next micro-batch.
    let logits = 2.0 * tokens * shape.vocab as f64;
    let (activations, logits) = match backward > logits {
        true => (saved + backward, logits),
        false => (saved, 2.0 * logits),
    };
    StageMemory {
        parameters: 4.0 * share,
        gradients: 4.0 * share,
        optimizer: 8.0 * share,
        activations,
        logits,
        workspace: 2.0 * (gathered + units) + 64.0 * MIB,
        ..StageMemory::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPT without biases, computed by hand.
    #[test]
    fn bytes_are_those_counted_by_hand() {
        let shape = ModelShape {
            bias: false,
            norm_vectors: 1,
            positions: 0,
            ..ModelShape::gpt(24, 2048, 16, 50368, 2048)
        };
        let at = Strategy { dp: 8, zero: 3, micro_batch: 4, ..Strategy::SINGLE };
        let check = |at: Strategy, expected: [f64; 4]| {
            let memory = fsdp_memory(&shape, &at, 2048, AttentionKernel::FusedWithCopy);
            let found = [
                memory.parameters,
                memory.activations,
                memory.logits,
                memory.workspace - 64.0 * MIB,
            ];
            assert_eq!(found, expected, "{at}");
        };
        let (hidden, tokens) = (2048.0, 8192.0);
        let unit = 12.0 * hidden * hidden + 2.0 * hidden;
        let table = 50368.0 * hidden;
        let all = 24.0 * unit + table + hidden;
        // 17 tensors of the hidden size, and the statistics of 16 heads.
        let layer = tokens * (34.0 * hidden + 4.0 * 16.0);
        let ends = 4.0 * hidden * tokens;
        let vocab = tokens * 50368.0;
        let units = 4.0 * (2.0 * unit + table);
        check(at, [4.0 * all / 8.0, 24.0 * layer + ends, 4.0 * vocab, units]);
        // Parameters stay whole in BF16.
        let zero_2 = 2.0 * (all + 2.0 * unit + table);
        let shard = Strategy { zero: 2, ..at };
        check(shard, [4.0 * all / 8.0, 24.0 * layer + ends, 4.0 * vocab, zero_2]);
        // Inputs of layers; the recomputed layer outweighs the gradient of logits.
        let again = Strategy { recompute: ActivationRecompute::Full, ..at };
        let inputs = 24.0 * 2.0 * hidden * tokens + ends;
        let backward = layer + 18.0 * hidden * tokens;
        check(again, [4.0 * all / 8.0, inputs + backward, 2.0 * vocab, units]);
    }
}
