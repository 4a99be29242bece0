//! Differences between two JSON values.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;
use serde_json::Value;

/// A difference between two JSON values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JsonDifference {
    /// Path of the difference, such as `run.settings.steps` or `plan.precision[0].format`.
    pub path: String,
    /// Value in the first checkpoint; `None` if absent.
    pub a: Option<Value>,
    /// Value in the second checkpoint; `None` if absent.
    pub b: Option<Value>,
}

impl fmt::Display for JsonDifference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (a, b) = (short(self.a.as_ref()), short(self.b.as_ref()));
        write!(formatter, "{}: {a} / {b}", self.path)
    }
}

/// A value as short text.
fn short(value: Option<&Value>) -> String {
    const COLUMNS_MAX: usize = 60;
    let Some(value) = value else { return "nothing".to_string() };
    let text = value.to_string();
    match text.char_indices().nth(COLUMNS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns all differences of two JSON values, with paths such as `optimizer.beta1`.
#[must_use]
pub fn json_differences(a: &Value, b: &Value) -> Vec<JsonDifference> {
    let mut found = Vec::new();
    compare("", Some(a), Some(b), &mut found);
    found
}

/// Adds all differences of `a` and `b` at or below `path`.
pub(super) fn compare(
    path: &str,
    a: Option<&Value>,
    b: Option<&Value>,
    into: &mut Vec<JsonDifference>,
) {
    match (a, b) {
        (Some(a), Some(b)) if a == b => {}
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in names {
                let below = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                compare(&below, a.get(name), b.get(name), into);
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            for index in 0..a.len().max(b.len()) {
                compare(&format!("{path}[{index}]"), a.get(index), b.get(index), into);
            }
        }
        (a, b) => {
            into.push(JsonDifference { path: path.to_string(), a: a.cloned(), b: b.cloned() });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn differences_by_place() {
        let check = |a: Value, b: Value, expected: &[&str]| {
            let mut found = Vec::new();
            compare("run", Some(&a), Some(&b), &mut found);
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found, expected);
        };
        check(json!({ "a": [1, 2] }), json!({ "a": [1, 2] }), &[]);
        check(json!({ "a": 1 }), json!({ "a": 2 }), &["run.a: 1 / 2"]);
        check(json!({ "a": { "b": "x" } }), json!({ "a": {} }), &["run.a.b: \"x\" / nothing"]);
        check(json!([1, 2]), json!([1, 3, 4]), &["run[1]: 2 / 3", "run[2]: nothing / 4"]);
        let named = json_differences(&json!({ "a": { "b": 1 } }), &json!({ "a": { "b": 2 } }));
        assert_eq!(named[0].to_string(), "a.b: 1 / 2");
        check(json!({ "a": 1 }), json!([1]), &["run: {\"a\":1} / [1]"]);
        check(json!(null), json!(0.5), &["run: null / 0.5"]);
        let long = "\u{e9}".repeat(100);
        let expected = format!("run: \"{}... / 1", "\u{e9}".repeat(59));
        check(json!(long), json!(1), &[&expected]);
    }
}
