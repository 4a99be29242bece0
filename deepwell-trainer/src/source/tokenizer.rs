//! The tokenizer that belongs to a model: the `tokenizer.json` beside its `config.json`.

use std::path::{Path, PathBuf};

use super::ModelSource;
use crate::TrainError;
use crate::data::{Tokenizer, are_token_files};

/// The tokenizer whose tokens are bytes, in place of the path of a file.
pub const BYTES: &str = "bytes";

const FILE: &str = "tokenizer.json";
/// Tokens of a model that may go without a tokenizer: one for each byte.
const BYTE_TOKENS: usize = 256;
/// File names of tokenizers in other forms, with a name for the form.
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

/// The tokenizer of a setting: bytes where it is none or [`BYTES`].
///
/// # Errors
/// A file that is no tokenizer.
pub fn open_tokenizer(setting: Option<&Path>) -> Result<Tokenizer, TrainError> {
    match setting {
        Some(path) if path.as_os_str() != BYTES => Ok(Tokenizer::from_file(path)?),
        _ => Ok(Tokenizer::bytes()),
    }
}

/// A tokenizer that was chosen, and what a user has to know about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChosenTokenizer {
    /// The file, [`BYTES`] where that was asked for, or none for bytes by default.
    pub file: Option<PathBuf>,
    /// A sentence, if something is to be said.
    pub note: Option<String>,
}

impl ModelSource {
    /// A file of this name beside the model's `config.json`.
    fn beside(&self, name: &str) -> Option<PathBuf> {
        Some(self.config_file()?.with_file_name(name))
    }

    /// The `tokenizer.json` beside the model's `config.json`, if there is one.
    pub fn own_tokenizer(&self) -> Option<PathBuf> {
        // A link that leads nowhere is meant, too: opening it says what is wrong.
        self.beside(FILE).filter(|path| path.symlink_metadata().is_ok())
    }

    /// Whether a tokenizer that a user has named is the model's own, or the model has none.
    pub fn fits_tokenizer(&self, named: Option<&Path>) -> bool {
        let (Some(own), Some(named)) = (self.own_tokenizer(), named) else { return true };
        match (std::fs::read(&own), std::fs::read(named)) {
            (Ok(own), Ok(named)) => own == named,
            (_, Err(_)) => named == own,
            (Err(_), Ok(_)) => false,
        }
    }

    /// A tokenizer beside the model's `config.json` in a form that is not read.
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

    /// The tokenizer that texts for this model are read with: the one that is named, else the
    /// model's own. A model that has none reads bytes if it begins from fresh weights or has 256
    /// tokens.
    ///
    /// `inputs` are what is read: token files need no tokenizer.
    ///
    /// # Errors
    /// No `tokenizer.json` where the model has weights that know another vocabulary than bytes, or
    /// a tokenizer in a form that is not read.
    pub fn choose_tokenizer(
        &self,
        named: Option<&Path>,
        inputs: &[PathBuf],
    ) -> Result<ChosenTokenizer, TrainError> {
        if let Some(named) = named {
            let note = self.note_on_named(named);
            return Ok(ChosenTokenizer { file: Some(named.to_path_buf()), note });
        }
        if let Some(own) = self.own_tokenizer() {
            return match Tokenizer::from_file(&own) {
                Ok(_) => Ok(ChosenTokenizer { file: Some(own), note: None }),
                Err(_) if are_token_files(inputs) => Ok(ChosenTokenizer::default()),
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
            return Ok(ChosenTokenizer { file: None, note });
        }
        if other.is_none() && self.exported().is_some() {
            // An archive has no place for a tokenizer.
            let note = format!(
                "bytes are the tokens, though `{}` has {} others: `--tokenizer FILE` names those",
                self.name(),
                self.vocab_size()
            );
            return Ok(ChosenTokenizer { file: None, note: Some(note) });
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

    /// What is to be said where tokens may be beyond the rows of the token table.
    ///
    /// One rule holds for all commands: a tokenizer may have more tokens than the model has rows,
    /// as one with a padding token that was added and is never used. A token without a row is an
    /// error where it occurs: in data, in a prompt.
    pub fn note_on_vocabulary(&self, tokens: u64) -> Option<String> {
        let rows = self.vocab_size() as u64;
        (tokens > rows).then(|| {
            format!(
                "the tokenizer has {tokens} tokens, the model rows for {rows}: a text with one of \
                 the others is refused"
            )
        })
    }

    /// What is to be said where the model has a tokenizer of its own and another one is named.
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
