//! The TOML form of a policy, with errors that point at line and column.

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::error::PolicyError;
use super::{PRESETS, PrecisionPolicy, Rule};
use crate::{BlockShape, Fallback, Format, Granularity, ScaleRule};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    precision: Option<Spanned<String>>,
    scale_rule: Option<ScaleRule>,
    granularity: Option<Spanned<i64>>,
    weight_block: Option<BlockShape>,
    fallback: Option<Fallback>,
    keep_first_last_bf16: Option<bool>,
    #[serde(default)]
    rule: Vec<RuleFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    tensors: Spanned<String>,
    format: Format,
}

#[derive(Serialize)]
struct PolicyOut<'a> {
    precision: Format,
    scale_rule: ScaleRule,
    granularity: usize,
    weight_block: BlockShape,
    fallback: Fallback,
    keep_first_last_bf16: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rule: Vec<RuleOut<'a>>,
}

#[derive(Serialize)]
struct RuleOut<'a> {
    tensors: &'a str,
    format: Format,
}

impl PrecisionPolicy {
    /// Reads the TOML form that the module documentation shows. `precision` defaults to `mxfp8`
    /// and sets the defaults of the other keys. `source_name` names the text in errors.
    ///
    /// ```
    /// use deepwell_precision::{Fallback, PrecisionPolicy};
    /// let policy = PrecisionPolicy::from_toml("fallback = \"strict\"", "policy.toml")?;
    /// assert_eq!(policy.fallback(), Fallback::Strict);
    /// let error = PrecisionPolicy::from_toml("\nspeed = 3", "policy.toml").unwrap_err();
    /// assert!(error.to_string().starts_with("policy.toml:2:1: unknown field `speed`"));
    /// # Ok::<(), deepwell_precision::PolicyError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PolicyError::Toml`] for text that is not TOML, for unknown keys and for values out of
    /// their set; [`PolicyError::Glob`] for a malformed pattern.
    pub fn from_toml(text: &str, source_name: &str) -> Result<Self, PolicyError> {
        let at = |span_start: usize| line_and_column(text, span_start);
        let refuse = |span_start: usize, message: String, hint: &str| {
            let (line, column) = at(span_start);
            let source_name = source_name.to_owned();
            PolicyError::Toml { source_name, line, column, message, hint: hint.to_owned() }
        };
        let file: PolicyFile = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            // The parser puts its own hints on lines of their own; a message is one line here.
            refuse(start, error.message().trim().replace('\n', ", "), "")
        })?;

        let mut policy = match &file.precision {
            None => Self::mxfp8(),
            Some(name) => Self::preset(name.get_ref())
                .map_err(|error| refuse(name.span().start, error.to_string(), ""))?,
        };
        if let Some(elements) = &file.granularity {
            policy.granularity = match elements.get_ref() {
                32 => Granularity::G32,
                128 => Granularity::G128,
                other => {
                    let message = format!("expected `32` or `128` as granularity, got `{other}`");
                    return Err(refuse(elements.span().start, message, ""));
                }
            };
        }
        policy.scale_rule = file.scale_rule.unwrap_or(policy.scale_rule);
        policy.weight_block = file.weight_block.unwrap_or(policy.weight_block);
        policy.fallback = file.fallback.unwrap_or(policy.fallback);
        policy.keep_first_last_bf16 =
            file.keep_first_last_bf16.unwrap_or(policy.keep_first_last_bf16);
        for rule in file.rule {
            let (line, column) = at(rule.tensors.span().start);
            let rule = Rule {
                tensors: rule.tensors.into_inner(),
                format: rule.format,
                place: Some(format!("{source_name}:{line}:{column}")),
            };
            rule.matcher()?;
            policy.rules.push(rule);
        }
        Ok(policy)
    }

    /// The TOML form with every key written out. What guards forced is not part of it: it is the
    /// state of a run, kept in the checkpoint.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let rule = self
            .rules
            .iter()
            .map(|rule| RuleOut { tensors: &rule.tensors, format: rule.format })
            .collect();
        let out = PolicyOut {
            precision: self.format,
            scale_rule: self.scale_rule,
            granularity: self.granularity.elements(),
            weight_block: self.weight_block,
            fallback: self.fallback,
            keep_first_last_bf16: self.keep_first_last_bf16,
            rule,
        };
        toml::to_string(&out).expect("strings, integers and booleans under string keys are TOML")
    }
}

const _: () = assert!(PRESETS.len() == 6, "the module documentation lists the presets");

/// Line and column, both from 1, of a byte offset; columns count characters.
fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let mut offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    let before = &text[..offset];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}
