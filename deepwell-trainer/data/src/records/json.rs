//! Records in JSON.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde_json::Deserializer;

use super::super::DataError;

type Work<'a> = dyn FnMut(&Value, &str) -> Result<(), DataError> + 'a;

/// Reads one value per line; blank lines are skipped.
pub(super) fn lines(
    path: &Path,
    content: &mut impl Read,
    work: &mut Work<'_>,
) -> Result<(), DataError> {
    let mut reader = BufReader::with_capacity(1 << 18, content);
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        let count = reader
            .read_until(b'\n', &mut line)
            .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
        if count == 0 {
            break;
        }
        let text = without_mark(&line, number == 1);
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let record_name = format!("line {number}");
        let value: Value =
            serde_json::from_slice(text).map_err(|error| broken(path, &record_name, &error))?;
        work(&value, &record_name)?;
    }
    Ok(())
}

/// Reads consecutive values, or a list of values.
pub(super) fn values(
    path: &Path,
    content: &mut impl Read,
    work: &mut Work<'_>,
) -> Result<(), DataError> {
    let mut text = Vec::new();
    content
        .read_to_end(&mut text)
        .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    let values = Deserializer::from_slice(without_mark(&text, true)).into_iter::<Value>();
    for (index, value) in values.enumerate() {
        let record_name = format!("value {}", index + 1);
        let value = value.map_err(|error| broken(path, &record_name, &error))?;
        if value.kind() != ValueKind::Seq {
            work(&value, &record_name)?;
            continue;
        }
        for (index, record) in value.try_iter().into_iter().flatten().enumerate() {
            work(&record, &format!("record {}", index + 1))?;
        }
    }
    Ok(())
}

/// Removes the byte order mark that some editors put at the start of a text.
fn without_mark(text: &[u8], is_start: bool) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").filter(|_| is_start).unwrap_or(text)
}

fn broken(path: &Path, record_name: &str, error: &serde_json::Error) -> DataError {
    DataError::RecordSyntax {
        path: path.to_owned(),
        place: record_name.to_owned(),
        message: error.to_string(),
    }
}
