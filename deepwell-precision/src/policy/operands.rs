//! What a policy says about the operands of GEMMs, and the builders that an ablation wants.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{PolicyError, PrecisionPolicy, Rule};
use crate::{
    BlockShape, ElementFormat, ElementRounding, GemmMode, Granularity, MxSpec, OperandClass,
    OperandFormat, OperandQuantization, ScaleRule,
};

/// What a policy or a rule says about one operand; what it leaves out stays as it was. In a file
/// it is a table, or the name of the format where it says nothing else.
///
/// Other recipes than MXFP8 get their place here: NVFP4 as a further [`OperandFormat`], and a key
/// for the Hadamard transform that it wants before the operands of wgrad.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperandSetting {
    /// Whether it is quantized.
    pub format: Option<OperandFormat>,
    /// Format of the elements.
    pub element: Option<ElementFormat>,
    /// How scales follow from magnitudes.
    pub scale_rule: Option<ScaleRule>,
    /// How many elements share an exponent.
    pub granularity: Option<Granularity>,
    /// Extent of a block.
    pub block: Option<BlockShape>,
    /// How elements are rounded.
    pub rounding: Option<ElementRounding>,
}

/// Settings of those operands about which something is said.
pub(super) type OperandSettings = BTreeMap<OperandClass, OperandSetting>;

impl OperandSetting {
    /// Sets the format alone.
    #[must_use]
    pub fn of_format(format: OperandFormat) -> Self {
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

    /// Takes over what `newer` says.
    fn overlay(&mut self, newer: &Self) {
        self.format = newer.format.or(self.format);
        self.element = newer.element.or(self.element);
        self.scale_rule = newer.scale_rule.or(self.scale_rule);
        self.granularity = newer.granularity.or(self.granularity);
        self.block = newer.block.or(self.block);
        self.rounding = newer.rounding.or(self.rounding);
    }

    /// How an operand is quantized whose spec is `base` where nothing is said; none if it is not.
    fn resolve(&self, base: MxSpec) -> Option<OperandQuantization> {
        if self.format == Some(OperandFormat::Bf16) {
            return None;
        }
        let spec = MxSpec {
            element: self.element.unwrap_or(base.element),
            scale_rule: self.scale_rule.unwrap_or(base.scale_rule),
            granularity: self.granularity.unwrap_or(base.granularity),
            block: self.block.unwrap_or(base.block),
        };
        Some(OperandQuantization { spec, rounding: self.rounding.unwrap_or_default() })
    }
}

/// [`OperandSetting::overlay`] of several operands.
pub(super) fn overlay(settings: &mut OperandSettings, newer: &OperandSettings) {
    for (&class, newer) in newer {
        settings.entry(class).or_default().overlay(newer);
    }
}

impl PrecisionPolicy {
    /// How each operand of an MXFP8 tensor with these settings is quantized.
    pub(super) fn resolve(&self, settings: &OperandSettings) -> [Option<OperandQuantization>; 6] {
        std::array::from_fn(|index| {
            let class = OperandClass::ALL[index];
            let base = match class.operand() {
                "weight" => self.weight_spec(),
                _ => self.activation_spec(),
            };
            settings.get(&class).unwrap_or(&OperandSetting::default()).resolve(base)
        })
    }

    /// What computes GEMMs whose operands are both quantized.
    #[must_use]
    pub fn gemm(&self) -> GemmMode {
        self.gemm
    }

    /// The same policy with its GEMMs computed otherwise.
    #[must_use]
    pub fn with_gemm(self, gemm: GemmMode) -> Self {
        Self { gemm, ..self }
    }

    /// The same policy with operands of every MXFP8 tensor set by default; rules win.
    #[must_use]
    pub fn with_operands(mut self, classes: &[OperandClass], setting: &OperandSetting) -> Self {
        overlay(&mut self.operands, &settings_of(classes, setting));
        self
    }

    /// The same policy with operands of those MXFP8 tensors set that `tensors`, a glob, matches.
    /// Wins over everything said before.
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
        let rule = Rule { tensors: tensors.to_owned(), format: None, operands, place: None };
        rule.matcher()?;
        self.rules.push(rule);
        Ok(self)
    }

    /// The same policy with nothing quantized but `classes`, of all the tensors that it has in
    /// MXFP8. Wins over everything said before about formats; how the rest is quantized stays.
    ///
    /// ```
    /// use deepwell_precision::{OperandClass, PrecisionPolicy, Role, TensorUse};
    /// let policy = PrecisionPolicy::mxfp8().only(&[OperandClass::WgradGradient]);
    /// let names = ["a", "b", "c"];
    /// let tensors = names.map(|name| TensorUse { name, role: Role::Linear });
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

    /// The same policy with `classes` in high precision, of all tensors. Wins over everything said
    /// before.
    #[must_use]
    pub fn without(mut self, classes: &[OperandClass]) -> Self {
        let operands = settings_of(classes, &OperandSetting::of_format(OperandFormat::Bf16));
        self.rules.push(Rule { tensors: "*".to_owned(), format: None, operands, place: None });
        self
    }

    /// [`PrecisionPolicy::only`], and of no other tensors than those that `tensors`, a glob,
    /// matches.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn only_in(self, tensors: &str, classes: &[OperandClass]) -> Result<Self, PolicyError> {
        let quantized = OperandSetting::of_format(OperandFormat::Mxfp8);
        self.without(OperandClass::ALL).with_operands_in(tensors, classes, &quantized)
    }

    /// [`PrecisionPolicy::without`] for those tensors that `tensors`, a glob, matches.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Glob`] when the pattern is malformed.
    pub fn without_in(self, tensors: &str, classes: &[OperandClass]) -> Result<Self, PolicyError> {
        self.with_operands_in(tensors, classes, &OperandSetting::of_format(OperandFormat::Bf16))
    }
}

fn settings_of(classes: &[OperandClass], setting: &OperandSetting) -> OperandSettings {
    classes.iter().map(|&class| (class, setting.clone())).collect()
}

/// The table form of a setting.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingTable {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<OperandFormat>,
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
}

impl Serialize for OperandSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Some(format) = self.format.filter(|&format| *self == Self::of_format(format)) {
            return format.serialize(serializer);
        }
        let Self { format, element, scale_rule, granularity, block, rounding } = *self;
        SettingTable { format, element, scale_rule, granularity, block, rounding }
            .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OperandSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table: SettingTable = super::name_or_table::deserialize(deserializer, |name| {
            let format = Some(name.parse()?);
            let nothing = (None, None, None, None, None);
            let (element, scale_rule, granularity, block, rounding) = nothing;
            Ok(SettingTable { format, element, scale_rule, granularity, block, rounding })
        })?;
        let SettingTable { format, element, scale_rule, granularity, block, rounding } = table;
        Ok(Self { format, element, scale_rule, granularity, block, rounding })
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
