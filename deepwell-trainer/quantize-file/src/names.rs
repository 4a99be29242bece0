//! Role of a tensor of a model file, from its name and shape, if no configuration gives it.

use deepwell_ir::capture::StoredTensor;
use deepwell_precision::Role;

/// Components of names that are output heads at any position.
const HEADS: [&str; 6] =
    ["score", "classifier", "embed_out", "qa_outputs", "output_layer", "predictions"];

/// Reason why a tensor is kept under any policy: no GEMM reads it.
pub(super) fn kept(name: &str, shape: &[usize]) -> Option<&'static str> {
    let parts: Vec<&str> = name.split('.').collect();
    let last = parts.last().copied().unwrap_or_default();
    let any = |is: &dyn Fn(&str) -> bool| parts.iter().any(|part| is(part));
    if any(&is_rotary) {
        Some("a table of rotary embeddings, which no GEMM reads")
    } else if any(&is_mask) || last == "bias" && shape.len() > 2 {
        Some("a mask, which no GEMM reads")
    } else if shape.len() > 1 && (last == "bias" || last.ends_with("_bias")) {
        Some("a bias, which no GEMM reads")
    } else if shape.len() > 3 || shape.len() == 3 && any(&|part| part.contains("conv")) {
        Some("no weight of a linear layer")
    } else {
        None
    }
}

/// Properties of a model's tensors as a whole.
pub(super) struct Neighbours<'a> {
    names: Vec<&'a str>,
    /// Whether some tensors are of numbered layers.
    has_layers: bool,
    /// Shapes of the embedding tables.
    tables: Vec<&'a [usize]>,
}

impl<'a> Neighbours<'a> {
    pub(super) fn new(tensors: &[&'a StoredTensor]) -> Self {
        let tables = tensors.iter().filter(|tensor| is_table(&tensor.name, &tensor.shape));
        Self {
            names: tensors.iter().map(|tensor| tensor.name.as_str()).collect(),
            has_layers: tensors.iter().any(|tensor| has_layer(&tensor.name)),
            tables: tables.map(|tensor| tensor.shape.as_slice()).collect(),
        }
    }

    /// Returns the role of a tensor by its name and shape. Names follow Hugging Face models, with
    /// any prefix.
    pub(super) fn role_of(&self, name: &str, shape: &[usize]) -> Role {
        let parts: Vec<&str> = name.split('.').collect();
        let has = |words: &[&str]| parts.iter().any(|part| words.contains(part));
        let any = |is: &dyn Fn(&str) -> bool| parts.iter().any(|part| is(part));
        let is_outside = self.has_layers && !has_layer(name);
        if shape.len() < 2 || any(&is_norm) {
            Role::Norm
        } else if has(&["router", "wg"])
            || any(&|part| part.ends_with("expert_gate"))
            || self.is_router_gate(name, shape)
        {
            Role::Router
        } else if is_table(name, shape) {
            Role::Embedding
        } else if has(&HEADS)
            || any(&|part| part == "head" || part.ends_with("_head"))
            || has(&["output", "generator", "decoder"]) && parts.len() <= 3 && !has_layer(name)
            || !has_layer(name) && self.tables.contains(&shape)
            || is_outside
        {
            Role::Head
        } else if any(&|part| part.starts_with("experts") || part.starts_with("shared_expert")) {
            Role::Expert
        } else {
            Role::Linear
        }
    }

    /// Whether a module `gate` scores experts: the same block has experts, or the module has few
    /// outputs. In other models `gate` is a projection of the MLP.
    fn is_router_gate(&self, name: &str, shape: &[usize]) -> bool {
        let Some(block) = name.strip_suffix("gate.weight") else { return false };
        if !(block.is_empty() || block.ends_with('.')) {
            return false;
        }
        let experts = format!("{block}experts");
        let is_small = matches!(shape, [outputs, inputs] if outputs * 4 <= *inputs);
        is_small || self.names.iter().any(|name| name.starts_with(&experts))
    }
}

/// Whether a name contains a layer's number.
fn has_layer(name: &str) -> bool {
    name.split('.').any(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_rotary(part: &str) -> bool {
    part.starts_with("rotary")
        || matches!(part, "rope" | "freqs_cis" | "cos_cached" | "sin_cached")
        || part.ends_with("inv_freq")
}

fn is_mask(part: &str) -> bool {
    part == "mask" || part.ends_with("_mask") || matches!(part, "masked_bias" | "tril" | "triu")
}

fn is_norm(part: &str) -> bool {
    let is_numbered = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    part.contains("norm")
        || part.starts_with("ln_")
        || part.strip_prefix("ln").is_some_and(is_numbered)
}

/// Whether the tensor is a table of tokens, positions or types.
fn is_table(name: &str, shape: &[usize]) -> bool {
    shape.len() >= 2 && name.split('.').any(is_table_part)
}

fn is_table_part(part: &str) -> bool {
    part.contains("embed")
        || part.ends_with("_emb")
        || part.contains("position")
        || part.contains("attention_bias")
        || matches!(part, "wte" | "wpe")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize]) -> StoredTensor {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        crate::safetensors::test_tensor(name, shape)
    }

    #[test]
    fn roles() {
        let table = tensor("model.embed_tokens.weight", &[1000, 64]);
        let experts = tensor("model.layers.3.mlp.experts.0.up_proj.weight", &[96, 64]);
        let neighbours = Neighbours::new(&[&table, &experts]);
        let square = &[64, 64][..];
        for (name, shape, expected) in [
            ("model.embed_tokens.weight", &[1000, 64][..], Role::Embedding),
            ("transformer.wte.weight", square, Role::Embedding),
            ("wpe.weight", square, Role::Embedding),
            ("bert.embeddings.position_embeddings.weight", square, Role::Embedding),
            ("language_model.model.embed_tokens.weight", square, Role::Embedding),
            (
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                &[32, 8],
                Role::Embedding,
            ),
            ("lm_head.weight", square, Role::Head),
            ("language_model.lm_head.weight", square, Role::Head),
            ("score.weight", &[2, 64], Role::Head),
            ("classifier.weight", &[2, 64], Role::Head),
            ("classifier.out_proj.weight", square, Role::Head),
            ("output.weight", square, Role::Head),
            // As large as the token table, and outside of the layers.
            ("model.to_logits.weight", &[1000, 64], Role::Head),
            ("visual.projection.weight", square, Role::Head),
            ("model.layers.0.self_attn.q_proj.weight", square, Role::Linear),
            ("model.layers.0.self_attn.q_proj.bias", &[64], Role::Norm),
            ("model.layers.0.self_attn.q_norm.weight", &[64], Role::Norm),
            ("transformer.h.0.ln_1.weight", &[64], Role::Norm),
            ("blocks.0.ln2.weight", &[1, 64], Role::Norm),
            ("model.layers.0.mlp.gate_proj.weight", square, Role::Linear),
            ("model.layers.0.mlp.gate.weight", &[8, 64], Role::Router),
            ("model.layers.3.mlp.gate.weight", &[64, 64], Role::Router),
            ("model.layers.0.mlp.gate.weight", &[96, 64], Role::Linear),
            ("model.layers.0.mlp.gate.wg.weight", &[8, 64], Role::Router),
            ("model.layers.0.mlp.router.weight", &[8, 64], Role::Router),
            ("blocks.0.ffn.router.classifier.weight", &[8, 64], Role::Router),
            ("model.layers.0.mlp.shared_expert_gate.weight", &[1, 64], Role::Router),
            ("model.layers.0.block_sparse_moe.gate.weight", &[8, 64], Role::Router),
            ("model.layers.0.block_sparse_moe.experts.3.w1.weight", square, Role::Expert),
            ("model.layers.0.mlp.experts.gate_up_proj", &[4, 64, 64], Role::Expert),
            ("model.layers.0.mlp.shared_expert.up_proj.weight", square, Role::Expert),
            ("model.layers.0.attention.output.dense.weight", square, Role::Linear),
            ("transformer.h.0.mlp.c_fc.weight", square, Role::Linear),
        ] {
            assert_eq!(neighbours.role_of(name, shape), expected, "{name} {shape:?}");
            assert_eq!(kept(name, shape), None, "{name}");
        }
        // A file of single weights has no layers, so that no tensor is outside of them.
        let alone = tensor("up.weight", square);
        assert_eq!(Neighbours::new(&[&alone]).role_of("up.weight", square), Role::Linear);
    }

    #[test]
    fn tensors_that_no_gemm_reads() {
        for (name, shape, expected) in [
            ("h.0.attn.bias", &[1, 1, 32, 32][..], "a mask"),
            ("transformer.h.0.attn.masked_bias", &[], "a mask"),
            ("gpt_neox.layers.0.attention.masked_bias", &[1], "a mask"),
            ("decoder.causal_mask", &[64, 64], "a mask"),
            ("blocks.0.attn.tril", &[64, 64], "a mask"),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", &[32], "a table of rotary"),
            ("model.rotary_emb.cos_cached", &[1, 1, 64, 64], "a table of rotary"),
            ("model.layers.0.mlp.experts.gate_up_proj_bias", &[4, 64], "a bias"),
            ("model.layers.0.mlp.experts.bias", &[4, 64], "a bias"),
            ("model.layers.0.mixer.conv1d.weight", &[64, 1, 4], "no weight of a linear"),
            ("vision.patch.weight", &[64, 3, 14, 14], "no weight of a linear"),
        ] {
            let reason = kept(name, shape).unwrap_or_default();
            assert!(reason.starts_with(expected), "{name}: {reason}");
        }
    }
}
