//! Text to tokens: bytes by default, or a Hugging Face `tokenizer.json`.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::DataError;
use super::chat::Chat;
use super::cuts::Cuts;

/// Turns text into tokens.
///
/// The byte level needs no file: token = byte, 256 tokens, and byte 0 separates documents (files
/// that contain a byte 0 are not text and are never read). A Hugging Face tokenizer separates
/// documents by its end-of-text token if it has one.
#[derive(Clone)]
pub struct Tokenizer {
    kind: Kind,
    vocab_size: u32,
    separator: Option<u32>,
    /// Token before a prompt, if `tokenizer_config.json` overrides the tokenizer's template.
    begin: Option<Option<u32>>,
    hash: [u8; 32],
    name: String,
}

#[derive(Clone)]
enum Kind {
    Bytes,
    HuggingFace(Arc<HuggingFace>),
}

#[derive(Clone)]
struct HuggingFace {
    inner: tokenizers::Tokenizer,
    cuts: Cuts,
    path: PathBuf,
}

/// Common names of end-of-text tokens, tried in this order for a tokenizer without a
/// `tokenizer_config.json`. `[SEP]` is BERT's.
const END_OF_TEXT: [&str; 6] =
    ["</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|eos|>", "[SEP]"];

impl Tokenizer {
    /// The byte-level tokenizer: 256 tokens, separator 0.
    pub fn bytes() -> Self {
        Self {
            kind: Kind::Bytes,
            vocab_size: 256,
            separator: Some(0),
            begin: None,
            hash: *blake3::hash(b"deepwell byte-level tokenizer, separator 0").as_bytes(),
            name: "byte level".to_owned(),
        }
    }

    /// Reads a Hugging Face `tokenizer.json`.
    ///
    /// Truncation and padding in the file are disabled: they serve inference and would cut
    /// documents here. No special token is added to a text except the separator: the `eos_token` of
    /// a `tokenizer_config.json` in the same folder, otherwise the first known end-of-text name in
    /// the vocabulary, otherwise none.
    ///
    /// # Errors
    ///
    /// [`DataError::MissingTokenizer`], [`DataError::Read`], [`DataError::Tokenizer`].
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        Self::from_bytes(path, &read_file(path)?)
    }

    /// Parses the text of a `tokenizer.json` whose path is, or will be, `path`.
    pub fn from_bytes(path: &Path, text: &[u8]) -> Result<Self, DataError> {
        let fail = |message: String| DataError::Tokenizer { path: path.to_owned(), message };
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(text))
            .map_err(|message| fail(message.to_lowercase()))?;
        inner.with_truncation(None).map_err(|error| fail(error.to_string()))?;
        inner.with_padding(None);

        let vocab = inner.get_vocab(true);
        let vocab_size = vocab
            .values()
            .map(|&id| u64::from(id) + 1)
            .max()
            .unwrap_or(0)
            .max(inner.get_vocab_size(true) as u64);
        if vocab_size == 0 {
            return Err(fail("the vocabulary is empty".to_owned()));
        }
        // The model takes tokens as i32.
        let vocab_size = u32::try_from(vocab_size)
            .ok()
            .filter(|&size| size <= 1 << 31)
            .ok_or_else(|| fail(format!("a vocabulary of {vocab_size} is above 2^31")))?;

        let id_of = |role: &str, token: &str| {
            let message =
                format!("`tokenizer_config.json` names `{token}` as {role}, not in the vocabulary");
            inner.token_to_id(token).ok_or_else(|| fail(message))
        };
        let config = read_config(path)?;
        let separator = match special_token(&config, "eos_token") {
            Some(eos) => Some(id_of("eos", &eos)?),
            None => END_OF_TEXT.iter().find_map(|name| inner.token_to_id(name)),
        };
        let states = |key: &str| config[key].as_bool();
        let begin = match (states("add_bos_token"), states("add_eos_token")) {
            (None, None) => None,
            (Some(true), _) => {
                let bos = special_token(&config, "bos_token");
                Some(bos.map(|bos| id_of("bos", &bos)).transpose()?)
            }
            _ => Some(None),
        };

        let mut hasher = blake3::Hasher::new();
        hasher.update(text);
        hasher.update(&separator.map_or([0xff; 8], |id| u64::from(id).to_le_bytes()));
        let name = format!("`{}`", path.display());
        Ok(Self {
            kind: Kind::HuggingFace(Arc::new(HuggingFace {
                cuts: Cuts::of(&inner),
                inner,
                path: path.to_owned(),
            })),
            vocab_size,
            separator,
            begin,
            hash: *hasher.finalize().as_bytes(),
            name,
        })
    }

    /// Size of the vocabulary; every token is below this number.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The token after every document, if any.
    pub fn separator(&self) -> Option<u32> {
        self.separator
    }

    /// Text of a token in the vocabulary of a Hugging Face file.
    pub fn token_text(&self, token: u32) -> Option<String> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::HuggingFace(it) => it.inner.id_to_token(token),
        }
    }

    /// Name of the tokenizer, as text.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if the input must be UTF-8.
    pub fn needs_utf8(&self) -> bool {
        matches!(self.kind, Kind::HuggingFace(_))
    }

    /// A hash that changes whenever the same text may give other tokens.
    pub(crate) fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// Positions at which a text can be cut without changing its tokens.
    pub(crate) fn cuts(&self) -> Cuts {
        match &self.kind {
            Kind::Bytes => Cuts::Anywhere,
            Kind::HuggingFace(it) => it.cuts,
        }
    }

    /// Returns the encoder of conversations.
    ///
    /// # Errors
    ///
    /// [`DataError::NoChatTemplate`], [`DataError::ChatTemplate`], [`DataError::Read`].
    pub(crate) fn chat(&self) -> Result<Chat, DataError> {
        match &self.kind {
            Kind::Bytes => Err(DataError::ChatOfBytes),
            Kind::HuggingFace(it) => Chat::beside(&it.path, &it.inner),
        }
    }

    /// Tokenizes one piece of text, without the separator. Errors contain `name`.
    pub fn encode(&self, name: &str, text: &[u8]) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(text.iter().map(|&byte| u32::from(byte)).collect()),
            Kind::HuggingFace(it) => {
                let fail = |message: String| DataError::Encode { name: name.to_owned(), message };
                let text = str::from_utf8(text).map_err(|error| fail(error.to_string()))?;
                let encoding = guarded(|| it.inner.encode_fast(text, false)).map_err(fail)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }
}

impl Tokenizer {
    /// Tokenizes a prompt. A Hugging Face tokenizer puts the special tokens of its template before
    /// the text. As in transformers, `add_bos_token` of the `tokenizer_config.json` in the same
    /// folder replaces the template.
    ///
    /// # Errors
    ///
    /// [`DataError::Encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => self.encode("prompt", text.as_bytes()),
            Kind::HuggingFace(it) => {
                if let Some(begin) = self.begin {
                    let tokens = self.encode("prompt", text.as_bytes())?;
                    return Ok(begin.into_iter().chain(tokens).collect());
                }
                let encoding = guarded(|| it.inner.encode_fast(text, true))
                    .map_err(|message| DataError::Encode { name: "prompt".to_owned(), message })?;
                let mut tokens = encoding.get_ids().to_vec();
                // BERT-like templates also end a text with a separator; a prompt must stay open.
                if tokens.len() > 1 && tokens.last().copied() == self.separator {
                    tokens.pop();
                }
                Ok(tokens)
            }
        }
    }

    /// Decodes tokens one by one, after the tokens of a prompt.
    pub fn text_stream(&self, prompt: &[u32]) -> TextStream<'_> {
        let seen = match self.kind {
            Kind::Bytes => Vec::new(),
            Kind::HuggingFace(_) => prompt.to_vec(),
        };
        TextStream { tokenizer: self, seen, prefix: String::new(), prefix_index: 0 }
    }

    /// Decodes tokens from [`Self::encode`]. Errors contain `name`.
    pub fn decode(&self, name: &str, tokens: &[u32]) -> Result<Vec<u8>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(tokens.iter().map(|&token| token as u8).collect()),
            Kind::HuggingFace(it) => guarded(|| it.inner.decode(tokens, false))
                .map(String::into_bytes)
                .map_err(|message| DataError::Encode { name: name.to_owned(), message }),
        }
    }
}

/// Incremental decoding of tokens: see [`Tokenizer::text_stream`].
///
/// ```
/// use deepwell_data::Tokenizer;
///
/// let tokenizer = Tokenizer::bytes();
/// let mut stream = tokenizer.text_stream(&[]);
/// assert_eq!(stream.push(104)?, b"h");
/// assert_eq!(stream.push(105)?, b"i");
/// # Ok::<(), deepwell_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Earlier tokens on which the text of the next token depends.
    seen: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl TextStream<'_> {
    /// Returns the bytes of a token. The result may be empty until a character is complete; a
    /// byte-level token always returns its byte.
    ///
    /// # Errors
    ///
    /// [`DataError::Encode`].
    pub fn push(&mut self, token: u32) -> Result<Vec<u8>, DataError> {
        match &self.tokenizer.kind {
            Kind::Bytes => Ok(vec![token as u8]),
            Kind::HuggingFace(it) => guarded(|| {
                tokenizers::step_decode_stream(
                    &it.inner,
                    vec![token],
                    true,
                    &mut self.seen,
                    &mut self.prefix,
                    &mut self.prefix_index,
                )
            })
            .map(|text| text.unwrap_or_default().into_bytes())
            .map_err(|message| DataError::Encode { name: format!("token {token}"), message }),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.name)
            .field("vocab_size", &self.vocab_size)
            .field("separator", &self.separator)
            .finish()
    }
}

/// Runs a function of `tokenizers`, which panics on some invalid files.
pub(super) fn guarded<T, E: fmt::Display>(run: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    // After a panic the state is only used through its own functions, which are guarded too.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the library that reads tokenizers has failed on it".to_owned()),
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, DataError> {
    std::fs::read(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => DataError::MissingTokenizer { path: path.to_owned() },
        _ => DataError::Read { path: path.to_owned(), source },
    })
}

/// Reads the `tokenizer_config.json` in the folder of a tokenizer; null if missing.
fn read_config(tokenizer: &Path) -> Result<serde_json::Value, DataError> {
    let path: PathBuf = tokenizer.with_file_name("tokenizer_config.json");
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(serde_json::Value::Null);
        }
        Err(source) => return Err(DataError::Read { path, source }),
    };
    serde_json::from_slice(&text)
        .map_err(|error| DataError::Tokenizer { path, message: error.to_string() })
}

/// A special token of a `tokenizer_config.json`: a string, or an object with `content`.
fn special_token(config: &serde_json::Value, key: &str) -> Option<String> {
    let token = &config[key];
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

/// `eos_token` of the `tokenizer_config.json` in the folder of the tokenizer.
pub(crate) fn configured_eos(tokenizer: &Path) -> Result<Option<String>, DataError> {
    Ok(special_token(&read_config(tokenizer)?, "eos_token"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A word-level tokenizer of five words, with truncation and padding as in files for inference.
    pub(crate) fn write_word_level(folder: &Path) -> PathBuf {
        let path = folder.join("tokenizer.json");
        let json = r#"{"version": "1.0",
            "truncation": {"direction": "Right", "max_length": 3,
                "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right",
                "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"},
            "added_tokens": [{"id": 5, "content": "</s>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "unk_token": "[UNK]",
                "vocab": {"[UNK]": 0, "let": 1, "well": 2, "deep": 3, "water": 4}}}"#;
        std::fs::write(&path, json).unwrap();
        path
    }

    #[test]
    fn bytes_are_tokens() {
        let tokenizer = Tokenizer::bytes();
        assert_eq!((tokenizer.vocab_size(), tokenizer.separator()), (256, Some(0)));
        assert_eq!(tokenizer.encode("x", b"a\xff\n").unwrap(), [97, 255, 10]);
    }

    #[test]
    fn a_hugging_face_file_neither_truncates_nor_pads() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::from_file(&write_word_level(folder.path())).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.separator()), (6, Some(5)));
        let tokens = tokenizer.encode("x", b"let deep well water deep rust").unwrap();
        assert_eq!(tokens, [1, 3, 2, 4, 3, 0]);
        assert_eq!(tokenizer.encode("x", b"deep").unwrap(), [3]);
    }

    /// `tokenizers` 0.23 panics while reporting an invalid decoder with non-ASCII text.
    #[test]
    fn a_file_that_the_library_panics_on_is_an_error() {
        let decoder = "\u{fffd}".repeat(81);
        let text = format!(
            r#"{{"added_tokens": [], "decoder": {{"add_prefix_space": false,
            "{decoder}trim_offsets": true, "type": [], "use_regex": true}}, "normalizer": null,
            "model": {{"type": null, "vocab": {{"a": 0}}}}, "version": "1.0"}}"#
        );
        let error = Tokenizer::from_bytes(Path::new("t.json"), text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("t.json"), "{error}");
    }

    #[test]
    fn the_config_beside_the_tokenizer_names_the_separator() {
        let folder = tempfile::tempdir().unwrap();
        let path = write_word_level(folder.path());
        let config = folder.path().join("tokenizer_config.json");
        let plain = Tokenizer::from_file(&path).unwrap();
        std::fs::write(&config, r#"{"eos_token": {"content": "water"}}"#).unwrap();
        let configured = Tokenizer::from_file(&path).unwrap();
        assert_eq!(configured.separator(), Some(4));
        assert_ne!(plain.hash(), configured.hash());
        std::fs::write(&config, r#"{"eos_token": "sea"}"#).unwrap();
        assert_eq!(
            Tokenizer::from_file(&path).unwrap_err().to_string(),
            format!(
                "tokenizer `{}`: `tokenizer_config.json` names `sea` as eos, not in the \
                 vocabulary\nhint: expected the `tokenizer.json` of a Hugging Face fast tokenizer",
                path.display()
            )
        );
    }

    #[test]
    fn text_comes_token_by_token() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::from_file(&write_word_level(folder.path())).unwrap();
        let prompt = tokenizer.encode_prompt("let deep").unwrap();
        assert_eq!(prompt, [1, 3]);
        let mut stream = tokenizer.text_stream(&prompt);
        let text: Vec<Vec<u8>> = [2, 4, 5].map(|token| stream.push(token).unwrap()).into();
        // The separator is special and has no text.
        assert_eq!(text, [&b" well"[..], b" water", b""]);
        let mut bytes = Tokenizer::bytes().encode_prompt("\u{e9}").unwrap();
        assert_eq!(bytes, [0xc3, 0xa9]);
        let tokenizer = Tokenizer::bytes();
        let mut stream = tokenizer.text_stream(&bytes);
        bytes.retain(|&token| stream.push(token).unwrap() == [token as u8]);
        assert_eq!(bytes.len(), 2);
    }

    #[test]
    fn errors_say_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let check = |expected: &str| {
            let message = Tokenizer::from_file(&path).unwrap_err().to_string();
            assert_eq!(message.replace(&path.display().to_string(), "PATH"), expected);
        };
        check(
            "no tokenizer `PATH`\nhint: give the `tokenizer.json` of a Hugging Face model folder, \
             make one with `deepwell tokenizer train`, or leave `--tokenizer` out for byte-level \
             tokens",
        );
        std::fs::write(&path, "{").unwrap();
        check(
            "tokenizer `PATH`: eof while parsing an object at line 1 column 1\nhint: expected the \
             `tokenizer.json` of a Hugging Face fast tokenizer",
        );
    }
}
