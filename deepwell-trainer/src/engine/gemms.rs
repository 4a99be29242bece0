//! The GEMMs that can fall back to BF16 individually, and the quantizations that count for each.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use deepwell_ir::{Call, Graph, Program, ValueId, quantizable_weights};
use deepwell_kernels::decode_statistics;
use deepwell_precision::{QuantStats, ScaleFormat};

/// The fprop, dgrad and wgrad GEMMs of a weight: the unit that guards judge and move to BF16. A
/// stack of experts is one weight. No call computes GEMMs of two weights, and no two weights need
/// the same format, so each weight can fall back alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Name of the weight.
    pub weight: String,
    /// Transformer layer.
    pub layer: Option<u32>,
}

/// Statistics of an operand.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandStats {
    /// The GEMMs that read the operand, as indices into [`Engine::gemms`](crate::Engine::gemms),
    /// ascending.
    pub gemms: Arc<[usize]>,
    /// Statistics of the operand's quantization.
    pub stats: QuantStats,
    /// Whether the quantized values are a Hadamard transform of the operand.
    pub is_transformed: bool,
}

/// The counters of a quantization, and the GEMMs that the counters belong to.
#[derive(Clone, Debug)]
pub(super) struct Counters {
    pub(super) id: ValueId,
    /// GEMMs that read the operand.
    pub(super) gemms: Arc<[usize]>,
    /// Whether the format clips the largest elements of blocks by design: NVFP4 rounds its scales
    /// to nearest, so that about half of them are too small. Guards ignore this clipping.
    pub(super) clips_by_design: bool,
    pub(super) is_transformed: bool,
}

impl Counters {
    pub(super) fn decode(&self, words: &[u64]) -> OperandStats {
        let counted = decode_statistics(words);
        let saturations = if self.clips_by_design { 0 } else { counted.saturations };
        let stats = QuantStats { saturations, ..counted };
        let is_transformed = self.is_transformed;
        OperandStats { gemms: Arc::clone(&self.gemms), stats, is_transformed }
    }
}

/// The counters of one body.
pub(super) type Statistics = Arc<[Counters]>;

/// Returns the GEMMs of all weights of the whole model that a policy can quantize.
pub(super) fn gemms_of(graph: &Graph) -> Vec<Gemm> {
    let of = |(id, layer)| Gemm { weight: graph.tensor(id).name.clone(), layer };
    quantizable_weights(graph).into_iter().map(of).collect()
}

/// Returns the counters of the quantizations in each body, with the GEMMs that read the operand:
/// these GEMMs fall back if the statistics are bad. Counters of an activation with several GEMMs
/// count for all of them. A quantization that no GEMM of a weight in the program reads is not
/// counted.
pub(super) fn statistics_of(program: &Program, gemms: &[Gemm]) -> Vec<Statistics> {
    let index_of: HashMap<&str, usize> =
        (0..).zip(gemms).map(|(index, gemm)| (&*gemm.weight, index)).collect();
    let readers = program.weights_by_operand();
    let gemms_of = |id: &ValueId| -> Vec<usize> {
        let weights = readers.get(id).into_iter().flatten();
        weights
            .filter_map(|&weight| index_of.get(&*program.parameters[weight].name).copied())
            .collect()
    };
    let of_call = |call: &Call| -> Vec<Counters> {
        let of = |quantization: deepwell_ir::Quantization<'_>| {
            let planes = quantization.quantized_operands().iter();
            let gemms: BTreeSet<usize> = planes.flat_map(|plane| gemms_of(&plane.value)).collect();
            let scale = quantization.quantize.format.scale;
            (!gemms.is_empty()).then_some(())?;
            Some(Counters {
                id: quantization.statistics()?,
                gemms: gemms.into_iter().collect(),
                clips_by_design: matches!(scale, ScaleFormat::Ue4m3(_)),
                is_transformed: quantization.quantize.format.hadamard.is_some(),
            })
        };
        call.quantizations().into_iter().filter_map(of).collect()
    };
    program
        .bodies
        .iter()
        .map(|body| {
            let calls = program.calls[body.calls.clone()].iter().filter(|call| !call.alone_only);
            calls.flat_map(of_call).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::{LlamaConfig, capture};

    use super::*;

    #[test]
    fn a_stack_of_experts_is_one_weight() {
        let text = r#"{
            "model_type": "mixtral", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
            "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128
        }"#;
        let graph = capture(&LlamaConfig::from_json(text, "config.json").unwrap().0).unwrap();
        let gemms = gemms_of(&graph);
        // Four projections and three stacks of experts; no router, norm, embedding or head.
        let of_second: Vec<&str> = gemms
            .iter()
            .filter(|gemm| gemm.layer == Some(1))
            .map(|gemm| gemm.weight.strip_prefix("model.layers.1.").unwrap())
            .collect();
        let attention = ["q", "k", "v", "o"].map(|it| format!("self_attn.{it}_proj.weight"));
        let experts = [1, 3, 2].map(|it| format!("block_sparse_moe.experts.w{it}.weight"));
        assert_eq!(of_second, [&attention[..], &experts].concat());
        assert_eq!(gemms.len(), 3 * of_second.len());
    }

    /// Saturations by design of the format cause no fallback; all other statistics count.
    #[test]
    fn guards_do_not_see_what_a_format_clips_by_design() {
        // Largest magnitude, elements, underflows, saturations, scale clamps, non-finite values.
        let words = [u64::from(2f32.to_bits()), 1000, 3, 40, 5, 6];
        for (clips_by_design, saturations) in [(true, 0), (false, 40)] {
            let gemms = Arc::from([3, 7]);
            let (id, is_transformed) = (ValueId(0), false);
            let counters = Counters { id, gemms, clips_by_design, is_transformed };
            let OperandStats { gemms, stats, .. } = counters.decode(&words);
            assert_eq!((&gemms[..], stats.saturations), (&[3, 7][..], saturations));
            assert_eq!((stats.amax, stats.elements, stats.underflows), (2.0, 1000, 3));
            assert_eq!((stats.scale_clamps, stats.nonfinite), (5, 6));
        }
    }
}
