//! The weight files of llama models and of similar families.

use super::{LlamaConfig, ModelFamily};
use crate::capture::folder::{HEAD, Matching};
use crate::capture::{CaptureError, StoredElement};

/// Prefix that `save_pretrained` adds to all tensors but the head; a base model is saved without
/// the prefix.
const PREFIX: &str = "model.";

impl LlamaConfig {
    /// Takes the tensors of [`LlamaConfig::stored_tensors`] from the files.
    ///
    /// As in transformers, files of a base model omit the `model.` prefix, and a tied token table
    /// may be stored as `lm_head.weight` only.
    pub(in crate::capture) fn take_tensors(
        &self,
        files: &mut Matching<'_>,
    ) -> Result<(), CaptureError> {
        let is_base = !files.names().any(|name| name.starts_with(PREFIX));
        for spec in &self.stored_tensors() {
            let bare = spec.name.strip_prefix(PREFIX).filter(|_| is_base);
            let is_table = spec.name == "model.embed_tokens.weight";
            let head = (self.tie_word_embeddings && is_table).then_some(HEAD);
            let names = [Some(spec.name.as_str()), bare, head];
            let name = names.into_iter().flatten().find(|name| files.has(name));
            let name = name.unwrap_or(&spec.name);
            files.take(&spec.name, name, &spec.shape, spec.element)?;
        }
        let mut further = 0;
        for stored in files.take_rest() {
            let name = stored.name.as_str();
            if self.family == ModelFamily::DeepseekV3 && layer_of(name) >= self.num_layers {
                further += 1;
            } else if self.tie_word_embeddings && name == HEAD {
                stored.check(&[self.vocab_size, self.hidden_size], StoredElement::Float)?;
                files.note_tied_head();
            } else if name.ends_with("rotary_emb.inv_freq") {
                files.remarks.push(format!(
                    "`{name}` is a stored buffer, not a weight: it is computed from the config"
                ));
            } else {
                return Err(stored.unexpected());
            }
        }
        if further > 0 {
            files.remarks.push(format!(
                "{further} tensors of layers that predict further tokens are ignored"
            ));
        }
        Ok(())
    }
}

/// Layer index in a tensor's name; 0 without one.
fn layer_of(name: &str) -> usize {
    let rest = name.strip_prefix("model.layers.").unwrap_or_default();
    rest.split('.').next().and_then(|layer| layer.parse().ok()).unwrap_or(0)
}
