//! Settings of a policy for operands of GEMMs, and builders for ablations.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{PolicyError, PrecisionPolicy, Rule};
use crate::{
    BlockShape, ElementFormat, ElementRounding, Format, GemmMode, Granularity, Hadamard16,
    OperandClass, QuantFormat, ScaleRule,
};

/// Settings of a policy or a rule for one operand; `None` keeps the previous setting. In a file it
/// is a table, or the name of the format if no other key is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperandSetting {
    /// Whether the operand is quantized, and the kind of elements and scales.
    pub format: Option<Format>,
    /// Format of the elements.
    pub element: Option<ElementFormat>,
    /// How scales are computed from magnitudes.
    pub scale_rule: Option<ScaleRule>,
    /// Number of elements with one exponent.
    pub granularity: Option<Granularity>,
    /// Extent of a block.
    pub block: Option<BlockShape>,
    /// Rounding of elements.
    pub rounding: Option<ElementRounding>,
    /// Whether formats of four bits transform the operand with [`Hadamard16::TRAINING`] before
    /// quantization.
    pub hadamard: Option<bool>,
    /// Whether NVFP4 may map the largest magnitude of a block to 4 instead of 6.
    pub four_six: Option<bool>,
}

/// Settings of the operands that have any.
pub(super) type OperandSettings = BTreeMap<OperandClass, OperandSetting>;

impl OperandSetting {
    /// Sets the format alone.
    #[must_use]
    pub fn of_format(format: Format) -> Self {
        Self { format: Some(format), ..Self::default() }
    }

    /// Sets the rounding alone.
    #[must_use]
    pub fn of_rounding(rounding: ElementRounding) -> Self {
        Self { rounding: Some(rounding), ..Self::default() }
    }

    /// Sets the scale rule alone.
    #[must_use]
    pub fn of_scale_rule(scale_rule: ScaleRule) -> Self {
        Self { scale_rule: Some(scale_rule), ..Self::default() }
    }

    /// Overrides settings with those of `newer`.
    fn overlay(&mut self, newer: &Self) {
        self.format = newer.format.or(self.format);
        self.element = newer.element.or(self.element);
        self.scale_rule = newer.scale_rule.or(self.scale_rule);
        self.granularity = newer.granularity.or(self.granularity);
        self.block = newer.block.or(self.block);
        self.rounding = newer.rounding.or(self.rounding);
        self.hadamard = newer.hadamard.or(self.hadamard);
        self.four_six = newer.four_six.or(self.four_six);
    }

    /// Quantization of an operand whose default is `base`; `None` if the operand is not quantized.
    fn resolve(&self, base: QuantFormat) -> Option<QuantFormat> {
        let mut format = match self.format {
            Some(Format::Quantized(format)) if format.is_mx() && base.is_mx() => {
                base.with_element(format.element)
            }
            Some(Format::Quantized(format)) if !format.is_of_family(&base) => {
                format.with_shape(base.block.shape()).with_order(base.order)
            }
            Some(Format::Quantized(_)) | None => base,
            Some(_) => return None,
        };
        format.element = self.element.unwrap_or(format.element);
        if let Some(rule) = self.scale_rule {
            format = format.with_scale_rule(rule);
        }
        if let Some(granularity) = self.granularity {
            format = format.with_granularity(granularity);
        }
        if let Some(shape) = self.block {
            format = format.with_shape(shape);
        }
        if let Some(four_six) = self.four_six {
            format = format.with_four_six(four_six);
        }
        let transform = self.hadamard.unwrap_or_default().then_some(Hadamard16::TRAINING);
        Some(format.with_hadamard(transform).with_rounding(self.rounding.unwrap_or_default()))
    }
}

/// [`OperandSetting::overlay`] for several operands.
pub(super) fn overlay(settings: &mut OperandSettings, newer: &OperandSettings) {
    for (&class, newer) in newer {
        settings.entry(class).or_default().overlay(newer);
    }
}

impl PrecisionPolicy {
    /// Quantization of each operand of a tensor in `format` with these settings.
    pub(super) fn resolve(
        &self,
        format: QuantFormat,
        settings: &OperandSettings,
    ) -> [Option<QuantFormat>; 6] {
        std::array::from_fn(|index| {
            let class = OperandClass::ALL[index];
            let base = match class {
                OperandClass::FpropWeight | OperandClass::DgradWeight => self.of_weights(format),
                OperandClass::DgradGradient | OperandClass::WgradGradient => {
                    self.of_gradients(format)
                }
                _ => self.of_activations(format),
            };
            settings.get(&class).unwrap_or(&OperandSetting::default()).resolve(base)
        })
    }

    /// How GEMMs are computed if both operands are quantized.
    #[must_use]
    pub fn gemm(&self) -> GemmMode {
        self.gemm
    }

    /// Sets how GEMMs are computed.
    #[must_use]
    pub fn with_gemm(self, gemm: GemmMode) -> Self {
        Self { gemm, ..self }
    }

    /// Sets the defaults of operands of every quantized tensor; rules take precedence.
    #[must_use]
    pub fn with_operands(mut self, classes: &[OperandClass], setting: &OperandSetting) -> Self {
        overlay(&mut self.operands, &settings_of(classes, setting));
        self
    }

    /// Sets operands of the quantized tensors that match the glob `tensors`. Takes precedence over
    /// all earlier settings.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn with_operands_in(
        mut self,
        tensors: &str,
        classes: &[OperandClass],
        setting: &OperandSetting,
    ) -> Result<Self, PolicyError> {
        let operands = settings_of(classes, setting);
        let rule =
            Rule { tensors: tensors.to_owned(), format: None, operands, place: None, reason: None };
        rule.matcher()?;
        self.rules.push(rule);
        Ok(self)
    }

    /// Quantizes only `classes`, of all the tensors that the policy quantizes. Takes precedence
    /// over all earlier formats; how operands are quantized does not change.
    ///
    /// ```
    /// use deepwell_precision::{OperandClass, PrecisionPolicy, Role, TensorUse};
    /// let policy = PrecisionPolicy::mxfp8().only(&[OperandClass::WgradGradient]);
    /// let names = ["a", "b", "c"];
    /// let tensors = names.map(|name| TensorUse { name, role: Role::Linear, layer: None });
    /// let assigned = policy.assign(&tensors)?;
    /// assert!(assigned[1].operand(OperandClass::WgradGradient).is_some());
    /// assert!(assigned[1].operand(OperandClass::FpropWeight).is_none());
    /// // The first and the last tensor are BF16 as they were.
    /// assert!(assigned[0].operand(OperandClass::WgradGradient).is_none());
    /// # Ok::<(), deepwell_precision::PolicyError>(())
    /// ```
    #[must_use]
    pub fn only(self, classes: &[OperandClass]) -> Self {
        let others: Vec<OperandClass> =
            OperandClass::ALL.iter().copied().filter(|class| !classes.contains(class)).collect();
        self.without(&others)
    }

    /// Keeps `classes` of all tensors in high precision. Takes precedence over all earlier
    /// settings.
    #[must_use]
    pub fn without(mut self, classes: &[OperandClass]) -> Self {
        let operands = settings_of(classes, &OperandSetting::of_format(Format::Bf16));
        self.rules.push(Rule {
            tensors: "*".to_owned(),
            format: None,
            operands,
            place: None,
            reason: None,
        });
        self
    }

    /// [`PrecisionPolicy::only`], restricted to tensors that match the glob `tensors`.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn only_in(self, tensors: &str, classes: &[OperandClass]) -> Result<Self, PolicyError> {
        let format = self.format.quantized().map_or(Format::MXFP8, Format::Quantized);
        let quantized = OperandSetting::of_format(format);
        self.without(OperandClass::ALL).with_operands_in(tensors, classes, &quantized)
    }

    /// [`PrecisionPolicy::without`] for the tensors that match the glob `tensors`.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn without_in(self, tensors: &str, classes: &[OperandClass]) -> Result<Self, PolicyError> {
        self.with_operands_in(tensors, classes, &OperandSetting::of_format(Format::Bf16))
    }
}

fn settings_of(classes: &[OperandClass], setting: &OperandSetting) -> OperandSettings {
    classes.iter().map(|&class| (class, setting.clone())).collect()
}

/// The table form of a setting.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingTable {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<Format>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    element: Option<ElementFormat>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale_rule: Option<ScaleRule>,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "elements")]
    granularity: Option<Granularity>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block: Option<BlockShape>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rounding: Option<ElementRounding>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hadamard: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    four_six: Option<bool>,
}

impl Serialize for OperandSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Some(format) = self.format.filter(|&format| *self == Self::of_format(format)) {
            return format.serialize(serializer);
        }
        let Self { format, element, scale_rule, granularity, block, rounding, .. } = *self;
        let Self { hadamard, four_six, .. } = *self;
        SettingTable {
            format,
            element,
            scale_rule,
            granularity,
            block,
            rounding,
            hadamard,
            four_six,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OperandSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table: SettingTable = super::name_or_table::deserialize(deserializer, |name| {
            Ok(SettingTable { format: Some(name.parse()?), ..SettingTable::default() })
        })?;
        let SettingTable { format, element, scale_rule, granularity, block, rounding, .. } = table;
        let SettingTable { hadamard, four_six, .. } = table;
        Ok(Self { format, element, scale_rule, granularity, block, rounding, hadamard, four_six })
    }
}

/// A granularity as a number of elements.
mod elements {
    use super::{Deserialize, Deserializer, Granularity, Serializer};

    pub(super) fn serialize<S: Serializer>(
        granularity: &Option<Granularity>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(granularity.unwrap_or_default().elements() as u64)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Granularity>, D::Error> {
        let elements = i64::deserialize(deserializer)?;
        elements.to_string().parse().map(Some).map_err(serde::de::Error::custom)
    }
}
