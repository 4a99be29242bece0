//! What a tensor of a model file is for, by its name.

use deepwell_precision::Role;

/// The role that the name of a tensor says it has. Names as Hugging Face models have them.
pub(super) fn role_of(name: &str, dimensions: usize) -> Role {
    let parts: Vec<&str> = name.split('.').collect();
    let has = |words: &[&str]| parts.iter().any(|part| words.contains(part));
    let contains = |word: &str| parts.iter().any(|part| part.contains(word));
    if dimensions < 2 || contains("norm") || has(&["ln_1", "ln_2", "ln_f"]) {
        Role::Norm
    } else if contains("embed") || has(&["wte", "wpe"]) {
        Role::Embedding
    } else if has(&["lm_head", "output"]) && parts.len() <= 3 {
        Role::Head
    } else if has(&["router"]) || parts.iter().rev().nth(1) == Some(&"gate") {
        Role::Router
    } else if has(&["experts", "shared_experts", "shared_expert"]) {
        Role::Expert
    } else {
        Role::Linear
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles() {
        for (name, dimensions, expected) in [
            ("model.embed_tokens.weight", 2, Role::Embedding),
            ("transformer.wte.weight", 2, Role::Embedding),
            ("lm_head.weight", 2, Role::Head),
            ("model.layers.0.self_attn.q_proj.weight", 2, Role::Linear),
            ("model.layers.0.self_attn.q_proj.bias", 1, Role::Norm),
            ("model.layers.0.self_attn.q_norm.weight", 1, Role::Norm),
            ("model.layers.0.mlp.gate_proj.weight", 2, Role::Linear),
            ("model.layers.0.mlp.gate.weight", 2, Role::Router),
            ("model.layers.0.mlp.router.weight", 2, Role::Router),
            ("model.layers.0.block_sparse_moe.gate.weight", 2, Role::Router),
            ("model.layers.0.block_sparse_moe.experts.3.w1.weight", 2, Role::Expert),
            ("model.layers.0.mlp.experts.gate_up_proj", 3, Role::Expert),
            ("model.layers.0.attention.output.dense.weight", 2, Role::Linear),
            ("transformer.h.0.ln_1.weight", 1, Role::Norm),
            ("transformer.h.0.mlp.c_fc.weight", 2, Role::Linear),
        ] {
            assert_eq!(role_of(name, dimensions), expected, "{name}");
        }
    }
}
