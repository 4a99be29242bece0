//! The GEMMs that can fall back to BF16 individually, and the quantizations that count for each.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use deepwell_ir::{Call, Graph, Program, Tensor, ValueId, quantizable_weights};
use deepwell_kernels::decode_statistics;
use deepwell_precision::{ElementFormat, QuantFormat, QuantStats};

/// The fprop, dgrad and wgrad GEMMs of a weight: the unit that guards judge and move to BF16. A
/// stack of experts is one weight. No call computes GEMMs of two weights, and no two weights need
/// the same format, so each weight can fall back alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Name of the weight.
    pub weight: String,
    /// Transformer layer.
    pub layer: Option<u32>,
    /// Elements of the weight.
    pub elements: u64,
}

/// Statistics of an operand.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandStats {
    /// The GEMMs that read the operand, as indices into [`Engine::gemms`](crate::Engine::gemms),
    /// ascending.
    pub gemms: Arc<[usize]>,
    /// Format of the elements, on which the limits of guards depend.
    pub element: ElementFormat,
    /// Whether the format has a tensor scale, for which guards have other limits.
    pub has_tensor_scale: bool,
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
    /// Quantization format.
    pub(super) format: QuantFormat,
}

impl Counters {
    pub(super) fn decode(&self, words: &[u64]) -> OperandStats {
        OperandStats {
            gemms: Arc::clone(&self.gemms),
            element: self.format.element,
            has_tensor_scale: !self.format.is_mx(),
            stats: decode_statistics(words),
            is_transformed: self.format.hadamard.is_some(),
        }
    }
}

/// The counters of one body.
pub(super) type Statistics = Arc<[Counters]>;

/// Returns the GEMMs of all weights of the whole model that a policy can quantize.
pub(super) fn gemms_of(graph: &Graph) -> Vec<Gemm> {
    let of = |(id, layer)| {
        let Tensor { name, shape, .. } = graph.tensor(id);
        let elements = shape.as_fixed().unwrap_or_default().into_iter().product::<usize>();
        Gemm { weight: name.clone(), layer, elements: elements as u64 }
    };
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
            (!gemms.is_empty()).then_some(())?;
            Some(Counters {
                id: quantization.statistics()?,
                gemms: gemms.into_iter().collect(),
                format: quantization.quantize.format,
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
}
