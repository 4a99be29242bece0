//! Folders of GPT-2 models.

use std::collections::BTreeMap;
use std::path::Path;

use crate::capture::folder::{HEAD, find_tensors, missing_tensor, note_dtypes, unexpected_tensor};
use crate::capture::{CaptureError, Gpt2Config, ModelFolder, StoredTensor};

/// Prefix that `save_pretrained` adds to names; the originally published files lack the prefix.
const PREFIX: &str = "transformer.";

impl ModelFolder<Gpt2Config> {
    /// Opens a folder of a GPT-2 model, like [`ModelFolder::open`] for the llama family.
    ///
    /// [`ModelFolder::tensors`] lists each tensor once that [`Gpt2Config::parameters_and_parts`]
    /// extracts parameters from.
    ///
    /// # Errors
    /// As [`ModelFolder::open`].
    pub fn open_gpt2(path: impl AsRef<Path>) -> Result<Self, CaptureError> {
        let folder = path.as_ref().to_path_buf();
        let (config, mut notes) = Gpt2Config::from_path(&folder)?;
        let mut stored_tensors = find_tensors(&folder, &mut notes)?;
        let prefixed = stored_tensors.keys().any(|name| name.starts_with(PREFIX));
        let mut tensors: Vec<StoredTensor> = Vec::new();
        let mut stored_names = BTreeMap::new();
        for (_, part) in config.parameters_and_parts() {
            let plain = !prefixed || part.name == HEAD;
            let expected = if plain { part.name.clone() } else { format!("{PREFIX}{}", part.name) };
            let seen = stored_names.get(&part.name).unwrap_or(&expected);
            if tensors.iter().any(|tensor| tensor.name == *seen) {
                continue;
            }
            let is_table = config.tie_word_embeddings && part.name == "wte.weight";
            let is_head = is_table && !stored_tensors.contains_key(&expected);
            let name = if is_head { HEAD } else { expected.as_str() };
            let Some(stored) = stored_tensors.remove(name) else {
                let is_tied = config.tie_word_embeddings;
                return Err(missing_tensor(
                    &folder,
                    &expected,
                    &part.shape,
                    &stored_tensors,
                    is_tied,
                ));
            };
            tensors.push(stored.check(name, &part.shape)?);
            if name != part.name {
                stored_names.insert(part.name, name.to_string());
            }
        }
        let mut masks = 0;
        for (name, stored) in stored_tensors {
            if config.tie_word_embeddings && name == HEAD {
                stored.check(&name, &[config.vocab_size, config.hidden_size])?;
                notes.remarks.push(
                    "`lm_head.weight` is stored but tied: the token table is used for it"
                        .to_string(),
                );
            } else if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") {
                masks += 1;
            } else {
                return Err(unexpected_tensor(name, stored.path));
            }
        }
        if masks > 0 {
            notes
                .remarks
                .push(format!("{masks} stored attention masks are ignored: they are fixed"));
        }
        note_dtypes(config.torch_dtype, &tensors, &mut notes);
        Ok(ModelFolder { path: folder, config, notes, tensors, stored_names })
    }
}
