//! Format of each tensor's GEMMs.
//!
//! A policy is a preset, a few settings and a list of glob rules; [`PrecisionPolicy::assign`] turns
//! it into one [`Assignment`] per tensor of a model. The file form, in which every key is optional:
//!
//! ```toml
//! precision = "mxfp8"           # f32 | bf16 | mxfp8 | mxfp8-floor | mxfp8-128 | mxfp8-2d |
//!                               # mxfp8-hybrid | mxfp8-e5m2 | mxfp6 | mxfp6-e2m3 | mxfp6-e3m2 |
//!                               # mxfp4 | nvfp4
//! scale_rule = "rceil"          # rceil | floor | min_error
//! granularity = 32              # 32 | 128
//! weight_block = "row"          # row | square
//! gradient_element = "e5m2"     # elements of gradients in MX formats; the default of mxfp8-hybrid
//! fallback = "safe"             # safe | strict | off
//! keep_first_last_bf16 = true   # the first and the last linear tensor stay BF16
//! scale_order = "deepwell"      # deepwell | te: arithmetic of NVFP4's scales
//! last_blocks = { percent = 15, format = "mxfp8" }    # default of nvfp4, mxfp4; 0 for none
//! repair = { forward = "bf16", percent = 18 }    # fprop in BF16 in the last 18 % of the steps;
//!                               # `spike_steps = 200`: also so long after a loss spike
//!
//! gemm = "native"               # native | emulated: BF16 GEMMs on dequantized operands
//!
//! [wgrad]                       # operands of one GEMM, of every quantized tensor
//! gradient = { block = "row", scale_rule = "floor" }
//!
//! [[rule]]                      # later rules win over earlier ones, rules over defaults
//! tensors = "*.mlp.down_proj.*"
//! format = "bf16"
//!
//! [[rule]]                      # without a format: refines tensors that are quantized
//! tensors = "*.self_attn.v_proj.*"
//! dgrad.weight = "bf16"         # this operand in BF16
//! wgrad = "bf16"                # both operands in BF16
//! ```
//!
//! The three GEMMs of a linear tensor are `fprop` (of `activation` and `weight`), `dgrad` (of
//! `gradient` and `weight`) and `wgrad` (of `gradient` and `activation`). An operand is the
//! name of a format (`"mxfp8"`, `"mxfp8-e5m2"`, `"mxfp6-e2m3"`, `"mxfp6-e3m2"`, `"mxfp4"`,
//! `"nvfp4"`, `"bf16"`) or a table with any of the keys `format`, `element`, `scale_rule`,
//! `granularity`, `block`, `rounding` (`nearest`, `stochastic`), in four bits `hadamard` and in
//! NVFP4 `four_six` (`true`, `false`). A GEMM with one quantized
//! operand is a BF16 GEMM on that operand dequantized: it shows the effect of this quantization on
//! the loss and saves no time. A rule with a format starts again from the defaults for its tensors.
//!
//! A `*` in a glob matches any run of characters, dots included; `?` matches one, `[ab]` one of a
//! set and `{a,b}` one of several words.

use std::collections::{BTreeMap, HashMap, HashSet};

use globset::{Glob, GlobMatcher};
use serde::{Deserialize, Serialize};

use crate::nvfp4::ScaleOrder;
use crate::{
    Assignment, BlockShape, ElementFormat, Fallback, Format, GemmMode, Granularity, OperandClass,
    QuantFormat, Role, ScaleRule, TensorUse,
};

mod error;
mod name_or_table;
mod operands;
mod recipe;
mod repair;
mod toml_text;

pub use error::PolicyError;
use error::nearest_hint;
pub use operands::OperandSetting;
use operands::{OperandSettings, overlay};
use recipe::block_count;
pub use recipe::{LastBlocks, RecipePart};
pub use repair::Repair;

/// Names accepted by [`PrecisionPolicy::preset`].
pub const PRESETS: &[&str] = &[
    "f32",
    "bf16",
    "mxfp8",
    "mxfp8-floor",
    "mxfp8-128",
    "mxfp8-2d",
    "mxfp8-hybrid",
    "mxfp8-e5m2",
    "mxfp6",
    "mxfp6-e2m3",
    "mxfp6-e3m2",
    "mxfp4",
    "nvfp4",
];

/// Formats by role, by position and by glob. See the module documentation for the TOML form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrecisionPolicy {
    format: Format,
    scale_rule: ScaleRule,
    granularity: Granularity,
    weight_block: BlockShape,
    fallback: Fallback,
    keep_first_last_bf16: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    gemm: GemmMode,
    #[serde(default, skip_serializing_if = "is_default")]
    operands: OperandSettings,
    #[serde(default, skip_serializing_if = "is_default")]
    scale_order: ScaleOrder,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_blocks: Option<LastBlocks>,
    /// Elements of gradients in tensors of the policy's own format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gradient_element: Option<ElementFormat>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    repair: Option<Repair>,
    rules: Vec<Rule>,
    forced_bf16: Vec<Forced>,
}

/// Tensors whose names match `tensors` get `format`, then the settings of `operands`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    tensors: String,
    /// `None` keeps the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<Format>,
    #[serde(default, skip_serializing_if = "is_default")]
    operands: OperandSettings,
    /// Position in the source, "file:line:column", for messages.
    #[serde(default)]
    place: Option<String>,
    /// Reason in reports; if absent, the rule itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Forced {
    tensor: String,
    reason: String,
    /// BF16, or MXFP8 for a tensor of fewer bits.
    #[serde(default = "bf16", skip_serializing_if = "is_bf16")]
    format: Format,
}

fn bf16() -> Format {
    Format::Bf16
}

fn is_bf16(format: &Format) -> bool {
    *format == Format::Bf16
}

/// Intermediate decision about a tensor.
struct Decision {
    format: Format,
    operands: OperandSettings,
    reason: String,
}

/// Names the operands whose elements are not those of the tensor's format, for a reason.
fn other_elements(format: Format, operands: &[Option<QuantFormat>; 6]) -> String {
    let Some(own) = format.quantized() else { return String::new() };
    let mut others: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (class, operand) in OperandClass::ALL.iter().zip(operands) {
        if let Some(operand) = operand.filter(|operand| operand.element != own.element) {
            others.entry(operand.name()).or_default().push(class.name());
        }
    }
    let named = others.iter().map(|(name, of)| format!("; {} in `{name}`", of.join(" and ")));
    named.collect()
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl PrecisionPolicy {
    /// MXFP8 for every linear tensor of the blocks and the experts, except for the first and the
    /// last such tensor in execution order, which stay BF16; BF16 for embeddings, output head,
    /// norms and router. E4M3, RCEIL, one exponent per 1 x 32 block.
    #[must_use]
    pub fn mxfp8() -> Self {
        Self {
            format: Format::MXFP8,
            scale_rule: ScaleRule::Rceil,
            granularity: Granularity::G32,
            weight_block: BlockShape::Row,
            fallback: Fallback::Safe,
            keep_first_last_bf16: true,
            gemm: GemmMode::Native,
            operands: OperandSettings::new(),
            scale_order: ScaleOrder::Deepwell,
            last_blocks: None,
            gradient_element: None,
            repair: None,
            rules: Vec::new(),
            forced_bf16: Vec::new(),
        }
    }

    /// BF16 for everything.
    #[must_use]
    pub fn bf16() -> Self {
        Self { format: Format::Bf16, ..Self::mxfp8() }
    }

    /// F32 for everything.
    #[must_use]
    pub fn f32() -> Self {
        Self { format: Format::F32, ..Self::mxfp8() }
    }

    /// The policy of one of [`PRESETS`]: `f32`, `bf16`, `mxfp8`; `mxfp8-floor` with the OCP floor
    /// scale rule; `mxfp8-128` with one exponent per 128 elements and 128 x 128 weight blocks;
    /// `mxfp8-2d` with 32 x 32 weight blocks; `mxfp8-hybrid` with E5M2 gradients; `mxfp6`, of E2M3
    /// with E3M2 gradients; `mxfp8-e5m2`, `mxfp6-e2m3` and `mxfp6-e3m2` with the same elements
    /// everywhere; `mxfp4` and `nvfp4` with the recipes of four bits.
    ///
    /// # Errors
    ///
    /// [`PolicyError::UnknownPreset`] lists the valid names.
    pub fn preset(name: &str) -> Result<Self, PolicyError> {
        let mxfp8 = Self::mxfp8();
        Ok(match name {
            "f32" => Self::f32(),
            "bf16" => Self::bf16(),
            "mxfp8" => mxfp8,
            "mxfp8-floor" => Self { scale_rule: ScaleRule::OcpFloor, ..mxfp8 },
            "mxfp8-128" => {
                Self { granularity: Granularity::G128, weight_block: BlockShape::Square, ..mxfp8 }
            }
            "mxfp8-2d" => Self { weight_block: BlockShape::Square, ..mxfp8 },
            "mxfp8-hybrid" => mxfp8.with_part(RecipePart::GradientElement),
            "mxfp6" => Self { format: Format::mx(ElementFormat::E2M3), ..mxfp8 }
                .with_part(RecipePart::GradientElement),
            "mxfp8-e5m2" => Self { format: Format::mx(ElementFormat::E5M2), ..mxfp8 },
            "mxfp6-e2m3" => Self { format: Format::mx(ElementFormat::E2M3), ..mxfp8 },
            "mxfp6-e3m2" => Self { format: Format::mx(ElementFormat::E3M2), ..mxfp8 },
            "mxfp4" => Self::mxfp4(),
            "nvfp4" => Self::nvfp4(),
            _ => return Err(PolicyError::UnknownPreset { got: name.to_owned() }),
        })
    }

    /// Reaction of the guards to GEMMs that offend.
    #[must_use]
    pub fn fallback(&self) -> Fallback {
        self.fallback
    }

    /// Sets the reaction to offences.
    #[must_use]
    pub fn with_fallback(self, fallback: Fallback) -> Self {
        Self { fallback, ..self }
    }

    /// Sets the granularity.
    #[must_use]
    pub fn with_granularity(self, granularity: Granularity) -> Self {
        Self { granularity, ..self }
    }

    /// Format of linear tensors without a default, a rule or a guard for the tensor.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Quantization of weights without settings for one of their GEMMs.
    #[must_use]
    pub fn weight_format(&self) -> QuantFormat {
        self.of_weights(self.format.quantized().unwrap_or_default())
    }

    /// Quantization of activations and gradients without settings for one of their GEMMs.
    #[must_use]
    pub fn activation_format(&self) -> QuantFormat {
        self.of_activations(self.format.quantized().unwrap_or_default())
    }

    fn of_weights(&self, format: QuantFormat) -> QuantFormat {
        self.of_activations(format).with_shape(self.weight_block)
    }

    fn of_activations(&self, format: QuantFormat) -> QuantFormat {
        let format = format.with_scale_rule(self.scale_rule).with_granularity(self.granularity);
        format.with_order(self.scale_order)
    }

    /// Other elements in tensors of the policy's own format; those of rules keep theirs.
    fn of_gradients(&self, format: QuantFormat) -> QuantFormat {
        let is_own = self.format.quantized().is_some_and(|own| own.is_of_family(&format));
        let element = self.gradient_element.filter(|_| is_own).unwrap_or(format.element);
        self.of_activations(format.with_element(element))
    }

    /// Adds a rule, which takes precedence over earlier rules.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn with_rule(self, tensors: &str, format: Format) -> Result<Self, PolicyError> {
        self.with_rule_of(tensors, format, None)
    }

    /// Adds a rule with a reason for reports.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn with_rule_because(
        self,
        tensors: &str,
        format: Format,
        reason: &str,
    ) -> Result<Self, PolicyError> {
        self.with_rule_of(tensors, format, Some(reason.to_owned()))
    }

    /// Adds a rule with a reason for reports, to MXFP8 with all operands rounded to nearest in
    /// blocks of one row. In a policy of NVFP4, [`PrecisionPolicy::with_rule_because`] would give
    /// the tensors the rounding and the square blocks of the recipe.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn with_mxfp8_because(self, tensors: &str, reason: &str) -> Result<Self, PolicyError> {
        self.with_operands_of(
            tensors,
            Format::MXFP8,
            Some(reason.to_owned()),
            LastBlocks::operands(),
        )
    }

    fn with_rule_of(
        self,
        tensors: &str,
        format: Format,
        reason: Option<String>,
    ) -> Result<Self, PolicyError> {
        self.with_operands_of(tensors, format, reason, OperandSettings::new())
    }

    fn with_operands_of(
        mut self,
        tensors: &str,
        format: Format,
        reason: Option<String>,
        operands: OperandSettings,
    ) -> Result<Self, PolicyError> {
        let tensors = tensors.to_owned();
        let rule = Rule { tensors, format: Some(format), operands, place: None, reason };
        rule.matcher()?;
        self.rules.push(rule);
        Ok(self)
    }

    /// Forces `tensors`, pairs of a full name and a reason, to BF16 from any lower precision,
    /// regardless of rules. A newer reason for a name replaces the older reason. Used by the
    /// guards.
    #[must_use]
    pub fn force_bf16<N, R>(self, tensors: impl IntoIterator<Item = (N, R)>) -> Self
    where
        N: Into<String>,
        R: Into<String>,
    {
        self.force(Format::Bf16, tensors)
    }

    /// [`PrecisionPolicy::force_bf16`] for any format. [`Format::MXFP8`] changes only tensors in
    /// formats of fewer bits, all of whose operands are then rounded to nearest in blocks of one
    /// row.
    #[must_use]
    pub fn force<N, R>(mut self, format: Format, tensors: impl IntoIterator<Item = (N, R)>) -> Self
    where
        N: Into<String>,
        R: Into<String>,
    {
        let of = |(tensor, reason): (N, R)| Forced {
            tensor: tensor.into(),
            reason: reason.into(),
            format,
        };
        self.forced_bf16.extend(tensors.into_iter().map(of));
        // The newest of each name. A model has thousands.
        let mut known = HashSet::new();
        let is_newest: Vec<bool> =
            self.forced_bf16.iter().rev().map(|forced| known.insert(&forced.tensor)).collect();
        let mut is_newest = is_newest.into_iter().rev();
        self.forced_bf16.retain(|_| is_newest.next().unwrap_or_default());
        self
    }

    /// Removes all forced tensors.
    #[must_use]
    pub fn without_forced(mut self) -> Self {
        self.forced_bf16.clear();
        self
    }

    /// Restricts the policy to a part of a model with tensors `names`: removes rules and forced
    /// names that match none of the tensors.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when a pattern is malformed.
    pub fn of_part(mut self, names: &[&str]) -> Result<Self, PolicyError> {
        let mut rules = Vec::with_capacity(self.rules.len());
        for rule in self.rules {
            let matcher = rule.matcher()?;
            if names.iter().any(|name| matcher.is_match(name)) {
                rules.push(rule);
            }
        }
        self.rules = rules;
        let names: HashSet<&str> = names.iter().copied().collect();
        self.forced_bf16.retain(|forced| names.contains(forced.tensor.as_str()));
        Ok(self)
    }

    /// Returns one decision per tensor. `tensors` are in execution order, which determines the
    /// first and the last linear tensor. Precedence: forced, then the last rule that matches, then
    /// first and last, then the last blocks, then the role.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NoMatch`] for a rule that matches no tensor and
    /// [`PolicyError::UnknownTensor`] for a forced name that does not exist, each with the nearest
    /// names; [`PolicyError::Glob`] for a malformed pattern.
    pub fn assign(&self, tensors: &[TensorUse<'_>]) -> Result<Vec<Assignment>, PolicyError> {
        let mut decisions = self.defaults(tensors);

        for rule in &self.rules {
            let matcher = rule.matcher()?;
            let mut matched = false;
            for (tensor, decision) in tensors.iter().zip(&mut decisions) {
                if matcher.is_match(tensor.name) {
                    rule.refine(decision, &self.operands);
                    matched = true;
                }
            }
            if !matched {
                return Err(PolicyError::NoMatch {
                    place: rule.place_prefix(),
                    glob: rule.tensors.clone(),
                    tensor_count: tensors.len(),
                    hint: nearest_hint(&rule.tensors, tensors.iter().map(|tensor| tensor.name)),
                });
            }
        }
        let forced: HashMap<&str, &Forced> =
            self.forced_bf16.iter().map(|forced| (forced.tensor.as_str(), forced)).collect();
        let mut matched = HashSet::new();
        for (tensor, decision) in tensors.iter().zip(&mut decisions) {
            let Some(&&Forced { format, ref reason, .. }) = forced.get(tensor.name) else {
                continue;
            };
            matched.insert(tensor.name);
            let is_lower = match format {
                Format::Bf16 => decision.format.is_quantized(),
                _ => decision.format.has_fewer_bits_than_mxfp8(),
            };
            if is_lower {
                let (operands, reason) = (LastBlocks::operands(), reason.clone());
                *decision = Decision { format, operands, reason };
            }
        }
        let is_unknown = |forced: &&Forced| !matched.contains(forced.tensor.as_str());
        if let Some(forced) = self.forced_bf16.iter().find(is_unknown) {
            return Err(PolicyError::UnknownTensor {
                name: forced.tensor.clone(),
                tensor_count: tensors.len(),
                hint: nearest_hint(&forced.tensor, tensors.iter().map(|tensor| tensor.name)),
            });
        }
        Ok(decisions.into_iter().map(|decision| self.assignment(decision)).collect())
    }

    fn assignment(&self, Decision { format, operands, reason }: Decision) -> Assignment {
        let (format, operands) = match format {
            Format::Quantized(quantized) => (format, self.resolve(quantized, &operands)),
            _ => (format, [None; 6]),
        };
        let is_plain = format.is_quantized() && operands == [None; 6];
        let format = if is_plain { Format::Bf16 } else { format };
        let reason = reason + &other_elements(format, &operands);
        Assignment { format, operands, gemm: self.gemm, reason }
    }

    /// Decisions without rules and forced tensors.
    fn defaults(&self, tensors: &[TensorUse<'_>]) -> Vec<Decision> {
        let ends = self.first_and_last(tensors);
        let blocks = block_count(tensors);
        let decide = |(index, tensor): (usize, &TensorUse<'_>)| {
            let (format, reason) = self.default_format(index, tensor, ends);
            let last = self.last_blocks.filter(|_| format.is_quantized());
            let last = last.map(|last| (last, last.first(blocks)));
            match last.filter(|&(_, first)| tensor.layer.is_some_and(|layer| layer >= first)) {
                Some((last, first)) => Decision {
                    format: last.format,
                    operands: LastBlocks::operands(),
                    reason: format!(
                        "one of the last {} of {blocks} blocks ({} %)",
                        blocks - first,
                        last.percent
                    ),
                },
                None => Decision { format, operands: self.operands.clone(), reason },
            }
        };
        tensors.iter().enumerate().map(decide).collect()
    }

    /// Indices of the first and the last tensor of a quantized role, if these are kept in BF16.
    fn first_and_last(&self, tensors: &[TensorUse<'_>]) -> Option<(usize, usize)> {
        if !self.keep_first_last_bf16 {
            return None;
        }
        let is_block_linear = |tensor: &TensorUse<'_>| is_low_precision_role(tensor.role);
        let first = tensors.iter().position(is_block_linear)?;
        let last = tensors.iter().rposition(is_block_linear)?;
        Some((first, last))
    }

    fn default_format(
        &self,
        index: usize,
        tensor: &TensorUse<'_>,
        ends: Option<(usize, usize)>,
    ) -> (Format, String) {
        let format = self.format;
        if matches!(format, Format::F32 | Format::Bf16) {
            return (format, format!("precision `{format}` applies to every tensor"));
        }
        if !is_low_precision_role(tensor.role) {
            let role = tensor.role;
            return (Format::Bf16, format!("role `{role}` stays `bf16`"));
        }
        match ends {
            Some((first, _)) if index == first => {
                (Format::Bf16, "first linear tensor in execution order stays `bf16`".to_owned())
            }
            Some((_, last)) if index == last => {
                (Format::Bf16, "last linear tensor in execution order stays `bf16`".to_owned())
            }
            _ => (format, format!("default of precision `{format}`")),
        }
    }
}

/// Whether a block-scaled policy quantizes tensors of this role by default.
fn is_low_precision_role(role: Role) -> bool {
    matches!(role, Role::Linear | Role::Expert)
}

impl Rule {
    /// Applies the rule to a tensor that it matches. `defaults` are the policy's own settings.
    fn refine(&self, decision: &mut Decision, defaults: &OperandSettings) {
        if let Some(format) = self.format {
            let by_rule = || format!("rule `{}`", self.tensors);
            let reason = self.reason.clone().unwrap_or_else(by_rule);
            *decision = Decision { format, operands: defaults.clone(), reason };
        } else if decision.format.is_quantized() {
            decision.reason += &format!(", operands by rule `{}`", self.tensors);
        }
        overlay(&mut decision.operands, &self.operands);
    }

    fn matcher(&self) -> Result<GlobMatcher, PolicyError> {
        Glob::new(&self.tensors).map(|glob| glob.compile_matcher()).map_err(|error| {
            PolicyError::Glob {
                place: self.place_prefix(),
                glob: self.tensors.clone(),
                message: error.kind().to_string(),
            }
        })
    }

    fn place_prefix(&self) -> String {
        self.place.as_ref().map(|place| format!("{place}: ")).unwrap_or_default()
    }
}

#[cfg(test)]
mod operand_tests;
#[cfg(test)]
mod tests;
