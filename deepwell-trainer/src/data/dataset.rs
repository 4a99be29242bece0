//! From inputs to a token cache.

use std::path::PathBuf;
use std::sync::Arc;

use super::cache::{self, Key, TokenCache, Unusable};
use super::cache_header::FORMAT_VERSION;
use super::cache_writer::TokenWriter;
use super::corpus::Corpus;
use super::encode::{Encoded, encode};
use super::source::{Document, Format};
use super::split::{Choice, HELDOUT_ONE_IN, HeldoutBytes, choose, total};
use super::{DataError, DatasetSummary, Progress, Split, Tokenizer};

/// Held-out tokens asked for by default: 131,072 to evaluate on, and half as many again, because
/// evaluation takes whole batches.
pub const HELDOUT_TOKENS_MIN: u64 = 131_072 + 65_536;

/// What to read and how.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Files and folders of text, patterns such as `texts/**/*.txt`, or token files. Empty: the
    /// default corpus.
    pub inputs: Vec<PathBuf>,
    /// Cargo workspace whose locked dependencies are the default corpus.
    pub workspace: PathBuf,
    /// Turns text into tokens. Token files do not use it.
    pub tokenizer: Tokenizer,
    /// Folder of the token cache; it is made if need be. Its files are mapped into memory: nobody
    /// else may write to them.
    pub cache_dir: PathBuf,
    /// Tokens that the held-out part should have at least. It gets 5 % of the data if that is
    /// more, and never more than half.
    pub heldout_tokens_min: u64,
}

impl Default for DataOptions {
    /// The default corpus of the workspace in the current folder, at byte level, cached in
    /// `target/deepwell-cache`.
    fn default() -> Self {
        Self {
            inputs: Vec::new(),
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
}

/// Tokens without which there is nothing to split: an input and a target in each part.
const TOKENS_MIN: u64 = 4;

impl Dataset {
    /// Reads the inputs, splits and tokenizes them, or takes the tokens from the cache if the
    /// same content was tokenized before. `progress` is called for every file that is
    /// scanned and for every few megabytes that are tokenized.
    ///
    /// After every document comes the separator of the tokenizer, if it has one. A single document
    /// is split by position and gets none, and token files are taken as they are.
    ///
    /// # Errors
    ///
    /// [`DataError`]: inputs that are missing, unreadable, empty, too short or damaged; a default
    /// corpus that is not there; a cache folder that cannot be written.
    pub fn prepare(
        options: &DataOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, DataError> {
        let Corpus { documents, source, skipped } = Corpus::open(
            &options.inputs,
            &options.workspace,
            options.tokenizer.needs_utf8(),
            progress,
        )?;

        let choice = choose(&documents);
        let content_hash = content_hash(&documents);
        let key = key(&content_hash, options);
        let (tokens, is_from_cache) = match TokenCache::open(&options.cache_dir, &key) {
            Ok(tokens) => (tokens, true),
            Err(unusable) => {
                if let Unusable::Damaged(what) = unusable {
                    tracing::warn!("a file of the token cache is {what}; making it again");
                }
                build(&documents, &choice, options, &key, progress)?;
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
        if choice == Choice::Position {
            let share = 100 / HELDOUT_ONE_IN;
            notes.push(format!(
                "split by position, not by file: no choice of whole files holds out {share} to 50 \
                 % of the text"
            ));
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
            bytes: total(&documents),
            tokens_train: tokens.len(Split::Train),
            tokens_heldout: heldout,
            vocab_size,
            tokenizer,
            skipped,
            notes,
            content_hash: content_hash.to_hex().to_string(),
            cache_dir: options.cache_dir.clone(),
            is_from_cache,
        };
        let tokenizer_hash = *options.tokenizer.hash();
        let separator = options.tokenizer.separator();
        Ok(Self { tokens: Arc::new(tokens), summary, tokenizer_hash, separator })
    }

    /// The tokens of both parts.
    pub fn tokens(&self) -> &Arc<TokenCache> {
        &self.tokens
    }

    /// Hash of the tokenizer: another one whenever the same text may give other tokens.
    pub fn tokenizer_hash(&self) -> String {
        blake3::Hash::from_bytes(self.tokenizer_hash).to_hex().to_string()
    }

    /// What the data set is made of.
    pub fn summary(&self) -> &DatasetSummary {
        &self.summary
    }

    /// The token behind each document of several, if the tokenizer has one.
    pub fn separator(&self) -> Option<u32> {
        self.separator
    }

    /// Whether the tokens came from token files: nobody says what they stand for.
    pub fn has_token_files(&self) -> bool {
        self.summary.tokenizer == TOKEN_FILES
    }

    /// Number of tokens that the tokenizer knows; for token files, the largest token plus one.
    pub fn vocab_size(&self) -> u64 {
        self.summary.vocab_size
    }
}

/// The tokenizer of token files, for people.
const TOKEN_FILES: &str = "token files";

/// Hash of names and contents, in order. Where the inputs lie plays no role.
fn content_hash(documents: &[Document]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for document in documents {
        for text in [&document.name, &document.split_key] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(document.hash.as_bytes());
    }
    hasher.finalize()
}

fn key(content_hash: &blake3::Hash, options: &DataOptions) -> Key {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&FORMAT_VERSION.to_le_bytes());
    hasher.update(content_hash.as_bytes());
    hasher.update(options.tokenizer.hash());
    hasher.update(&options.heldout_tokens_min.to_le_bytes());
    *hasher.finalize().as_bytes()
}

/// Writes both parts of the cache.
fn build(
    documents: &[Document],
    choice: &Choice,
    options: &DataOptions,
    key: &Key,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), DataError> {
    let vocab = stored_vocab(documents, &options.tokenizer);
    let mut train = TokenWriter::new(&options.cache_dir, vocab)?;
    let mut heldout = TokenWriter::new(&options.cache_dir, vocab)?;
    let is_text = documents[0].format == Format::Text;
    let separator = options.tokenizer.separator().filter(|_| is_text && documents.len() > 1);
    let bytes_total = total(documents);
    let mut bytes_done = 0;
    let mut write = |documents: &[&Document], writer: &mut TokenWriter| {
        let mut sink = |encoded: Encoded<'_>| match encoded {
            Encoded::Tokens(tokens) => writer.push(tokens),
            Encoded::EndOfDocument => {
                writer.end_document();
                writer.push(separator.as_slice())
            }
        };
        encode(documents, &options.tokenizer, &mut bytes_done, bytes_total, progress, &mut sink)
    };

    let mut is_heldout = vec![false; documents.len()];
    match choice {
        Choice::Position => {}
        Choice::Named(named) => {
            for &i in named {
                is_heldout[i] = true;
                write(&[&documents[i]], &mut heldout)?;
            }
        }
        Choice::Ranked(ranked) => {
            let mut bytes = HeldoutBytes::new(bytes_total);
            for &i in ranked {
                if bytes.has_share() && heldout.tokens() >= options.heldout_tokens_min {
                    break;
                }
                if bytes.take_if_it_fits(documents[i].bytes) {
                    is_heldout[i] = true;
                    write(&[&documents[i]], &mut heldout)?;
                }
            }
        }
    }
    let rest: Vec<&Document> =
        documents.iter().zip(&is_heldout).filter(|(_, held)| !**held).map(|(d, _)| d).collect();
    write(&rest, &mut train)?;

    let found = train.tokens() + heldout.tokens();
    if found < TOKENS_MIN {
        return Err(DataError::CannotSplit { found, needed: TOKENS_MIN });
    }
    if *choice == Choice::Position {
        let wanted = (found / HELDOUT_ONE_IN).max(options.heldout_tokens_min);
        let tail = wanted.clamp(2, found / 2);
        train = train.move_tail(found - tail, &mut heldout)?;
    }
    let train = train.finish(key, Split::Train)?;
    heldout.finish(key, Split::Heldout)?.publish()?;
    train.publish()
}

/// A number of tokens, at most 2^31, that decides on the width in which they are stored.
fn stored_vocab(documents: &[Document], tokenizer: &Tokenizer) -> u32 {
    let width = |document: &Document| match document.format {
        Format::Text => None,
        Format::Tokens(header) => Some(header.width),
    };
    match documents.iter().filter_map(width).max() {
        None => tokenizer.vocab_size(),
        Some(2) => 1 << 16,
        Some(_) => 1 << 31,
    }
}

#[cfg(test)]
mod tests;
