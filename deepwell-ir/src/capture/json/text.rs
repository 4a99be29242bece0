//! The text of a configuration, parsed as a JSON object.

use std::path::Path;

use serde_json::{Map, Value};

use super::kind;
use crate::capture::CaptureError;

/// Reads a `config.json`, given directly or by its model folder; returns the text and a name for
/// messages.
pub(in crate::capture) fn read_text(path: &Path) -> Result<(String, String), CaptureError> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let bytes = std::fs::read(&file).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CaptureError::NotFound {
            path: file.clone(),
            expected: "a config.json".to_string(),
            hint: "give a Hugging Face model folder or its config.json".to_string(),
        },
        _ => CaptureError::Io { path: file.clone(), source },
    })?;
    let location = file.display().to_string();
    let text = String::from_utf8(bytes).map_err(|_| CaptureError::Form {
        location: location.clone(),
        expected: "UTF-8 text",
        got: "other bytes".to_string(),
    })?;
    Ok((text, location))
}

/// Parses `text` as a JSON object.
pub(in crate::capture) fn parse_object(
    text: &str,
    location: &str,
) -> Result<Map<String, Value>, CaptureError> {
    let value: Value = serde_json::from_str(text).map_err(|error| CaptureError::Json {
        location: location.to_string(),
        line: error.line(),
        column: error.column(),
        message: strip_position(&error.to_string()),
    })?;
    match value {
        Value::Object(object) => Ok(object),
        other => Err(CaptureError::Form {
            location: location.to_string(),
            expected: "a JSON object",
            got: kind(&other).to_string(),
        }),
    }
}

/// The parser's message without the position, which the error shows separately.
fn strip_position(message: &str) -> String {
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_string(),
        None => message.to_string(),
    }
}
