//! Recipes of training in few bits: their parts, and policies with and without each of them.
//!
//! Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, and "Four Over Six",
//! arXiv 2512.02010. For MXFP4: "Training LLMs with MXFP4", arXiv 2502.20586, with stochastic
//! rounding of gradients after a random Hadamard transform. E5M2 gradients are those of Transformer
//! Engine's `HYBRID`.

use serde::{Deserialize, Serialize};

use super::{OperandSettings, PrecisionPolicy, Rule};
use crate::names::named_enum;
use crate::nvfp4::ScaleOrder;
use crate::operand::GemmKind;
use crate::{
    BlockShape, ElementFormat, ElementRounding, Format, OperandClass, OperandSetting, QuantFormat,
    TensorUse,
};

/// The operands that the transform and the selection of 4 or 6 are for.
const WGRAD: [OperandClass; 2] = OperandClass::of(GemmKind::Wgrad);
const GRADIENTS: [OperandClass; 2] = [OperandClass::DgradGradient, OperandClass::WgradGradient];

named_enum! {
    /// A part of the recipe that an ablation can leave out.
    #[non_exhaustive]
    pub enum RecipePart ("part of the recipe") {
        /// Random Hadamard transform of both operands of wgrad.
        Hadamard = "rht",
        /// Stochastic rounding of gradients.
        StochasticRounding = "sr",
        /// Square blocks of weights, which give fprop and dgrad the same values.
        SquareWeights = "square",
        /// Higher precision for the last blocks.
        LastBlocks = "exceptions",
        /// Selection of 4 or 6 for the activations of fprop.
        FourSix = "four-six",
        /// Elements of gradients with one more exponent bit, and one fraction bit less: E5M2 in
        /// MXFP8, E3M2 in MXFP6.
        GradientElement = "gradient-element",
    }
}

/// The last blocks of a model, in a format of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LastBlocks {
    /// Share of the blocks in percent, at most 100; the number of blocks is rounded up.
    pub percent: u8,
    /// Format of the linear tensors in these blocks, rounded to nearest, in blocks of one row.
    pub format: Format,
}

impl LastBlocks {
    /// The share of the published recipe (8 of 62 blocks and the last 8 of 52), in MXFP8: at this
    /// share BF16 would cost a tenth of the speed.
    pub const RECIPE: Self = Self { percent: 15, format: Format::MXFP8 };

    /// The form of no exceptions in a file.
    pub(super) const NONE: Self = Self { percent: 0, ..Self::RECIPE };

    /// None for 0 %.
    ///
    /// # Errors
    /// A message about a wrong value.
    pub(super) fn checked(self) -> Result<Option<Self>, String> {
        match (self.percent, self.format) {
            (0, _) => Ok(None),
            (101.., _) => {
                Err(format!("expected 0 to 100 `percent` of the blocks, got {}", self.percent))
            }
            (_, Format::F32) => Err("expected `bf16` or a quantized format, got `f32`".to_owned()),
            _ => Ok(Some(self)),
        }
    }

    /// First block in this format, of a model with `blocks` blocks.
    pub(super) fn first(self, blocks: u32) -> u32 {
        let count = (u64::from(blocks) * u64::from(self.percent)).div_ceil(100);
        blocks.saturating_sub(count as u32)
    }

    /// Settings of the operands: none of the recipe's.
    pub(super) fn operands() -> OperandSettings {
        let row = OperandSetting { block: Some(BlockShape::Row), ..OperandSetting::default() };
        let nearest = OperandSetting::of_rounding(ElementRounding::Nearest);
        let weights = [OperandClass::FpropWeight, OperandClass::DgradWeight];
        let weights = weights.map(|class| (class, row.clone()));
        weights.into_iter().chain(GRADIENTS.map(|class| (class, nearest.clone()))).collect()
    }
}

/// Number of blocks of a model with these tensors.
pub(super) fn block_count(tensors: &[TensorUse<'_>]) -> u32 {
    tensors.iter().filter_map(|tensor| tensor.layer).max().map_or(0, |last| last + 1)
}

impl PrecisionPolicy {
    /// NVFP4 with the whole recipe ([`RecipePart`]): the exceptions are the last 15 % of the blocks
    /// in MXFP8, and the single first and last linear tensor in BF16, as for
    /// [`PrecisionPolicy::mxfp8`].
    #[must_use]
    pub fn nvfp4() -> Self {
        let format = Format::NVFP4;
        let bare = Self { format, ..Self::mxfp8() };
        RecipePart::ALL.iter().fold(bare, |policy, &part| policy.with_part(part))
    }

    /// MXFP4 with the parts of the recipe that suit blocks of 32 with exponents as scales: the
    /// Hadamard transform, stochastic rounding of gradients, and the last 15 % of the blocks in
    /// MXFP8.
    #[must_use]
    pub fn mxfp4() -> Self {
        use RecipePart::{Hadamard, LastBlocks, StochasticRounding};
        let bare = Self { format: Format::MXFP4, ..Self::mxfp8() };
        let parts = [Hadamard, StochasticRounding, LastBlocks];
        parts.into_iter().fold(bare, Self::with_part)
    }

    /// The order of the operations on scales of NVFP4.
    #[must_use]
    pub fn with_scale_order(self, scale_order: ScaleOrder) -> Self {
        Self { scale_order, ..self }
    }

    /// Replaces the rule about the last blocks by rules with names, for a part of a model whose
    /// blocks are numbered anew. `tensors` are those of the whole model, in execution order.
    #[must_use]
    pub fn with_blocks_by_name(mut self, tensors: &[TensorUse<'_>]) -> Self {
        let Some(last) = self.last_blocks else { return self };
        let decisions = self.defaults(tensors);
        let first = last.first(block_count(tensors));
        let is_last = |tensor: &TensorUse<'_>| tensor.layer.is_some_and(|layer| layer >= first);
        let of_blocks = tensors.iter().zip(decisions);
        let of_blocks = of_blocks
            .filter(|(tensor, decision)| is_last(tensor) && decision.format == last.format);
        let rules = of_blocks.map(|(tensor, decision)| Rule {
            tensors: globset::escape(tensor.name),
            format: Some(decision.format),
            operands: decision.operands,
            place: None,
            reason: Some(decision.reason),
        });
        // Rules of the user come later and win.
        let rules: Vec<Rule> = rules.collect();
        self.rules.splice(0..0, rules);
        Self { last_blocks: None, ..self }
    }

    /// Adds a part of the recipe, as a default of every tensor; rules take precedence.
    #[must_use]
    pub fn with_part(self, part: RecipePart) -> Self {
        let on = OperandSetting::default();
        match part {
            RecipePart::Hadamard => {
                self.with_operands(&WGRAD, &OperandSetting { hadamard: Some(true), ..on })
            }
            RecipePart::StochasticRounding => self.with_operands(
                &GRADIENTS,
                &OperandSetting::of_rounding(ElementRounding::Stochastic),
            ),
            RecipePart::SquareWeights => Self { weight_block: BlockShape::Square, ..self },
            RecipePart::LastBlocks => Self { last_blocks: Some(LastBlocks::RECIPE), ..self },
            RecipePart::FourSix => self.with_operands(
                &[OperandClass::FpropActivation],
                &OperandSetting { four_six: Some(true), ..on },
            ),
            RecipePart::GradientElement => {
                let of_own = self.format.quantized().filter(QuantFormat::is_mx);
                let gradient_element = of_own.and_then(|own| match own.element {
                    ElementFormat::E4M3 => Some(ElementFormat::E5M2),
                    ElementFormat::E2M3 => Some(ElementFormat::E3M2),
                    _ => None,
                });
                Self { gradient_element, ..self }
            }
        }
    }

    /// Removes a part of the recipe from the defaults.
    #[must_use]
    pub fn without_part(mut self, part: RecipePart) -> Self {
        match part {
            RecipePart::Hadamard => self.each(|it| it.hadamard = it.hadamard.and(Some(false))),
            RecipePart::StochasticRounding => {
                self.each(|it| it.rounding = it.rounding.and(Some(ElementRounding::Nearest)));
            }
            RecipePart::SquareWeights => self.weight_block = BlockShape::Row,
            RecipePart::LastBlocks => self.last_blocks = None,
            RecipePart::GradientElement => self.gradient_element = None,
            RecipePart::FourSix => self.each(|it| it.four_six = it.four_six.and(Some(false))),
        }
        self
    }

    /// Removes all parts but one.
    ///
    /// ```
    /// use deepwell_precision::{PrecisionPolicy, RecipePart};
    /// let rounding = PrecisionPolicy::nvfp4().with_part_alone(RecipePart::StochasticRounding);
    /// assert!(rounding.has_part(RecipePart::StochasticRounding));
    /// assert!(!rounding.has_part(RecipePart::Hadamard));
    /// ```
    #[must_use]
    pub fn with_part_alone(self, part: RecipePart) -> Self {
        let others = RecipePart::ALL.iter().filter(|&&other| other != part);
        others.fold(self, |policy, &other| policy.without_part(other))
    }

    /// Whether the defaults contain a part of the recipe.
    #[must_use]
    pub fn has_part(&self, part: RecipePart) -> bool {
        self.clone().without_part(part) != *self
    }

    /// Changes the defaults of all operands.
    fn each(&mut self, change: impl Fn(&mut OperandSetting)) {
        self.operands.values_mut().for_each(change);
    }
}
