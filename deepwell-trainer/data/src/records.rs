//! Files of records: JSON lines, JSON, Parquet. Each record is a document, or a conversation.

mod fields;
mod json;
mod table;

use std::path::Path;

use minijinja::Value;

use super::DataError;
use super::compressed::{Compression, Content};
pub(crate) use fields::{Fields, Turn};

/// File format of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordFormat {
    /// One JSON object per line.
    JsonLines,
    /// Consecutive JSON objects, or a list of objects.
    Json,
    /// A table with a row for each record.
    Parquet,
}

impl RecordFormat {
    /// Format of a file with this start and this name, in lower case and without `.gz` or a similar
    /// suffix.
    pub(crate) fn of(name: &str, start: &[u8]) -> Option<RecordFormat> {
        if start.starts_with(b"PAR1") {
            return Some(RecordFormat::Parquet);
        }
        match name.rsplit_once('.')?.1 {
            "jsonl" | "ndjson" => Some(RecordFormat::JsonLines),
            "json" => Some(RecordFormat::Json),
            "parquet" => Some(RecordFormat::Parquet),
            _ => None,
        }
    }
}

/// Contents of a record.
#[derive(Clone, Debug)]
pub(crate) enum Record {
    /// A document.
    Text(String),
    /// A conversation, the input of a chat template.
    Chat(Box<Conversation>),
}

impl Record {
    /// Bytes of the record's text.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Record::Text(text) => text.len() as u64,
            Record::Chat(chat) => chat.turns.iter().map(Turn::bytes).sum(),
        }
    }
}

/// Messages, with the other fields of the record that a template reads.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    pub(crate) turns: Vec<Turn>,
    /// `tools` of the record.
    pub(crate) tools: Value,
    /// Position in the file, for errors: `line 7`.
    pub(crate) place: String,
}

/// Passes on the records of a file in order, and returns the hash of the bytes on disk. Records
/// without text are skipped.
pub(crate) fn for_each(
    path: &Path,
    compression: Compression,
    format: RecordFormat,
    fields: &Fields,
    work: &mut dyn FnMut(Record) -> Result<(), DataError>,
) -> Result<blake3::Hash, DataError> {
    let fail = |source| DataError::Read { path: path.to_owned(), source };
    let mut content = Content::open_as(path, compression).map_err(fail)?;
    let mut record = |value: &Value, place: &str| match fields.record(value, place, path)? {
        Some(record) => work(record),
        None => Ok(()),
    };
    match format {
        RecordFormat::JsonLines => json::lines(path, &mut content, &mut record)?,
        RecordFormat::Json => json::values(path, &mut content, &mut record)?,
        RecordFormat::Parquet => table::rows(path, fields, &mut record)?,
    }
    content.hash().map_err(fail)
}
