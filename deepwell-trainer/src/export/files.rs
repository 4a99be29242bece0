//! Files of a model folder without weights: configuration and tokenizer.

use std::collections::BTreeMap;
use std::path::Path;

use deepwell_ckpt::CkptDtype;
use serde_json::{Map, Value, json};

use crate::data::Tokenizer;
use crate::{BYTES, ModelSource, TrainError};

pub(super) const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Files that may accompany a `tokenizer.json`.
const BESIDE_TOKENIZER: [&str; 8] = [
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Names of all files of this module.
fn all() -> impl Iterator<Item = &'static str> {
    [CONFIG, GENERATION, TOKENIZER].into_iter().chain(BESIDE_TOKENIZER)
}

/// Tokenizer of a run's tokens.
#[derive(Clone, Copy)]
pub enum TokensOf<'a> {
    /// Bytes.
    Bytes,
    /// The tokens of a `tokenizer.json`.
    File {
        /// The file.
        path: &'a Path,
        /// The tokenizer in the file.
        tokenizer: &'a Tokenizer,
    },
    /// Token files without a known tokenizer.
    Unknown,
}

impl<'a> TokensOf<'a> {
    /// Tokenizer of a run with an optional `tokenizer.json`, on token files or on text.
    pub fn run(
        file: Option<&'a Path>,
        tokenizer: &'a Tokenizer,
        has_token_files: bool,
    ) -> TokensOf<'a> {
        match file {
            Some(path) if path.as_os_str() == BYTES => TokensOf::Bytes,
            Some(path) => TokensOf::File { path, tokenizer },
            None if has_token_files => TokensOf::Unknown,
            None => TokensOf::Bytes,
        }
    }
}

/// Configuration and tokenizer of a model, as files by name.
///
/// ```
/// use deepwell_trainer::ModelSource;
/// use deepwell_trainer::export::{ModelFiles, TokensOf};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// let files = ModelFiles::of(&ModelSource::open("llama-micro")?, TokensOf::Bytes)?;
/// files.keep(folder.path())?;
/// let config = folder.path().join("config.json");
/// assert_eq!(ModelSource::open(&config.display().to_string())?.vocab_size(), 256);
/// // Bytes are tokens, for transformers too.
/// assert!(folder.path().join("tokenizer.json").is_file());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    files: BTreeMap<String, Vec<u8>>,
}

impl ModelFiles {
    /// Collects the files of a model that is trained on the given tokens.
    ///
    /// A model's own `config.json` is copied; a preset is written as a `config.json` with the
    /// tokenizer's end-of-text token. If the model has another tokenizer of its own, its special
    /// token ids are replaced too, because they mean other tokens here.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn of(model: &ModelSource, tokens: TokensOf<'_>) -> Result<ModelFiles, TrainError> {
        let mut files = BTreeMap::new();
        let separator = match tokens {
            TokensOf::File { path, tokenizer } => add_tokenizer(path, tokenizer, &mut files)?,
            TokensOf::Unknown => None,
            TokensOf::Bytes => {
                files.insert(TOKENIZER.to_string(), pretty(&byte_tokenizer()));
                files.insert(TOKENIZER_CONFIG.to_string(), pretty(&tokenizer_config(None)));
                Tokenizer::bytes().separator()
            }
        };
        let has_own_ids = match tokens {
            TokensOf::File { path, .. } => model.fits_tokenizer(Some(path)),
            TokensOf::Bytes => model.own_tokenizer().is_none(),
            TokensOf::Unknown => true,
        };
        if let Some((mut config, is_own)) = model.config_json() {
            if let (false, Some(object)) = (is_own && has_own_ids, config.as_object_mut()) {
                // Byte 0 separates documents, so it also begins a document.
                let begin = separator.filter(|_| matches!(tokens, TokensOf::Bytes));
                object.insert("bos_token_id".to_string(), json!(begin));
                object.insert("eos_token_id".to_string(), json!(separator));
                let generation = json!({"bos_token_id": begin, "eos_token_id": separator});
                files.insert(GENERATION.to_string(), pretty(&generation));
            }
            files.insert(CONFIG.to_string(), pretty(&config));
        }
        if let Some(path) = model.generation_config().filter(|_| has_own_ids) {
            files.insert(GENERATION.to_string(), read(&path)?);
        }
        Ok(ModelFiles { files })
    }

    /// Reads the files in a run's folder.
    pub(super) fn read(folder: &Path) -> Result<ModelFiles, TrainError> {
        let mut files = BTreeMap::new();
        for name in all() {
            let path = folder.join(name);
            if path.is_file() {
                files.insert(name.to_string(), read(&path)?);
            }
        }
        Ok(ModelFiles { files })
    }

    /// Writes the files into a run's folder, each atomically, and removes files of another model.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn keep(&self, folder: &Path) -> Result<(), TrainError> {
        std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        for name in all() {
            let path = folder.join(name);
            let Some(contents) = self.files.get(name) else {
                match std::fs::remove_file(&path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(TrainError::io(&path)(error));
                    }
                    _ => continue,
                }
            };
            let partial = folder.join(format!(".{name}.tmp-{}", std::process::id()));
            std::fs::write(&partial, contents).map_err(TrainError::io(&partial))?;
            std::fs::rename(&partial, &path).map_err(TrainError::io(&path))?;
        }
        Ok(())
    }

    /// Vocabulary size of the included tokenizer; `folder` is used for errors.
    pub(super) fn tokens(&self, folder: &Path) -> Option<u64> {
        let tokenizer = Tokenizer::from_bytes(&folder.join(TOKENIZER), self.files.get(TOKENIZER)?);
        Some(u64::from(tokenizer.ok()?.vocab_size()))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    pub(super) fn set_config(&mut self, config: Value) {
        self.files.insert(CONFIG.to_string(), pretty(&config));
    }

    /// States the element type of the weights, in the key of transformers 5.
    pub(super) fn set_dtype(&mut self, dtype: CkptDtype) {
        let text = self.files.get(CONFIG).and_then(|text| serde_json::from_slice(text).ok());
        let Some(mut config) = text else { return };
        let object: &mut Map<String, Value> = &mut config;
        object.remove("torch_dtype");
        let name = if dtype == CkptDtype::Bf16 { "bfloat16" } else { "float32" };
        object.insert("dtype".to_string(), json!(name));
        let config = Value::Object(config);
        self.set_config(config);
    }

    pub(super) fn into_contents(self) -> Vec<(String, Vec<u8>)> {
        self.files.into_iter().collect()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TrainError> {
    std::fs::read(path).map_err(TrainError::io(path))
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("JSON values are plain data");
    text.push(b'\n');
    text
}

/// Adds a tokenizer with its accompanying files; returns the token that separates documents.
fn add_tokenizer(
    path: &Path,
    tokenizer: &Tokenizer,
    files: &mut BTreeMap<String, Vec<u8>>,
) -> Result<Option<u32>, TrainError> {
    files.insert(TOKENIZER.to_string(), read(path)?);
    for name in BESIDE_TOKENIZER {
        let beside = path.with_file_name(name);
        if beside.is_file() {
            files.insert(name.to_string(), read(&beside)?);
        }
    }
    if !files.contains_key(TOKENIZER_CONFIG) {
        let separator = tokenizer.separator().and_then(|id| tokenizer.token_text(id));
        files.insert(TOKENIZER_CONFIG.to_string(), pretty(&tokenizer_config(separator)));
    }
    Ok(tokenizer.separator())
}

/// Without a class, transformers uses the class of the model's family, which may build a different
/// tokenizer from the same vocabulary.
fn tokenizer_config(end_of_text: Option<String>) -> Value {
    let mut config = json!({
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    if let (Some(end), Some(object)) = (end_of_text, config.as_object_mut()) {
        object.insert("eos_token".to_string(), json!(end));
    }
    config
}

/// A `tokenizer.json` that maps byte `b` to token `b`: a byte-level BPE without merges.
fn byte_tokenizer() -> Value {
    let vocab: Map<String, Value> =
        (0..=255u8).map(|byte| (byte_letter(byte).to_string(), json!(byte))).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": []
        }
    })
}

/// The character of a byte in byte-level vocabularies since GPT-2: printable Latin-1 characters
/// represent themselves, the other bytes are numbered from U+0100.
fn byte_letter(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_printable(other)).count();
    char::from_u32(0x100 + before as u32).expect("68 letters from U+0100 are characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_its_own_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(TOKENIZER);
        std::fs::write(&path, pretty(&byte_tokenizer())).unwrap();
        let bytes = Tokenizer::bytes();
        let file = Tokenizer::from_file(&path).unwrap();
        assert_eq!(file.vocab_size(), 256);
        let all: String = ('\0'..='\u{24f}').chain("  \r\n don't \u{1f30a}".chars()).collect();
        let expected = bytes.encode("x", all.as_bytes()).unwrap();
        assert_eq!(file.encode("x", all.as_bytes()).unwrap(), expected);
        assert_eq!(file.decode("x", &expected).unwrap(), all.as_bytes());
    }

    #[test]
    fn another_run_leaves_nothing_of_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let files =
            ModelFiles::of(&ModelSource::open("gpt2-micro").unwrap(), TokensOf::Bytes).unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), "old").unwrap();
        files.keep(folder.path()).unwrap();
        assert_eq!(ModelFiles::read(folder.path()).unwrap(), files);
        let config: Value = serde_json::from_slice(&files.files[CONFIG]).unwrap();
        assert_eq!((&config["eos_token_id"], &config["n_layer"]), (&json!(0), &json!(2)));
    }
}
