//! Parser for the flags of a command.

use std::ffi::OsString;

use anyhow::{Context, Result, bail};

/// Whether a flag is followed by a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    Nothing,
    /// A value, possibly a comma-separated list.
    Value,
}

/// Returns the flags in `arguments` in order, each with its value (empty for a flag without value).
///
/// # Errors
/// An argument that is not in `known`, a missing value, or a value for a flag that takes none.
pub(crate) fn flags(
    command: &str,
    arguments: &[OsString],
    known: &[(&'static str, Takes)],
) -> Result<Vec<(&'static str, String)>> {
    let mut found = Vec::new();
    let mut rest = arguments.iter().map(|argument| argument.to_string_lossy().into_owned());
    while let Some(argument) = rest.next() {
        let (name, attached) = match argument.split_once('=') {
            Some((name, value)) => (name.to_string(), Some(value.to_string())),
            None => (argument, None),
        };
        let Some(&(flag, takes)) = known.iter().find(|(flag, _)| *flag == name) else {
            let names: Vec<_> = known.iter().map(|(flag, _)| format!("`{flag}`")).collect();
            bail!("`{command}` does not know `{name}`\nhint: it takes {}", names.join(", "));
        };
        let value = match (takes, attached) {
            (Takes::Nothing, None) => String::new(),
            (Takes::Nothing, Some(value)) => bail!("`{flag}` takes no value, got `{value}`"),
            (Takes::Value, Some(value)) => value,
            (Takes::Value, None) => {
                rest.next().with_context(|| format!("`{flag}` takes a value, got nothing"))?
            }
        };
        if takes == Takes::Value && value.is_empty() {
            bail!("`{flag}` takes a value, got an empty one");
        }
        found.push((flag, value));
    }
    Ok(found)
}

/// Returns the parts of a comma-separated value.
pub(crate) fn list(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_their_values() {
        let known = [("--arch", Takes::Value), ("--json", Takes::Nothing)];
        let check = |arguments: &[&str], expected: Result<&[(&str, &str)], &str>| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            match (flags("kernels", &arguments, &known), expected) {
                (Ok(found), Ok(expected)) => {
                    let found: Vec<_> = found.iter().map(|(f, v)| (*f, v.as_str())).collect();
                    assert_eq!(found, expected, "{arguments:?}");
                }
                (Err(error), Err(expected)) => {
                    let error = format!("{error:#}");
                    assert!(error.contains(expected), "expected `{expected}` in `{error}`");
                }
                (found, _) => panic!("{arguments:?}: {found:?}"),
            }
        };
        check(&[], Ok(&[]));
        check(&["--json"], Ok(&[("--json", "")]));
        check(&["--arch", "a,b", "--json"], Ok(&[("--arch", "a,b"), ("--json", "")]));
        check(&["--arch=a", "--arch", "b"], Ok(&[("--arch", "a"), ("--arch", "b")]));
        check(&["--arch"], Err("`--arch` takes a value, got nothing"));
        check(&["--arch="], Err("`--arch` takes a value, got an empty one"));
        check(&["--json=1"], Err("`--json` takes no value, got `1`"));
        check(&["--jsn"], Err("it takes `--arch`, `--json`"));
        check(&["add"], Err("`kernels` does not know `add`"));
    }

    #[test]
    fn parts_of_a_list() {
        let check = |value: &str, expected: &[&str]| {
            assert_eq!(list(value).collect::<Vec<_>>(), expected, "{value}");
        };
        check("a,b", &["a", "b"]);
        check(" a , ,b,", &["a", "b"]);
        check("", &[]);
    }
}
