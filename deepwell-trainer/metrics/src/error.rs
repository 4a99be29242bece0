//! Errors of writing and reading metrics.

use std::io;
use std::path::PathBuf;

/// An error of the metrics files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetricsError {
    /// A file could not be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file could not be written, for example because the disk is full.
    #[error("cannot write `{}`: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A record could not be written as JSON.
    #[error("cannot write a record to `{}`: {source}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Error of the serializer.
        source: serde_json::Error,
    },
    /// A line other than the last is not a JSON object.
    #[error(
        "`{}` line {line}: expected a JSON object, got `{start}`\nhint: the file was changed by \
         something else; move it away to begin a new one", path.display()
    )]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// First characters of the line.
        start: String,
    },
    /// An event file is damaged.
    #[error("event file `{}`, byte {offset}: {what}", path.display())]
    BadEvent {
        /// The file.
        path: PathBuf,
        /// Offset of the record.
        offset: u64,
        /// Description of the error.
        what: &'static str,
    },
}
