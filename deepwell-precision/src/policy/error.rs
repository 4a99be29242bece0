//! Errors of a policy.

use thiserror::Error;

/// A policy that cannot be read, or that does not fit the tensors of a model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The TOML text is wrong at one place.
    #[error("{source_name}:{line}:{column}: {message}{hint}")]
    Toml {
        /// Name of the source, usually a file name.
        source_name: String,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// Description of the error.
        message: String,
        /// Empty, or a line that starts with `hint:`.
        hint: String,
    },
    /// No preset has this name.
    #[error(
        "expected one of {} as precision, got `{got}`{}",
        backticks(super::PRESETS),
        other(got)
    )]
    UnknownPreset {
        /// The unknown name.
        got: String,
    },
    /// A glob pattern does not parse.
    #[error("{place}glob `{glob}` is malformed: {message}")]
    Glob {
        /// Position of the rule, followed by a colon and a space, or empty.
        place: String,
        /// The pattern.
        glob: String,
        /// Description of the error.
        message: String,
    },
    /// A rule matches no tensor.
    #[error("{place}rule `{glob}` matches none of the {tensor_count} tensors{hint}")]
    NoMatch {
        /// Position of the rule, followed by a colon and a space, or empty.
        place: String,
        /// The pattern.
        glob: String,
        /// Number of tensors tested.
        tensor_count: usize,
        /// A line that starts with `hint:` and names the nearest tensors; empty without tensors.
        hint: String,
    },
    /// A tensor to be forced to BF16 does not exist.
    #[error("tensor `{name}`, to be forced to `bf16`, is none of the {tensor_count} tensors{hint}")]
    UnknownTensor {
        /// The unknown name.
        name: String,
        /// Number of tensors searched.
        tensor_count: usize,
        /// A line that starts with `hint:` and names the nearest tensors; empty without tensors.
        hint: String,
    },
}

/// A `hint:` line for names of formats in other programs.
fn other(name: &str) -> &'static str {
    match name.to_ascii_lowercase().as_str() {
        "fp8" | "float8" | "e4m3" | "fp8_e4m3" | "mxfp8-32" => {
            "\nhint: eight bits are `mxfp8-128` on Hopper and `mxfp8` elsewhere"
        }
        "hybrid" | "e5m2" | "fp8_e5m2" | "fp8-hybrid" => {
            "\nhint: `mxfp8-hybrid` has E5M2 gradients, `mxfp8-e5m2` E5M2 everywhere"
        }
        "fp6" | "float6" | "e2m3" | "e3m2" => "\nhint: six bits are `mxfp6`",
        "fp4" | "float4" | "e2m1" => "\nhint: four bits are `nvfp4` and `mxfp4`",
        "fp16" | "float16" | "half" | "bfloat16" => "\nhint: sixteen bits are `bf16`",
        "fp32" | "float32" | "float" | "tf32" => "\nhint: 32 bits are `f32`",
        _ => "",
    }
}

/// "`a`, `b`, `c`".
pub(super) fn backticks(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// A `hint:` line with the (at most three) names nearest to `wanted` by edit distance.
pub(super) fn nearest_hint<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> String {
    let mut ranked: Vec<(usize, &str)> =
        names.map(|name| (edit_distance(wanted, name), name)).collect();
    ranked.sort_by_key(|&(distance, _)| distance);
    ranked.dedup();
    let nearest: Vec<&str> = ranked.into_iter().take(3).map(|(_, name)| name).collect();
    if nearest.is_empty() {
        String::new()
    } else {
        format!("\nhint: the nearest names are {}", backticks(&nearest))
    }
}

/// A `hint:` line for the parser's message about an unknown key, if a listed key is a likely
/// misspelling.
pub(super) fn unknown_key_hint(message: &str) -> String {
    let mut words = message.split('`').skip(1).step_by(2);
    let Some(wanted) = words.next().filter(|_| message.starts_with("unknown field")) else {
        return String::new();
    };
    let ranked = words.map(|name| (edit_distance(wanted, name), name));
    match ranked.min() {
        Some((distance, name)) if distance <= 2 => format!("\nhint: the nearest key is `{name}`"),
        _ => String::new(),
    }
}

/// Levenshtein distance in characters; a `*` of the pattern matches any run at no cost.
fn edit_distance(pattern: &str, name: &str) -> usize {
    let name: Vec<char> = name.chars().collect();
    let mut row: Vec<usize> = (0..=name.len()).collect();
    for symbol in pattern.chars() {
        let mut diagonal = row[0];
        if symbol != '*' {
            row[0] += 1;
        }
        for (i, &letter) in name.iter().enumerate() {
            let above = row[i + 1];
            row[i + 1] = if symbol == '*' {
                above.min(row[i])
            } else {
                let substituted = diagonal + usize::from(symbol != letter);
                substituted.min(above + 1).min(row[i] + 1)
            };
            diagonal = above;
        }
    }
    row[name.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance() {
        for (pattern, name, expected) in [
            ("", "", 0),
            ("abc", "abc", 0),
            ("abc", "abd", 1),
            ("abc", "ab", 1),
            ("ab", "abc", 1),
            ("a*c", "axyzc", 0),
            ("a*d", "axyzc", 1),
            ("*", "anything", 0),
            ("layer.*.down", "layers.0.down", 1),
            ("layerz.*.down", "layers.0.down", 1),
            ("lxyers.*", "layers.0.down", 1),
        ] {
            assert_eq!(edit_distance(pattern, name), expected, "{pattern} {name}");
        }
    }
}
