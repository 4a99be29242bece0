//! Reads keys of a JSON object and accounts for all of them.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::known_keys::{RESTRICTED, WITHOUT_EFFECT, says_nothing_special};
use crate::capture::CaptureError;

/// A value as JSON, shortened for messages.
fn shown(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    if text.chars().count() <= CHARS_MAX {
        return text;
    }
    text.chars().take(CHARS_MAX).chain("...".chars()).collect()
}

/// Description of a JSON value's type.
pub(in crate::capture) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Hint for a number or boolean written as a string.
fn quotes_hint(value: &Value) -> &'static str {
    if value.is_string() { "write it without quotes" } else { "" }
}

/// Reads keys of one object and records which keys were requested.
pub(in crate::capture) struct Keys<'a> {
    location: &'a str,
    prefix: String,
    object: &'a Map<String, Value>,
    known: BTreeSet<&'static str>,
}

impl<'a> Keys<'a> {
    pub(in crate::capture) fn new(
        location: &'a str,
        prefix: &str,
        object: &'a Map<String, Value>,
    ) -> Keys<'a> {
        Keys { location, prefix: prefix.to_string(), object, known: BTreeSet::new() }
    }

    /// The key as shown in messages.
    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Value of a key; `null` counts as absent.
    pub(in crate::capture) fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.known.insert(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is present, `null` or not.
    pub(in crate::capture) fn holds(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// Error for an invalid value.
    pub(in crate::capture) fn wrong(
        &self,
        key: &str,
        expected: &str,
        value: &Value,
        hint: &str,
    ) -> CaptureError {
        CaptureError::Value {
            location: self.location.to_string(),
            key: self.full(key),
            expected: expected.to_string(),
            got: shown(value),
            hint: hint.to_string(),
        }
    }

    /// Error for a value that selects unsupported mathematics.
    pub(in crate::capture) fn unsupported(
        &self,
        key: &str,
        value: &Value,
        hint: &str,
    ) -> CaptureError {
        CaptureError::Unsupported {
            location: self.location.to_string(),
            key: self.full(key),
            value: shown(value),
            hint: hint.to_string(),
        }
    }

    pub(in crate::capture) fn missing(&self, key: &str, hint: &str) -> CaptureError {
        CaptureError::MissingKey {
            location: self.location.to_string(),
            key: self.full(key),
            hint: hint.to_string(),
        }
    }

    /// An integer of at least 1.
    pub(in crate::capture) fn size(
        &mut self,
        key: &'static str,
    ) -> Result<Option<usize>, CaptureError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(size) if size > 0 => Ok(Some(size)),
            _ => {
                let hint = if value.is_f64() && value.as_f64() > Some(0.0) {
                    "write it without a decimal point"
                } else {
                    quotes_hint(value)
                };
                Err(self.wrong(key, "an integer of 1 or more", value, hint))
            }
        }
    }

    /// An integer of at least 0.
    pub(in crate::capture) fn count(
        &mut self,
        key: &'static str,
    ) -> Result<Option<usize>, CaptureError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(count) => Ok(Some(count)),
            None => Err(self.wrong(key, "an integer of 0 or more", value, quotes_hint(value))),
        }
    }

    pub(in crate::capture) fn required_size(
        &mut self,
        key: &'static str,
    ) -> Result<usize, CaptureError> {
        let hint = "transformers would take the size of Llama-2-7B in its place; state it";
        self.size(key)?.ok_or_else(|| self.missing(key, hint))
    }

    pub(in crate::capture) fn boolean(
        &mut self,
        key: &'static str,
    ) -> Result<Option<bool>, CaptureError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, "`true` or `false`", value, quotes_hint(value));
        value.as_bool().ok_or_else(wrong).map(Some)
    }

    /// A number greater than `least`, or equal to `least` if `inclusive`.
    pub(in crate::capture) fn number(
        &mut self,
        key: &'static str,
        least: f64,
        inclusive: bool,
    ) -> Result<Option<f64>, CaptureError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let above = |n: f64| n > least || (inclusive && n == least);
        match value.as_f64() {
            Some(number) if number.is_finite() && above(number) => Ok(Some(number)),
            _ => {
                let bound = if inclusive {
                    format!("a number of {least} or more")
                } else {
                    format!("a number greater than {least}")
                };
                Err(self.wrong(key, &bound, value, quotes_hint(value)))
            }
        }
    }

    pub(in crate::capture) fn string(
        &mut self,
        key: &'static str,
    ) -> Result<Option<&'a str>, CaptureError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, "a string", value, "");
        value.as_str().ok_or_else(wrong).map(Some)
    }

    /// Accounts for the keys of a `config.json` that were not requested. Returns the keys without
    /// effect, sorted. `architecture` is the only class allowed in `architectures`.
    ///
    /// `null` means absent and is allowed for every key, because transformers 5 writes `null` for
    /// unset keys. An unknown key has no effect if its value means "off", unless the key is one
    /// letter away from a known key.
    pub(in crate::capture) fn finish_config(
        self,
        architecture: &str,
    ) -> Result<Vec<String>, CaptureError> {
        let mut without_effect = Vec::new();
        for (key, value) in self.object {
            if self.known.contains(key.as_str()) {
                continue;
            }
            if value.is_null() {
                // Absent.
            } else if key == "architectures" {
                if *value != json!([architecture]) {
                    let hint = format!("supported: [\"{architecture}\"]");
                    return Err(self.unsupported(key, value, &hint));
                }
            } else if let Some(rule) = RESTRICTED.iter().find(|rule| rule.key == key) {
                if !(rule.allowed)(value) {
                    return Err(self.unsupported(key, value, rule.hint));
                }
            } else if !WITHOUT_EFFECT.contains(&key.as_str()) {
                let is_slip = self.known.iter().any(|known| edit_distance(key, known) == 1);
                if is_slip || !says_nothing_special(key, value) {
                    return Err(self.unknown(key, value));
                }
            }
            without_effect.push(key.clone());
        }
        without_effect.sort();
        Ok(without_effect)
    }

    /// Rejects keys that were not requested. `owner` names the object in errors.
    pub(in crate::capture) fn finish_nested(self, owner: &str) -> Result<(), CaptureError> {
        let is_unknown = |&(key, value): &(&String, &Value)| {
            !self.known.contains(key.as_str()) && !says_nothing_special(key, value)
        };
        match self.object.iter().find(is_unknown) {
            None => Ok(()),
            Some((key, value)) => Err(CaptureError::UnknownKey {
                location: self.location.to_string(),
                key: self.full(key),
                value: shown(value),
                hint: format!("{owner} takes {}", self.known_list()),
            }),
        }
    }

    fn known_list(&self) -> String {
        let names: Vec<String> = self.known.iter().map(|key| format!("`{key}`")).collect();
        names.join(", ")
    }

    fn unknown(&self, key: &str, value: &Value) -> CaptureError {
        let restricted = RESTRICTED.iter().map(|rule| rule.key);
        let similar = self
            .known
            .iter()
            .copied()
            .chain(WITHOUT_EFFECT.iter().copied())
            .chain(restricted)
            .chain(["architectures"])
            .map(|known| (edit_distance(key, known), known))
            .min()
            .filter(|(distance, _)| *distance <= 2);
        let hint = match similar {
            Some((_, known)) => format!("did you mean `{known}`?"),
            None => "it may change what the model computes; remove it if it does not".to_string(),
        };
        CaptureError::UnknownKey {
            location: self.location.to_string(),
            key: self.full(key),
            value: shown(value),
            hint,
        }
    }
}

/// Levenshtein distance: insertions, deletions and substitutions between two words.
pub(in crate::capture) fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut previous: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut current = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let substituted = previous[j] + usize::from(x != *y);
            current.push(substituted.min(previous[j + 1] + 1).min(current[j] + 1));
        }
        previous = current;
    }
    previous[b.len()]
}
