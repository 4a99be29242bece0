//! Fields of a record with its text or its messages.

use std::path::Path;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::super::DataError;
use super::{Conversation, Record};

/// Possible text fields, in order of preference.
const TEXTS: [&str; 2] = ["text", "content"];

/// Possible message fields, in order of preference.
const MESSAGES: [&str; 2] = ["messages", "conversations"];

/// The field with the text of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fields {
    /// The requested field; by default `text`, `content`, `messages` or `conversations`.
    pub(crate) text: Option<String>,
}

/// A message of a conversation: an object with `role` and `content`, as templates expect.
#[derive(Clone, Debug)]
pub(crate) struct Turn(pub(crate) Value);

impl Turn {
    /// Text of the message.
    pub(crate) fn text(&self) -> String {
        let content = field(&self.0, "content");
        match content.as_str() {
            Some(text) => text.to_owned(),
            None if content.is_undefined() || content.is_none() => String::new(),
            None => content.to_string(),
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.text().len() as u64
    }

    pub(crate) fn is_answer(&self) -> bool {
        field(&self.0, "role").as_str() == Some("assistant")
    }
}

impl Fields {
    /// Possible fields, in order.
    pub(crate) fn names(&self) -> Vec<&str> {
        match &self.text {
            Some(name) => vec![name],
            None => TEXTS.into_iter().chain(MESSAGES).collect(),
        }
    }

    /// Returns the text or the conversation of a record; none if empty.
    pub(crate) fn record(
        &self,
        record: &Value,
        place: &str,
        path: &Path,
    ) -> Result<Option<Record>, DataError> {
        let refuse = |found: String| DataError::RecordField {
            path: path.to_owned(),
            place: place.to_owned(),
            expected: self.expected(),
            found,
        };
        if record.kind() != ValueKind::Map {
            return Err(refuse(format!("{}, expected an object with fields", kind(record))));
        }
        let fields = self.names().into_iter().map(|name| (name, field(record, name)));
        let present: Vec<_> = fields.filter(|(_, value)| !value.is_undefined()).collect();
        let is_usable = |(_, value): &&(&str, Value)| value.as_str().is_some() || is_list(value);
        let Some((name, value)) = present.iter().find(is_usable) else {
            return Err(refuse(match present.first() {
                Some((name, value)) => format!("`{name}`, which is {}", kind(value)),
                None => list(record),
            }));
        };
        if let Some(text) = value.as_str() {
            return Ok((!text.is_empty()).then(|| Record::Text(text.to_owned())));
        }
        let messages = value.try_iter().map_err(|error| refuse(error.to_string()))?;
        let turns: Result<Vec<Turn>, String> = messages.map(turn).collect();
        let turns = turns.map_err(|what| refuse(format!("`{name}` with {what}")))?;
        let tools = field(record, "tools");
        let conversation = Conversation { turns, tools, place: place.to_owned() };
        Ok((!conversation.turns.is_empty()).then(|| Record::Chat(Box::new(conversation))))
    }

    fn expected(&self) -> String {
        match &self.text {
            Some(name) => format!("a text or messages in `{name}`, which `--text-field` names"),
            None => "a text in `text` or `content`, or messages in `messages` or `conversations`"
                .to_owned(),
        }
    }
}

/// Returns a field of an object, or undefined.
fn field(object: &Value, name: &str) -> Value {
    object.get_item(&Value::from(name)).unwrap_or_default()
}

fn is_list(value: &Value) -> bool {
    value.kind() == ValueKind::Seq
}

/// Converts a message with `role` and `content`, or a ShareGPT message with `from` and `value`.
fn turn(message: Value) -> Result<Turn, String> {
    if message.kind() != ValueKind::Map {
        return Err(format!("{} as a message", kind(&message)));
    }
    if field(&message, "role").as_str().is_some() {
        return Ok(Turn(message));
    }
    let (from, value) = (field(&message, "from"), field(&message, "value"));
    let (Some(from), false) = (from.as_str(), value.is_undefined()) else {
        return Err(format!(
            "a message of {}, expected `role` and `content`, or `from` and `value`",
            list(&message)
        ));
    };
    let role = match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "model" | "bot" | "chatgpt" => "assistant",
        "system" => "system",
        "tool" | "observation" => "tool",
        other => {
            return Err(format!(
                "a message from `{other}`, expected `human`, `gpt`, `system` or `tool`"
            ));
        }
    };
    Ok(Turn(Value::from_pairs([("role", Value::from(role)), ("content", value)])))
}

/// Lists the names of fields for an error message.
fn list(object: &Value) -> String {
    let names = object.try_iter().into_iter().flatten();
    let names: Vec<String> = names.take(20).map(|name| format!("`{name}`")).collect();
    match names.len() {
        0 => "no field".to_owned(),
        1 => format!("the field {}", names[0]),
        _ => format!("the fields {}", names.join(", ")),
    }
}

fn kind(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => "null",
        ValueKind::Bool => "a truth value",
        ValueKind::Number => "a number",
        ValueKind::String => "a string",
        ValueKind::Seq => "a list",
        ValueKind::Map => "an object",
        _ => "another value",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(field: Option<&str>, record: serde_json::Value, expected: Result<Option<&str>, &str>) {
        let fields = Fields { text: field.map(str::to_owned) };
        let record: Value = serde_json::from_str(&record.to_string()).unwrap();
        let got = fields.record(&record, "line 3", Path::new("a.jsonl"));
        let text = |record: Record| match record {
            Record::Text(text) => text,
            Record::Chat(chat) => {
                let of = |turn: &Turn, name| super::field(&turn.0, name);
                let part = |turn: &Turn| format!("{}:{}", of(turn, "role"), of(turn, "content"));
                chat.turns.iter().map(part).collect::<Vec<_>>().join(" ")
            }
        };
        let got = got.map(|record| record.map(text)).map_err(|error| error.to_string());
        match expected {
            Ok(expected) => assert_eq!(got.unwrap().as_deref(), expected),
            Err(part) => {
                let error = got.unwrap_err();
                assert!(error.contains(part), "{error}");
                assert!(error.starts_with("`a.jsonl`, line 3: "), "{error}");
            }
        }
    }

    #[test]
    fn a_record_is_its_text_or_its_messages() {
        check(None, json!({"text": "a", "content": "b"}), Ok(Some("a")));
        check(None, json!({"content": "b", "id": 1}), Ok(Some("b")));
        check(None, json!({"text": "", "id": 1}), Ok(None));
        check(None, json!({"text": null, "content": "b"}), Ok(Some("b")));
        check(Some("body"), json!({"text": "a", "body": "c"}), Ok(Some("c")));
        check(Some("body"), json!({"text": "a"}), Err("got the field `text`"));
        check(None, json!({"code": "a", "id": 1}), Err("got the fields `code`, `id`"));
        check(None, json!({"text": 5}), Err("got `text`, which is a number"));
        check(None, json!(["a"]), Err("got a list, expected an object"));
        check(None, json!({}), Err("got no field"));
        let question = json!({"role": "user", "content": "q"});
        let messages = json!([question, {"role": "assistant", "content": "a"}]);
        check(None, json!({"messages": messages}), Ok(Some("user:q assistant:a")));
        check(Some("m"), json!({"m": messages}), Ok(Some("user:q assistant:a")));
        check(None, json!({"messages": []}), Ok(None));
        let shared = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]);
        check(None, json!({"conversations": shared}), Ok(Some("user:q assistant:a")));
        check(None, json!({"conversations": [{"from": "x", "value": ""}]}), Err("from `x`"));
        check(None, json!({"messages": [{"who": "x"}]}), Err("a message of the field `who`"));
    }
}
