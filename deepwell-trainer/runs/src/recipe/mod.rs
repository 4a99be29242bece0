//! Recipes: settings of a run with the curve and the figures to expect.
//!
//! A recipe is a TOML file. Each figure says whether it was measured or predicted, and where the
//! record is. A figure of a machine is compared only with runs on such a machine.
//!
//! ```
//! use deepwell_runs::recipe::Recipe;
//! let recipe = Recipe::find("llama-micro")?;
//! assert_eq!(recipe.run["model"].as_str(), Some("llama-micro"));
//! assert!(!recipe.points.is_empty());
//! # Ok::<(), deepwell_runs::RunsError>(())
//! ```

mod check;
mod text;

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::RunsError;

pub use check::{Check, CheckRow, Verdict};

/// The recipes that come with Deepwell: name and TOML.
const RECIPES: [(&str, &str); 10] = [
    ("llama-micro", include_str!("../../recipes/llama-micro.toml")),
    ("llama-134m", include_str!("../../recipes/llama-134m.toml")),
    ("llama-1.1b", include_str!("../../recipes/llama-1.1b.toml")),
    ("llama-3-8b", include_str!("../../recipes/llama-3-8b.toml")),
    ("llama-3-70b", include_str!("../../recipes/llama-3-70b.toml")),
    ("moe-1b-a300m", include_str!("../../recipes/moe-1b-a300m.toml")),
    ("mixtral-8x7b", include_str!("../../recipes/mixtral-8x7b.toml")),
    ("qwen3-30b-a3b", include_str!("../../recipes/qwen3-30b-a3b.toml")),
    ("deepseek-v3", include_str!("../../recipes/deepseek-v3.toml")),
    ("gpt-oss-20b", include_str!("../../recipes/gpt-oss-20b.toml")),
];

/// The text of `data = "licence"`: the Apache licence, which every copy of Deepwell has.
const LICENCE: &str = include_str!("../../LICENSE-APACHE");

/// A recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The name; that of the file.
    #[serde(default, skip_deserializing)]
    pub name: String,
    /// The purpose in one line.
    pub summary: String,
    /// Required hardware.
    pub hardware: String,
    /// The command to run the recipe, or to predict its figures.
    pub command: String,
    /// The data.
    pub data: RecipeData,
    /// Hash of the tokens, as in the fingerprint of a run; none if any text serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_hash: Option<String>,
    /// Keys of a run file; empty for a recipe that one machine cannot run.
    #[serde(default, skip_serializing_if = "toml::Table::is_empty")]
    pub run: toml::Table,
    /// Remarks for readers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// Points of the expected curve.
    #[serde(default, rename = "point", skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
    /// Expected figures.
    #[serde(default, rename = "figure", skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<Figure>,
}

/// The data of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecipeData {
    /// The Apache licence.
    Licence,
    /// The default corpus: sources of the locked dependencies, see `deepwell train`.
    Corpus,
    /// Text of the user's choice.
    Own,
    /// None: the recipe is a prediction.
    None,
}

/// Origin of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Runs on the named hardware.
    Measured,
    /// `deepwell dryrun` or `deepwell plan`.
    Predicted,
}

impl Basis {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Basis::Measured => "measured",
            Basis::Predicted => "predicted",
        }
    }
}

/// A point of the expected curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// The step.
    pub step: u64,
    /// The value.
    pub of: Curve,
    /// Lower end of the interval, nats per token.
    pub low: f64,
    /// Upper end of the interval, nats per token.
    pub high: f64,
    /// Origin of the interval.
    pub basis: Basis,
    /// The record, and the meaning of the interval.
    pub source: String,
}

/// Curve of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Curve {
    /// Training loss, the mean over the last 20 steps up to the step.
    TrainLoss,
    /// Held-out loss.
    ValLoss,
}

impl Curve {
    /// Name in words.
    pub const fn name(self) -> &'static str {
        match self {
            Curve::TrainLoss => "training loss",
            Curve::ValLoss => "held-out loss",
        }
    }
}

/// An expected figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The figure.
    pub of: Quantity,
    /// The value.
    pub value: f64,
    /// Lower end of the interval; none if the figure only informs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// Upper end of the interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
    /// Part of the name of the GPU or processor; empty if the figure holds on every machine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub on: String,
    /// Precision of the figure if the recipe has several; otherwise empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub precision: String,
    /// Origin of the value.
    pub basis: Basis,
    /// The record.
    pub source: String,
}

/// A quantity of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Median tokens per second of all ranks.
    TokensPerS,
    /// Peak memory of a rank, bytes; measured where a run has it, otherwise predicted.
    PeakBytes,
    /// FLOP/s over the dense BF16 peak, 0 to 1.
    Mfu,
    /// FLOP/s over the dense FP8 peak, 0 to 1, as `deepwell plan` prints it; runs lack it.
    Fp8Mfu,
    /// Time of a step, seconds.
    StepS,
    /// Quantized share of the FLOPs of linear layers in the blocks, 0 to 1.
    QuantizedShare,
    /// Trained values.
    Params,
}

impl Quantity {
    /// Name in words.
    pub const fn name(self) -> &'static str {
        match self {
            Quantity::TokensPerS => "tokens/s",
            Quantity::PeakBytes => "peak memory",
            Quantity::Mfu => "MFU",
            Quantity::Fp8Mfu => "MFU of the FP8 peak",
            Quantity::StepS => "time of a step",
            Quantity::QuantizedShare => "quantized share",
            Quantity::Params => "parameters",
        }
    }
}

impl Recipe {
    /// Names of the recipes that come with Deepwell.
    pub fn names() -> impl Iterator<Item = &'static str> {
        RECIPES.iter().map(|(name, _)| *name)
    }

    /// The recipe with this name, or that of a file.
    ///
    /// # Errors
    /// [`RunsError::NoRecipe`], [`RunsError::Recipe`], and errors of reading.
    pub fn find(name: &str) -> Result<Recipe, RunsError> {
        if let Some((_, text)) = RECIPES.iter().find(|(known, _)| *known == name) {
            return Recipe::from_toml(name, text);
        }
        let path = Path::new(name);
        if path.extension().is_none_or(|ending| ending != "toml") {
            let known = Recipe::names().collect::<Vec<_>>().join(", ");
            return Err(RunsError::NoRecipe { name: name.to_owned(), known });
        }
        let text = std::fs::read_to_string(path).map_err(RunsError::read(path))?;
        Recipe::from_toml(name, &text)
    }

    /// Reads a recipe; `name` is for errors.
    ///
    /// # Errors
    /// [`RunsError::Recipe`] with the place of an unknown key or a wrong type, and for an empty
    /// interval.
    pub fn from_toml(name: &str, text: &str) -> Result<Recipe, RunsError> {
        let fail = |what: String| RunsError::Recipe { name: name.to_owned(), what };
        let mut recipe: Recipe = toml::from_str(text).map_err(|it| fail(it.to_string()))?;
        let stem = Path::new(name).file_stem().and_then(|stem| stem.to_str());
        let is_file = name.ends_with(".toml");
        recipe.name = stem.filter(|_| is_file).unwrap_or(name).to_owned();
        let empty = |low: f64, high: f64| low > high || low.is_nan() || high.is_nan();
        if let Some(point) = recipe.points.iter().find(|it| empty(it.low, it.high)) {
            let Point { step, low, high, .. } = point;
            return Err(fail(format!("step {step}: expected low <= high, got {low} and {high}")));
        }
        for Figure { of, low, high, .. } in &recipe.figures {
            let is_bad = match (low, high) {
                (None, None) => false,
                (low, high) => {
                    empty(low.unwrap_or(f64::NEG_INFINITY), high.unwrap_or(f64::INFINITY))
                }
            };
            if is_bad {
                return Err(fail(format!(
                    "{}: expected low <= high, got {low:?} and {high:?}",
                    of.name()
                )));
            }
        }
        Ok(recipe)
    }

    /// The text to train on, if the recipe brings it.
    pub fn text(&self) -> Option<&'static str> {
        (self.data == RecipeData::Licence).then_some(LICENCE)
    }

    /// Whether `deepwell recipe run` can run the recipe.
    pub fn is_runnable(&self) -> bool {
        !self.run.is_empty()
    }
}

#[cfg(test)]
mod tests;
