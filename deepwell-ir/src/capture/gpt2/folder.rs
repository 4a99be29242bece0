//! The weight files of GPT-2 models.

use crate::capture::folder::{HEAD, Matching};
use crate::capture::{CaptureError, Gpt2Config, StoredElement};

/// Prefix that `save_pretrained` adds to names; the originally published files lack the prefix.
const PREFIX: &str = "transformer.";

impl Gpt2Config {
    /// Takes each tensor once from the files that [`Gpt2Config::parameters_and_parts`] extracts
    /// parameters from.
    pub(in crate::capture) fn take_tensors(
        &self,
        files: &mut Matching<'_>,
    ) -> Result<(), CaptureError> {
        let prefixed = files.names().any(|name| name.starts_with(PREFIX));
        for (_, part) in self.parameters_and_parts() {
            let plain = !prefixed || part.name == HEAD;
            let expected = if plain { part.name.clone() } else { format!("{PREFIX}{}", part.name) };
            if files.is_taken(files.stored_names.get(&part.name).unwrap_or(&expected)) {
                continue;
            }
            let is_table = self.tie_word_embeddings && part.name == "wte.weight";
            let is_head = is_table && !files.has(&expected) && files.has(HEAD);
            let name = if is_head { HEAD } else { expected.as_str() };
            files.take(&part.name, name, &part.shape, StoredElement::Float)?;
        }
        let mut masks = 0;
        for stored in files.take_rest() {
            let name = stored.name.as_str();
            if self.tie_word_embeddings && name == HEAD {
                stored.check(&[self.vocab_size, self.hidden_size], StoredElement::Float)?;
                files.note_tied_head();
            } else if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") {
                masks += 1;
            } else {
                return Err(stored.unexpected());
            }
        }
        if masks > 0 {
            files
                .remarks
                .push(format!("{masks} stored attention masks are ignored: they are fixed"));
        }
        Ok(())
    }
}
