//! A byte-level BPE tokenizer learned from text.
//!
//! [`train`] takes the same inputs as [`Dataset::prepare`](super::Dataset::prepare), sets aside the
//! files that every data set of these inputs holds out first, counts the words of the remaining
//! files, learns merges of byte pairs (Sennrich et al. 2016, on bytes as in GPT-2) with the
//! `tokenizers` crate, measures the result on the held-out files, and writes a `tokenizer.json`.
//! The same text gives the same file, byte for byte, on any number of threads: merges are learned
//! from exact counts, and among equally frequent pairs the pair with older tokens is merged first.
//!
//! ```
//! use deepwell_data::Tokenizer;
//! use deepwell_data::bpe::{BpeOptions, train};
//! # fn main() -> Result<(), deepwell_data::DataError> {
//! let folder = tempfile::tempdir().unwrap();
//! std::fs::write(folder.path().join("a.txt"), "water in a deep well. ".repeat(100)).unwrap();
//! let options = BpeOptions {
//!     inputs: vec![folder.path().join("a.txt")],
//!     vocab_size: 270,
//!     out: folder.path().join("tokenizer.json"),
//!     ..BpeOptions::default()
//! };
//! let summary = train(&options, &mut |_| {})?;
//! assert_eq!((summary.vocab_size, summary.merges), (270, 13));
//! assert!(summary.bytes_per_token > Some(2.0));
//! assert_eq!(Tokenizer::from_file(&options.out)?.separator(), Some(0));
//! # Ok(())
//! # }
//! ```

mod corpus_splits;
mod measure;
mod merges;
mod output;
mod summary;
#[cfg(test)]
mod tests;
mod words;

use std::path::PathBuf;
use std::time::Instant;

pub use summary::{BpeSummary, BpeTimes};

use super::corpus::Corpus;
use super::records::Fields;
use super::source::{Document, Format};
use super::{DataError, Progress, Stage, Tokenizer};
use corpus_splits::CorpusSplits;
use measure::measure;

/// Name of the end-of-text token, token 0.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The smallest vocabulary: 256 bytes and [`END_OF_TEXT`].
pub const VOCAB_SIZE_MIN: u32 = 257;

/// The largest supported vocabulary, about four times the largest in use.
pub const VOCAB_SIZE_MAX: u32 = 1 << 20;

/// Inputs and settings of the training.
#[derive(Clone, Debug)]
pub struct BpeOptions {
    /// Files and folders of text, and patterns such as `texts/**/*.txt`. Empty: the default corpus.
    pub inputs: Vec<PathBuf>,
    /// Field of a record with its text or messages, as in [`DataOptions`](super::DataOptions).
    pub text_field: Option<String>,
    /// Cargo workspace whose locked dependencies are the default corpus.
    pub workspace: PathBuf,
    /// Tokens of the vocabulary; fewer if the text has no more pairs to merge.
    pub vocab_size: u32,
    /// Minimum number of occurrences of a merged pair.
    pub min_frequency: u64,
    /// Maximum bytes of text to learn from. The order of the files depends only on their names; the
    /// last file is used up to the limit. `None` takes all.
    pub bytes_max: Option<u64>,
    /// The file to write.
    pub out: PathBuf,
    /// Whether an existing file is overwritten.
    pub force: bool,
}

impl Default for BpeOptions {
    /// 32,000 tokens from the default corpus of the workspace in the current folder, from pairs
    /// that occur at least twice, to `tokenizer.json`.
    fn default() -> Self {
        Self {
            inputs: Vec::new(),
            text_field: None,
            workspace: PathBuf::from("."),
            vocab_size: 32_000,
            min_frequency: 2,
            bytes_max: None,
            out: PathBuf::from("tokenizer.json"),
            force: false,
        }
    }
}

/// Learns a tokenizer and writes it. `progress` is called for every scanned file, and for every few
/// megabytes counted or tokenized.
///
/// # Errors
///
/// [`DataError`]: an impossible vocabulary size; an output that exists or cannot be written; inputs
/// that are missing, unreadable, empty or not text. Errors that do not depend on the text are
/// reported before the text is read, and a failed training writes nothing.
pub fn train(
    options: &BpeOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<BpeSummary, DataError> {
    if !(VOCAB_SIZE_MIN..=VOCAB_SIZE_MAX).contains(&options.vocab_size) {
        return Err(DataError::VocabSize { found: options.vocab_size });
    }
    output::check(&options.out, options.force)?;
    let started = Instant::now();
    let fields = Fields { text: options.text_field.clone() };
    let corpus = Corpus::open(&options.inputs, &[], &options.workspace, true, &fields, progress)?;
    let is_tokens = |document: &&Document| matches!(document.format, Format::Tokens(_));
    if let Some(tokens) = corpus.documents.iter().find(is_tokens) {
        return Err(DataError::TokensNotText { path: tokens.path.clone() });
    }
    output::try_folder(&options.out)?;
    let scan_s = started.elapsed().as_secs_f64();

    let splits = CorpusSplits::new(&corpus.documents, &fields, options.bytes_max);
    let counting = Instant::now();
    let (words, trained) = words::count(&splits.train, progress)?;
    let count_s = counting.elapsed().as_secs_f64();

    let merging = Instant::now();
    progress(Progress { stage: Stage::Merge, bytes_done: 0, bytes_total: 0 });
    let distinct_words = words.len() as u64;
    let learned = merges::learn(words, options.vocab_size, options.min_frequency)?;
    let merge_s = merging.elapsed().as_secs_f64();

    let measuring = Instant::now();
    // Measure the tokenizer as a later run will read it.
    let tokenizer = Tokenizer::from_bytes(&options.out, learned.json.as_bytes())?;
    let measured = measure(&splits.heldout, &tokenizer, progress)?;
    output::write(&options.out, learned.json.as_bytes(), options.force)?;
    let measure_s = measuring.elapsed().as_secs_f64();

    let Corpus { documents, source, skipped } = corpus;
    let documents = documents.len() as u64;
    Ok(BpeSummary {
        path: options.out.clone(),
        source,
        skipped,
        files: documents,
        files_train: trained.files,
        bytes_train: trained.bytes,
        distinct_words,
        vocab_size: learned.vocab_size,
        vocab_size_asked: options.vocab_size,
        min_frequency: options.min_frequency,
        merges: learned.merges,
        end_of_text: END_OF_TEXT.to_owned(),
        files_heldout: measured.extent.files,
        bytes_heldout: measured.extent.bytes,
        tokens_heldout: measured.tokens,
        bytes_per_token: (measured.tokens > 0)
            .then(|| measured.extent.bytes as f64 / measured.tokens as f64),
        hash: blake3::hash(learned.json.as_bytes()).to_hex().to_string(),
        times: BpeTimes {
            scan_s,
            count_s,
            merge_s,
            measure_s,
            total_s: started.elapsed().as_secs_f64(),
        },
    })
}
