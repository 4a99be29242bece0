//! Builds the forward graph of a GPT-2 model.

use crate::capture::blocks::Blocks;
use crate::capture::{CaptureError, Gpt2Config, ParameterRole as R};
use crate::ops;
use crate::{Graph, Tag, TensorId};

/// Captures the forward pass of a GPT-2 model as a [`Graph`] with symbolic batch and sequence
/// sizes, with the inputs and the loss of [`capture`](crate::capture::capture).
///
/// Parameters have the order and the names of [`Gpt2Config::parameters`]. A sequence longer than
/// `n_positions` is rejected when the program is prepared.
///
/// # Errors
/// A configuration that does not pass [`Gpt2Config::check`].
pub fn capture_gpt2(config: &Gpt2Config) -> Result<Graph, CaptureError> {
    config.check("configuration")?;
    let mut model = Blocks::new("gpt2", config.parameters());
    model.graph.scope(Tag::Embed, None);
    let table = model.parameter(R::TokenEmbedding, None);
    let x = model.op("wte", ops::Embedding::default(), &[model.tokens, table])?;
    let positions = model.parameter(R::PositionEmbedding, None);
    let mut x = model.op("wpe", ops::AddPositions {}, &[x, positions])?;
    for layer in 0..config.num_layers as u32 {
        x = attention_block(&mut model, config, layer, x)?;
        x = mlp_block(&mut model, config, layer, x)?;
    }
    let x = norm(&mut model, config, "ln_f", [R::FinalNorm, R::FinalNormBias], None, x)?;
    model.finish(config.tie_word_embeddings, x)
}

fn norm(
    model: &mut Blocks,
    config: &Gpt2Config,
    name: &str,
    [gain, bias]: [R; 2],
    layer: Option<u32>,
    x: TensorId,
) -> Result<TensorId, CaptureError> {
    model.graph.scope(Tag::Norm, layer);
    let inputs = [x, model.parameter(gain, layer), model.parameter(bias, layer)];
    model.op(name, ops::LayerNorm { eps: config.layer_norm_eps }, &inputs)
}

fn attention_block(
    model: &mut Blocks,
    config: &Gpt2Config,
    layer: u32,
    x: TensorId,
) -> Result<TensorId, CaptureError> {
    let at = |name: &str| format!("h.{layer}.{name}");
    let roles = [R::AttentionNorm, R::AttentionNormBias];
    let y = norm(model, config, &at("ln_1"), roles, Some(layer), x)?;
    model.graph.scope(Tag::Attn, Some(layer));
    let q = model.linear(&at("attn.q"), R::Query, R::QueryBias, layer, y)?;
    let k = model.linear(&at("attn.k"), R::Key, R::KeyBias, layer, y)?;
    let v = model.linear(&at("attn.v"), R::Value, R::ValueBias, layer, y)?;
    let head_dim = config.hidden_size / config.num_heads;
    let heads = ops::AttentionHeads {
        heads: config.num_heads,
        kv_heads: config.num_heads,
        head_dim,
        scale: if config.scale_attention { 1.0 / (head_dim as f64).sqrt() } else { 1.0 },
        causal: true,
        ..ops::AttentionHeads::default()
    };
    let o = model.op(&at("attn.attention"), ops::Attention { heads }, &[q, k, v])?;
    let (role, bias_role) = (R::AttentionOutput, R::AttentionOutputBias);
    let o = model.linear(&at("attn.c_proj"), role, bias_role, layer, o)?;
    model.op(&at("attn.residual"), ops::Add {}, &[x, o])
}

fn mlp_block(
    model: &mut Blocks,
    config: &Gpt2Config,
    layer: u32,
    x: TensorId,
) -> Result<TensorId, CaptureError> {
    let at = |name: &str| format!("h.{layer}.{name}");
    let y = norm(model, config, &at("ln_2"), [R::MlpNorm, R::MlpNormBias], Some(layer), x)?;
    model.graph.scope(Tag::Mlp, Some(layer));
    let y = model.linear(&at("mlp.c_fc"), R::Up, R::UpBias, layer, y)?;
    let y = model.op(&at("mlp.gelu"), ops::Gelu { tanh: config.gelu_tanh }, &[y])?;
    let y = model.linear(&at("mlp.c_proj"), R::Down, R::DownBias, layer, y)?;
    model.op(&at("mlp.residual"), ops::Add {}, &[x, y])
}
