//! The small part of YAML that MLflow's `meta.yaml` needs.

/// A text in single quotes.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''").replace(['\n', '\r'], " "))
}

/// The value of a key at the outermost level, without quotes.
pub(super) fn value_of(text: &str, key: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?.trim();
    let inner = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    Some(match (inner('\''), inner('"')) {
        (Some(inner), _) => inner.replace("''", "'"),
        (None, Some(inner)) => inner.replace("\\\"", "\"").replace("\\\\", "\\"),
        (None, None) => value.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        let text =
            "experiment_id: '0'\nname: it's \"mine\"\nother: \"a \\\"b\\\"\"\n  name: inner\n";
        let check = |key: &str, expected: Option<&str>| {
            assert_eq!(value_of(text, key).as_deref(), expected, "{key}");
        };
        check("experiment_id", Some("0"));
        check("name", Some("it's \"mine\""));
        check("other", Some("a \"b\""));
        check("lifecycle_stage", None);
        let line = format!("name: {}", quoted("it's\nmine"));
        assert_eq!(value_of(&line, "name").as_deref(), Some("it's mine"));
    }
}
