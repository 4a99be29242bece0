//! Settings as flat texts.

use std::collections::BTreeMap;

use serde_json::Value;

/// Flattens values with their keys, those of tables as `table.key`. Null values are omitted.
pub(crate) fn flatten(key: &str, value: &Value, flat: &mut BTreeMap<String, String>) {
    let text = match value {
        Value::Null => return,
        Value::Object(table) => {
            for (name, value) in table {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                flatten(&key, value, flat);
            }
            return;
        }
        Value::Array(values) => {
            let texts = values.iter().map(|it| it.as_str().map_or(it.to_string(), str::to_owned));
            texts.collect::<Vec<_>>().join(", ")
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    flat.insert(key.to_owned(), text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_paths() {
        let value = serde_json::json!({
            "steps": 9, "policy": null, "data": ["a", 2], "optimizer": {"beta1": 0.9}, "audit": true
        });
        let mut flat = BTreeMap::new();
        flatten("", &value, &mut flat);
        let rows: Vec<(&str, &str)> = flat.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let expected =
            [("audit", "true"), ("data", "a, 2"), ("optimizer.beta1", "0.9"), ("steps", "9")];
        assert_eq!(rows, expected);
    }
}
