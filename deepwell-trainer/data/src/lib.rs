//! Text or token files to batches of tokens.
//!
//! # Brief overview
//!
//! [`Dataset::prepare`] takes files and folders of text, llm.c-style token files (`.bin`), or the
//! default corpus, which needs no download; scans every file once; holds out whole files; and
//! tokenizes with a [`Tokenizer`] into a [`TokenCache`]: two memory-mapped files that the next run
//! finds by the hash of the content. [`Loader`] draws training batches from the cache on a separate
//! thread: batch *i* depends only on the seed and *i*, so a resumed run needs no state except the
//! number of the next batch. [`HeldoutWindows`] returns the same held-out batches in the same order
//! every time. [`bpe::train`] makes a tokenizer from the same inputs.
//!
//! ```
//! use deepwell_data::{DataOptions, Dataset, Loader, Split};
//! # fn main() -> Result<(), deepwell_data::DataError> {
//! let folder = tempfile::tempdir().unwrap();
//! std::fs::write(folder.path().join("a.txt"), "water in a deep well. ".repeat(100)).unwrap();
//! let options = DataOptions {
//!     inputs: vec![folder.path().join("a.txt")],
//!     cache_dir: folder.path().join("cache"),
//!     ..DataOptions::default()
//! };
//! let dataset = Dataset::prepare(&options, &mut |_| {})?;
//! let mut loader = Loader::new(dataset.tokens().clone(), Split::Train, 4, 16, 7)?;
//! let batch = loader.next_batch()?;
//! assert_eq!(batch.inputs.len(), 4 * 16);
//! assert_eq!(batch.inputs[1], batch.targets[0]);
//! # Ok(())
//! # }
//! ```

pub mod bin;
mod bits;
pub mod bpe;
mod build;
mod cache;
mod cache_header;
mod cache_writer;
mod chat;
mod compressed;
mod container;
mod corpus;
mod cuts;
mod dataset;
mod encode;
mod error;
mod export_corpus;
mod glob;
mod heldout;
mod loader;
mod look;
mod map;
mod permute;
mod records;
mod skip;
mod source;
mod split;
mod summary;
mod token_files;
mod tokenizer;
mod workspace;

pub use cache::Tokens;
pub use cache::{TokenCache, Unusable};
pub use cache_header::Key;
pub use dataset::{DataOptions, Dataset, HELDOUT_TOKENS_MIN};
pub use error::DataError;
pub use export_corpus::{CorpusFolder, export_default_corpus};
pub use heldout::HeldoutWindows;
pub use loader::{Batch, Loader};
pub use skip::{SkipReason, Skipped};
pub use split::Split;
pub use summary::DatasetSummary;
pub use summary::grouped;
pub use token_files::are_token_files;
pub use tokenizer::{TextStream, Tokenizer};

/// Current work of [`Dataset::prepare`] or [`bpe::train`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Reading and hashing every file.
    Scan,
    /// Turning text into tokens.
    Tokenize,
    /// Counting the words of a tokenizer's training text.
    Count,
    /// Learning the merges of a tokenizer. The progress is unknown: both numbers are 0.
    Merge,
}

/// Progress of [`Dataset::prepare`] or [`bpe::train`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Current work.
    pub stage: Stage,
    /// Bytes of input done.
    pub bytes_done: u64,
    /// Bytes of input in all.
    pub bytes_total: u64,
}
