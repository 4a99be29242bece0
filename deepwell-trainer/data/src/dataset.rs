//! From inputs to a token cache.

use std::path::PathBuf;
use std::sync::Arc;

use super::build::Build;
use super::cache::{self, TokenCache, Unusable};
use super::cache_header::FORMAT_VERSION;
use super::cache_header::Key;
use super::chat::Chat;
use super::corpus::Corpus;
use super::records::Fields;
use super::source::{Document, Format};
use super::split::{Choice, HELDOUT_ONE_IN, choose, total};
use super::{DataError, DatasetSummary, HeldoutWindows, Progress, Split, Tokenizer};

/// Default number of held-out tokens: 131,072 for an evaluation, and half as many again, because an
/// evaluation reads whole batches.
pub const HELDOUT_TOKENS_MIN: u64 = 131_072 + 65_536;

/// Inputs and settings of a data set.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Files and folders of text or of records, patterns such as `texts/**/*.txt`, or token files.
    /// Empty: the default corpus.
    pub inputs: Vec<PathBuf>,
    /// Inputs that are held out entirely, in place of a share of `inputs`.
    pub heldout_inputs: Vec<PathBuf>,
    /// Whether all of `inputs` is held out, for an evaluation only.
    pub holds_out_all: bool,
    /// Field of a record with its text or messages; by default the first of `text`, `content`,
    /// `messages` and `conversations`.
    pub text_field: Option<String>,
    /// Cargo workspace whose locked dependencies are the default corpus.
    pub workspace: PathBuf,
    /// Tokenizer of text; not used for token files.
    pub tokenizer: Tokenizer,
    /// Folder of the token cache, created if needed. Its files are memory-mapped: other programs
    /// must not write to them.
    pub cache_dir: PathBuf,
    /// Minimum number of held-out tokens. The held-out part gets 5 % of the data if this is more,
    /// and never more than half.
    pub heldout_tokens_min: u64,
}

impl Default for DataOptions {
    /// The default corpus of the workspace in the current folder, at byte level, cached in
    /// `target/deepwell-cache`.
    fn default() -> Self {
        Self {
            inputs: Vec::new(),
            heldout_inputs: Vec::new(),
            holds_out_all: false,
            text_field: None,
            workspace: PathBuf::from("."),
            tokenizer: Tokenizer::bytes(),
            cache_dir: PathBuf::from("target/deepwell-cache"),
            heldout_tokens_min: HELDOUT_TOKENS_MIN,
        }
    }
}

/// A tokenized data set.
#[derive(Clone, Debug)]
pub struct Dataset {
    tokens: Arc<TokenCache>,
    summary: DatasetSummary,
    tokenizer_hash: [u8; 32],
    separator: Option<u32>,
    ends_turns: bool,
    has_records: bool,
}

impl Dataset {
    /// Reads, splits and tokenizes the inputs, or takes the tokens from the cache if the same
    /// content was tokenized before. `progress` is called for every scanned file and for every few
    /// megabytes tokenized.
    ///
    /// The separator of the tokenizer, if any, follows every document. A single document is split
    /// by position and gets no separator, and token files are used unchanged. A record is a
    /// document; in a conversation only the answers count as targets.
    ///
    /// # Errors
    ///
    /// [`DataError`]: inputs that are missing, unreadable, empty, too short or damaged; a missing
    /// default corpus; a cache folder that cannot be written.
    pub fn prepare(
        options: &DataOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, DataError> {
        let fields = Fields { text: options.text_field.clone() };
        let Corpus { documents, source, skipped } = Corpus::open(
            &options.inputs,
            &options.heldout_inputs,
            &options.workspace,
            options.tokenizer.needs_utf8(),
            &fields,
            progress,
        )?;
        let chats: u64 = documents.iter().map(|document| document.chats).sum();
        let chat = (chats > 0).then(|| options.tokenizer.chat()).transpose()?;

        let choice = match options.holds_out_all {
            true => Choice::Named((0..documents.len()).collect()),
            false => choose(&documents),
        };
        let content_hash = content_hash(&documents);
        let key = key(&content_hash, options, chat.as_ref());
        let (tokens, is_from_cache) = match TokenCache::open(&options.cache_dir, &key) {
            Ok(tokens) => (tokens, true),
            Err(unusable) => {
                if let Unusable::Damaged(what) = unusable {
                    tracing::warn!("a file of the token cache is {what}; making it again");
                }
                let documents = &documents[..];
                let choice = &choice;
                let chat = chat.as_ref();
                Build { documents, choice, chat, options, fields: &fields, key: &key }
                    .run(progress)?;
                let reopened = TokenCache::open(&options.cache_dir, &key);
                let tokens = reopened.map_err(|unusable| DataError::Read {
                    path: cache::file_path(&options.cache_dir, &key, Split::Train),
                    source: std::io::Error::other(format!("just written, yet {unusable:?}")),
                })?;
                (tokens, false)
            }
        };

        let mut notes = Vec::new();
        let is_tokens = matches!(documents[0].format, Format::Tokens(_));
        let records: u64 = documents.iter().map(|document| document.records).sum();
        if choice == Choice::Position && records == documents.len() as u64 {
            let share = 100 / HELDOUT_ONE_IN;
            notes.push(format!(
                "split by position, not by file: no choice of whole files holds out {share} to 50 \
                 % of the text"
            ));
        }
        if let Some(text) = documents.iter().find(|document| is_markup(document)) {
            notes.push(format!("`{}` is read as it is, tags included", text.name));
        }
        let heldout = tokens.len(Split::Heldout);
        if heldout < options.heldout_tokens_min && !matches!(choice, Choice::Named(_)) {
            notes.push(format!(
                "the held-out part has {heldout} tokens, {} were asked for: there is too little \
                 text",
                options.heldout_tokens_min
            ));
        }
        if !is_tokens && options.tokenizer.separator().is_none() {
            notes.push(
                "documents follow each other without a separator: the tokenizer has no \
                 end-of-text token"
                    .to_owned(),
            );
        }
        let (tokenizer, vocab_size) = if is_tokens {
            let token_max = tokens.token_max(Split::Train).max(tokens.token_max(Split::Heldout));
            (TOKEN_FILES.to_owned(), u64::from(token_max) + 1)
        } else {
            (options.tokenizer.name().to_owned(), u64::from(options.tokenizer.vocab_size()))
        };
        let summary = DatasetSummary {
            source,
            files_train: tokens.documents(Split::Train),
            files_heldout: tokens.documents(Split::Heldout),
            files: documents.len() as u64,
            records: (records > documents.len() as u64 || chats > 0).then_some(records),
            conversations: (chats > 0).then_some(chats),
            targets_train: tokens.counted(Split::Train),
            targets_heldout: tokens.counted(Split::Heldout),
            bytes: total(&documents),
            tokens_train: tokens.len(Split::Train),
            tokens_heldout: heldout,
            vocab_size,
            tokenizer,
            skipped_files: skipped.names(),
            skipped,
            notes,
            content_hash: content_hash.to_hex().to_string(),
            cache_dir: options.cache_dir.clone(),
            is_from_cache,
        };
        let tokenizer_hash = *options.tokenizer.hash();
        let separator = options.tokenizer.separator();
        let ends_turns = chat.zip(separator).is_some_and(|(chat, end)| chat.ends_turns_with(end));
        let has_records =
            documents.iter().any(|document| matches!(document.format, Format::Records(_)));
        let tokens = Arc::new(tokens);
        Ok(Self { tokens, summary, tokenizer_hash, separator, ends_turns, has_records })
    }

    /// The tokens of both parts.
    pub fn tokens(&self) -> &Arc<TokenCache> {
        &self.tokens
    }

    /// Hash of the tokenizer; it differs whenever the same text may give other tokens.
    pub fn tokenizer_hash(&self) -> String {
        blake3::Hash::from_bytes(self.tokenizer_hash).to_hex().to_string()
    }

    /// Checks that the held-out part has a token to predict.
    ///
    /// # Errors
    ///
    /// [`DataError::TooShort`], [`DataError::NothingToPredict`].
    pub fn check_targets(&self) -> Result<(), DataError> {
        HeldoutWindows::whole(Arc::clone(&self.tokens), 1, 1024)?.check_targets(None)
    }

    /// Returns the summary of the data set.
    pub fn summary(&self) -> &DatasetSummary {
        &self.summary
    }

    /// The token after each of several documents, if the tokenizer has one.
    pub fn separator(&self) -> Option<u32> {
        self.separator
    }

    /// Whether the separator also ends the turns of conversations, so that it does not separate
    /// documents.
    pub fn ends_turns(&self) -> bool {
        self.ends_turns
    }

    /// Whether any of the files has records with fields.
    pub fn has_records(&self) -> bool {
        self.has_records
    }

    /// Whether the tokens came from token files, so that the tokenizer is unknown.
    pub fn has_token_files(&self) -> bool {
        self.summary.tokenizer == TOKEN_FILES
    }

    /// Size of the tokenizer's vocabulary; for token files, the largest token plus 1.
    pub fn vocab_size(&self) -> u64 {
        self.summary.vocab_size
    }
}

/// Name shown in place of a tokenizer for inputs that are token files.
const TOKEN_FILES: &str = "token files";

/// Hash of names and contents, in order; independent of the location of the inputs.
fn content_hash(documents: &[Document]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for document in documents {
        for text in [&document.name, &document.split_key] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(document.hash.as_bytes());
        if document.is_heldout {
            hasher.update(b"held out");
        }
    }
    hasher.finalize()
}

fn key(content_hash: &blake3::Hash, options: &DataOptions, chat: Option<&Chat>) -> Key {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&FORMAT_VERSION.to_le_bytes());
    hasher.update(content_hash.as_bytes());
    hasher.update(options.tokenizer.hash());
    hasher.update(&options.heldout_tokens_min.to_le_bytes());
    hasher.update(&[u8::from(options.holds_out_all)]);
    if let Some(chat) = chat {
        hasher.update(chat.hash().as_bytes());
    }
    if let Some(field) = &options.text_field {
        hasher.update(field.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn is_markup(document: &Document) -> bool {
    let name = document.name.to_lowercase();
    document.format == Format::Text
        && [".html", ".htm", ".xml"].iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests;
