//! The tokenizer of a model: the `tokenizer.json` in the folder of its `config.json`.

use std::path::{Path, PathBuf};

use super::ModelSource;
use crate::TrainError;
use crate::data::{Tokenizer, are_token_files};

/// Name of the byte-level tokenizer, in place of the path of a file.
pub const BYTES: &str = "bytes";

const FILE: &str = "tokenizer.json";
/// Vocabulary size of models that need no tokenizer: one token for each byte.
const BYTE_TOKENS: usize = 256;
/// File names of tokenizers in unsupported forms, with a name for the form.
const OTHER_FORMS: [(&str, &str); 9] = [
    ("tokenizer.model", "a SentencePiece model"),
    ("spiece.model", "a SentencePiece model"),
    ("sentencepiece.bpe.model", "a SentencePiece model"),
    ("vocab.json", "the vocabulary of a slow tokenizer"),
    ("merges.txt", "the merges of a slow tokenizer"),
    ("vocab.txt", "the vocabulary of a slow tokenizer"),
    ("tekken.json", "a tokenizer of mistral-common"),
    ("tokenizer.tiktoken", "a tokenizer of tiktoken"),
    ("tokenizer_config.json", "the settings of a tokenizer"),
];

/// Opens the tokenizer of a setting: bytes for none or [`BYTES`].
///
/// # Errors
/// The file is no tokenizer.
pub fn open_tokenizer(setting: Option<&Path>) -> Result<Tokenizer, TrainError> {
    match setting {
        Some(path) if path.as_os_str() != BYTES => Ok(Tokenizer::from_file(path)?),
        _ => Ok(Tokenizer::bytes()),
    }
}

/// The chosen tokenizer, with a note for the user.
#[derive(Clone)]
pub struct ChosenTokenizer {
    /// The tokenizer, opened.
    pub tokenizer: Tokenizer,
    /// The file, [`BYTES`] if requested, or none for bytes by default.
    pub file: Option<PathBuf>,
    /// A sentence for the user, if needed.
    pub note: Option<String>,
}

impl ChosenTokenizer {
    /// Bytes by default.
    fn bytes(note: Option<String>) -> ChosenTokenizer {
        ChosenTokenizer { tokenizer: Tokenizer::bytes(), file: None, note }
    }
}

impl ModelSource {
    /// A file of this name in the folder of the model's `config.json`.
    fn beside(&self, name: &str) -> Option<PathBuf> {
        Some(self.config_file()?.with_file_name(name))
    }

    /// The `tokenizer.json` in the folder of the model's `config.json`, if any.
    pub fn own_tokenizer(&self) -> Option<PathBuf> {
        // A broken link is included: opening it gives a clear error.
        self.beside(FILE).filter(|path| path.symlink_metadata().is_ok())
    }

    /// Whether a tokenizer named by the user is the model's own, or the model has none.
    pub fn fits_tokenizer(&self, named: Option<&Path>) -> bool {
        let (Some(own), Some(named)) = (self.own_tokenizer(), named) else { return true };
        if own == named {
            return true;
        }
        match (std::fs::read(&own), std::fs::read(named)) {
            (Ok(own), Ok(named)) => own == named,
            _ => false,
        }
    }

    /// A tokenizer in the folder of the model's `config.json` in an unsupported form.
    fn other_form(&self) -> Option<(PathBuf, &'static str)> {
        let found = OTHER_FORMS.iter().find_map(|(name, form)| {
            self.beside(name).filter(|path| path.exists()).map(|path| (path, *form))
        });
        found.or_else(|| {
            let folder = self.config_file()?.parent()?.to_path_buf();
            let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
            let files = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
            let mut files =
                files.filter(|path| path.extension().is_some_and(|it| it == "tiktoken"));
            Some((files.next()?, "a tokenizer of tiktoken"))
        })
    }

    /// Chooses the tokenizer of texts for this model: the named one, otherwise the model's own. A
    /// model without a tokenizer reads bytes if it has fresh weights or 256 tokens.
    ///
    /// `inputs` are the data: token files need no tokenizer.
    ///
    /// # Errors
    /// No `tokenizer.json` for a model whose weights have another vocabulary than bytes, a
    /// tokenizer in an unsupported form, or a file that is no tokenizer.
    pub fn choose_tokenizer(
        &self,
        named: Option<&Path>,
        inputs: &[PathBuf],
    ) -> Result<ChosenTokenizer, TrainError> {
        if let Some(named) = named {
            let (tokenizer, note) = (open_tokenizer(Some(named))?, self.note_on_named(named));
            return Ok(ChosenTokenizer { tokenizer, file: Some(named.to_path_buf()), note });
        }
        if let Some(model_file) = self.own_tokenizer() {
            return match Tokenizer::from_file(&model_file) {
                Ok(tokenizer) => {
                    Ok(ChosenTokenizer { tokenizer, file: Some(model_file), note: None })
                }
                Err(_) if are_token_files(inputs) => Ok(ChosenTokenizer::bytes(None)),
                Err(error) => Err(error.into()),
            };
        }
        let has_weights = self.has_weights();
        let knows_bytes = !has_weights || self.vocab_size() == BYTE_TOKENS;
        let other = self.other_form();
        if (other.is_none() && knows_bytes) || are_token_files(inputs) {
            let note = (has_weights && !are_token_files(inputs)).then(|| {
                format!("`{}` has no {FILE} and 256 tokens: bytes are its tokens", self.name())
            });
            return Ok(ChosenTokenizer::bytes(note));
        }
        if other.is_none() && self.exported().is_some() {
            // An archive has no place for a tokenizer.
            let note = format!(
                "bytes are the tokens, though `{}` has {} others: `--tokenizer FILE` names those",
                self.name(),
                self.vocab_size()
            );
            return Ok(ChosenTokenizer::bytes(Some(note)));
        }
        let (got, convert) = match &other {
            Some((path, form)) => (
                format!("`{}`, {form}", path.display()),
                "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers writes \
                 it; ",
            ),
            None => ("none".to_string(), ""),
        };
        Err(TrainError::Setting {
            setting: "tokenizer",
            expected: format!(
                "a {FILE} beside the config.json of `{}`, whose vocabulary has {} tokens",
                self.name(),
                self.vocab_size()
            ),
            got,
            hint: Some(format!(
                "{convert}`--tokenizer FILE` names one elsewhere, `--tokenizer {BYTES}` takes bytes"
            )),
        })
    }

    /// Returns a note if the tokenizer has more tokens than the token table has rows.
    ///
    /// All commands follow one rule: a tokenizer may have more tokens than the model has rows, for
    /// example with an added padding token that is never used. A token without a row is an error
    /// where it occurs: in data, in a prompt.
    pub fn note_on_vocabulary(&self, tokens: u64) -> Option<String> {
        let rows = self.vocab_size() as u64;
        (tokens > rows).then(|| {
            format!(
                "the tokenizer has {tokens} tokens, the model rows for {rows}: a text with one of \
                 the others is refused"
            )
        })
    }

    /// Returns a note if the model has its own tokenizer and another one is named.
    fn note_on_named(&self, named: &Path) -> Option<String> {
        let own = self.own_tokenizer();
        if named.as_os_str() == BYTES {
            let knows_others = own.is_some() || self.has_weights();
            return (knows_others && self.vocab_size() != BYTE_TOKENS).then(|| {
                format!("bytes are the tokens, not the {} of the model", self.vocab_size())
            });
        }
        let own = own.filter(|_| !self.fits_tokenizer(Some(named)))?;
        Some(format!(
            "`{}` takes the place of the model's own `{}`; an export gets it too",
            named.display(),
            own.display()
        ))
    }
}
