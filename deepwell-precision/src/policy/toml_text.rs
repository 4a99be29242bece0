//! The TOML form of a policy, with line and column in errors.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use toml::Spanned;

use super::error::{PolicyError, unknown_key_hint};
use super::operands::{OperandSetting, OperandSettings, overlay};
use super::{LastBlocks, PRESETS, PrecisionPolicy, Repair, Rule, name_or_table};
use crate::nvfp4::ScaleOrder;
use crate::{
    BlockShape, ElementFormat, Fallback, Format, GemmKind, GemmMode, Granularity, OperandClass,
    QuantFormat, ScaleRule,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    precision: Option<Spanned<String>>,
    scale_rule: Option<ScaleRule>,
    granularity: Option<Spanned<i64>>,
    weight_block: Option<BlockShape>,
    fallback: Option<Fallback>,
    keep_first_last_bf16: Option<bool>,
    gemm: Option<GemmMode>,
    scale_order: Option<ScaleOrder>,
    last_blocks: Option<Spanned<LastBlocks>>,
    gradient_element: Option<Spanned<ElementFormat>>,
    repair: Option<Spanned<Repair>>,
    fprop: Option<Operands<Fprop>>,
    dgrad: Option<Operands<Dgrad>>,
    wgrad: Option<Operands<Wgrad>>,
    #[serde(default)]
    rule: Vec<RuleFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    tensors: Spanned<String>,
    format: Option<Format>,
    fprop: Option<Operands<Fprop>>,
    dgrad: Option<Operands<Dgrad>>,
    wgrad: Option<Operands<Wgrad>>,
}

/// The operands of one GEMM, in argument order.
type Pair = [Option<OperandSetting>; 2];

/// A table of operands, or a format for both.
struct Operands<T>(T);

impl<'de, T: Deserialize<'de> + From<Pair>> Deserialize<'de> for Operands<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        name_or_table::deserialize(deserializer, |name| {
            let setting = OperandSetting::of_format(name.parse()?);
            Ok(T::from([Some(setting.clone()), Some(setting)]))
        })
        .map(Operands)
    }
}

/// Declares the table of a GEMM's operands.
macro_rules! operands_table {
    ($table:ident: $first:ident, $second:ident) => {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct $table {
            $first: Option<OperandSetting>,
            $second: Option<OperandSetting>,
        }

        impl From<Pair> for $table {
            fn from([$first, $second]: Pair) -> Self {
                Self { $first, $second }
            }
        }

        impl From<$table> for Pair {
            fn from(table: $table) -> Pair {
                [table.$first, table.$second]
            }
        }
    };
}
operands_table!(Fprop: activation, weight);
operands_table!(Dgrad: gradient, weight);
operands_table!(Wgrad: gradient, activation);

fn settings(
    fprop: Option<Operands<Fprop>>,
    dgrad: Option<Operands<Dgrad>>,
    wgrad: Option<Operands<Wgrad>>,
) -> OperandSettings {
    let pairs = [
        (GemmKind::Fprop, fprop.map(|table| table.0.into())),
        (GemmKind::Dgrad, dgrad.map(|table| table.0.into())),
        (GemmKind::Wgrad, wgrad.map(|table| table.0.into())),
    ];
    let mut settings = OperandSettings::new();
    for (kind, pair) in pairs {
        let said = OperandClass::of(kind).into_iter().zip(pair.unwrap_or([None, None]));
        settings.extend(said.filter_map(|(class, setting)| Some((class, setting?))));
    }
    settings
}

/// Settings of the operands of one GEMM, by operand name.
type Table<'a> = BTreeMap<&'static str, &'a OperandSetting>;

/// The tables of fprop, dgrad and wgrad.
fn tables(settings: &OperandSettings) -> [Table<'_>; 3] {
    [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad].map(|kind| {
        let said = settings.iter().filter(|(class, _)| class.gemm() == kind);
        said.map(|(class, setting)| (class.operand(), setting)).collect()
    })
}

#[derive(Serialize)]
struct PolicyOut<'a> {
    precision: Format,
    scale_rule: ScaleRule,
    granularity: usize,
    weight_block: BlockShape,
    fallback: Fallback,
    keep_first_last_bf16: bool,
    gemm: GemmMode,
    #[serde(skip_serializing_if = "super::is_default")]
    scale_order: ScaleOrder,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_blocks: Option<LastBlocks>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gradient_element: Option<ElementFormat>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repair: Option<Repair>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fprop: Table<'a>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    dgrad: Table<'a>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    wgrad: Table<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rule: Vec<RuleOut<'a>>,
}

#[derive(Serialize)]
struct RuleOut<'a> {
    tensors: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<Format>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fprop: Table<'a>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    dgrad: Table<'a>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    wgrad: Table<'a>,
}

impl RuleFile {
    /// The rule at its place; `refuse` makes an error from a place in the text.
    fn read(
        self,
        source_name: &str,
        refuse: &dyn Fn(usize, String, &str) -> PolicyError,
        at: &dyn Fn(usize) -> (usize, usize),
    ) -> Result<Rule, PolicyError> {
        let start = self.tensors.span().start;
        let (line, column) = at(start);
        let operands = settings(self.fprop, self.dgrad, self.wgrad);
        match self.format {
            None if operands.is_empty() => {
                let message = "expected `format`, `fprop`, `dgrad` or `wgrad` in a rule, got \
                               `tensors` alone";
                return Err(refuse(start, message.to_owned(), ""));
            }
            Some(format) if !format.is_quantized() && !operands.is_empty() => {
                let message = format!(
                    "expected a quantized format, or none, in a rule about operands, got `{format}`"
                );
                return Err(refuse(start, message, ""));
            }
            _ => {}
        }
        let rule = Rule {
            tensors: self.tensors.into_inner(),
            format: self.format,
            operands,
            place: Some(format!("{source_name}:{line}:{column}")),
            reason: None,
        };
        rule.matcher()?;
        Ok(rule)
    }
}

impl PrecisionPolicy {
    /// Reads the TOML form described in the module documentation. `precision` defaults to `mxfp8`
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
    /// [`PolicyError::Toml`] for invalid TOML, unknown keys and invalid values;
    /// [`PolicyError::Glob`] for a malformed pattern.
    pub fn from_toml(text: &str, source_name: &str) -> Result<Self, PolicyError> {
        let at = |span_start: usize| line_and_column(text, span_start);
        let refuse = |span_start: usize, message: String, hint: &str| {
            let (line, column) = at(span_start);
            let source_name = source_name.to_owned();
            PolicyError::Toml { source_name, line, column, message, hint: hint.to_owned() }
        };
        let file: PolicyFile = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            // The parser's hints are on separate lines; a message is a single line here.
            let message = error.message().trim().replace('\n', ", ");
            let hint = unknown_key_hint(&message);
            refuse(start, message, &hint)
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
        policy.gemm = file.gemm.unwrap_or(policy.gemm);
        policy.scale_order = file.scale_order.unwrap_or(policy.scale_order);
        if let Some(last) = &file.last_blocks {
            let (start, last) = (last.span().start, *last.get_ref());
            policy.last_blocks = last.checked().map_err(|message| refuse(start, message, ""))?;
        }
        if let Some(element) = &file.gradient_element {
            let own = policy.format.quantized().unwrap_or(QuantFormat::NVFP4);
            if !own.is_mx() {
                let message = format!(
                    "expected an MX format as `precision` with `gradient_element`, got `{}`",
                    policy.format
                );
                return Err(refuse(element.span().start, message, ""));
            }
            let element = *element.get_ref();
            policy.gradient_element = (element != own.element).then_some(element);
        }
        if let Some(repair) = &file.repair {
            let checked = repair.get_ref().checked();
            let checked = checked.map_err(|message| refuse(repair.span().start, message, ""))?;
            policy.repair = Some(checked);
        }
        overlay(&mut policy.operands, &settings(file.fprop, file.dgrad, file.wgrad));
        for rule in file.rule {
            policy.rules.push(rule.read(source_name, &refuse, &at)?);
        }
        Ok(policy)
    }

    /// The TOML form with all keys. Tensors forced by guards are not included: they are state of a
    /// run and stored in the checkpoint.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let rule = self
            .rules
            .iter()
            .map(|rule| {
                let [fprop, dgrad, wgrad] = tables(&rule.operands);
                RuleOut { tensors: &rule.tensors, format: rule.format, fprop, dgrad, wgrad }
            })
            .collect();
        let [fprop, dgrad, wgrad] = tables(&self.operands);
        // The preset may have some where this policy has none.
        let has_some = [Format::NVFP4, Format::MXFP4].contains(&self.format);
        let none = has_some.then_some(LastBlocks::NONE);
        let out = PolicyOut {
            precision: self.format,
            scale_rule: self.scale_rule,
            granularity: self.granularity.elements(),
            weight_block: self.weight_block,
            fallback: self.fallback,
            keep_first_last_bf16: self.keep_first_last_bf16,
            gemm: self.gemm,
            scale_order: self.scale_order,
            last_blocks: self.last_blocks.or(none),
            gradient_element: self.gradient_element,
            repair: self.repair,
            fprop,
            dgrad,
            wgrad,
            rule,
        };
        toml::to_string(&out).expect("strings, integers and booleans under string keys are TOML")
    }
}

const _: () = assert!(PRESETS.len() == 13, "the module documentation lists the presets");

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
