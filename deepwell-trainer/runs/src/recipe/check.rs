//! Comparison of a run with a recipe.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Curve, Figure, Point, Quantity, Recipe, RecipeData};
use crate::run::{Metric, Run};
use crate::settings::flatten;
use crate::units::{bytes, count, percent};

/// Keys of a run file that change no number, or that a user chooses.
/// Intervals of curves hold for every seed.
const FREE: [&str; 7] = ["out", "cache_dir", "data", "eval_data", "tokenizer", "device", "seed"];
/// Steps over which a training loss is averaged.
const WINDOW: usize = 20;

/// Comparison of a run with a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Name of the recipe.
    pub recipe: String,
    /// Name of the run.
    pub run: String,
    /// Whether every compared row is within; `None` if no row could be compared.
    pub within: Option<bool>,
    /// The rows.
    pub rows: Vec<CheckRow>,
}

/// One compared value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckRow {
    /// The value: `held-out loss at step 200`.
    pub what: String,
    /// The expected interval.
    pub expected: String,
    /// The run's value.
    pub got: String,
    /// The result.
    pub verdict: Verdict,
}

/// Result of a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The value is in the interval.
    Within,
    /// The value is not in the interval.
    Outside,
    /// The value could not be compared, with the reason.
    NotCompared(String),
}

impl Check {
    /// Compares a run with a recipe.
    pub fn of(recipe: &Recipe, run: &Run) -> Check {
        let mut rows = vec![settings_row(recipe, run)];
        rows.extend(data_row(recipe, run));
        rows.extend(recipe.points.iter().map(|point| point_row(recipe, point, run)));
        rows.extend(recipe.figures.iter().map(|figure| figure_row(figure, run)));
        let has = |verdict: &Verdict| rows.iter().any(|row| row.verdict == *verdict);
        // Equal settings alone say nothing about the result.
        let compared = rows[1..].iter().any(|row| row.verdict == Verdict::Within);
        let within = match (has(&Verdict::Outside), compared) {
            (true, _) => Some(false),
            (false, true) => Some(true),
            (false, false) => None,
        };
        Check { recipe: recipe.name.clone(), run: run.name.clone(), within, rows }
    }
}

/// The settings of the recipe against those of the run.
fn settings_row(recipe: &Recipe, run: &Run) -> CheckRow {
    let mut expected = BTreeMap::new();
    let value = serde_json::to_value(&recipe.run).unwrap_or_default();
    flatten("", &value, &mut expected);
    expected.retain(|key, _| !FREE.contains(&key.as_str()));
    let what = "settings of the recipe".to_owned();
    if expected.is_empty() || run.settings.is_empty() {
        let reason = match expected.is_empty() {
            true => "the recipe is a prediction without a run file",
            false => "the run's settings are not recorded",
        };
        let (expected, got) = ("equal".to_owned(), "unknown".to_owned());
        return CheckRow { what, expected, got, verdict: Verdict::NotCompared(reason.to_owned()) };
    }
    let differs = |(key, value): (&String, &String)| {
        let own = run.settings.get(key).map_or("none", String::as_str);
        (!is_equal(own, value)).then(|| format!("{key} is {own}, not {value}"))
    };
    let differences: Vec<String> = expected.iter().filter_map(differs).collect();
    let is_equal = differences.is_empty();
    CheckRow {
        what,
        expected: "equal".to_owned(),
        got: if is_equal { "equal".to_owned() } else { differences.join("; ") },
        verdict: if is_equal { Verdict::Within } else { Verdict::Outside },
    }
}

/// Whether two texts are equal, or equal numbers: `1e-3` and `0.001`.
fn is_equal(a: &str, b: &str) -> bool {
    let numbers = || Some(a.parse::<f64>().ok()? == b.parse::<f64>().ok()?);
    a == b || numbers() == Some(true)
}

/// The tokens of the recipe against those of the run.
fn data_row(recipe: &Recipe, run: &Run) -> Option<CheckRow> {
    let expected = recipe.data_hash.clone()?;
    let short = |hash: &str| hash.chars().take(12).collect::<String>();
    let (got, verdict) = match &run.facts.data_hash {
        None => {
            let reason = "the run has no run.json".to_owned();
            ("unknown".to_owned(), Verdict::NotCompared(reason))
        }
        Some(hash) if *hash == expected => (short(hash), Verdict::Within),
        Some(hash) => (short(hash), Verdict::Outside),
    };
    Some(CheckRow {
        what: "hash of the tokens".to_owned(),
        expected: short(&expected),
        got,
        verdict,
    })
}

fn point_row(recipe: &Recipe, point: &Point, run: &Run) -> CheckRow {
    let Point { step, of, low, high, .. } = point;
    let value = match of {
        Curve::ValLoss => {
            let curve = run.curve(Metric::ValLoss);
            curve.iter().find(|found| found.0 == *step as f64).map(|found| found.1)
        }
        Curve::TrainLoss => mean_up_to(run.curve(Metric::Loss), *step as f64),
    };
    let what = format!("{} at step {step}", of.name());
    let expected = format!("{low:.4} to {high:.4}");
    let own_data = run.settings.get("data").filter(|data| !data.is_empty());
    let (got, verdict) = match value {
        Some(value) if recipe.data == RecipeData::Corpus && own_data.is_some() => {
            let reason = "the curve is of the default corpus, the run has data of its own";
            (format!("{value:.4}"), Verdict::NotCompared(reason.to_owned()))
        }
        None => {
            let reason = match run.step_last < *step {
                true => format!("the run has {} steps", run.step_last),
                false => "the run did not evaluate at this step".to_owned(),
            };
            ("none".to_owned(), Verdict::NotCompared(reason))
        }
        Some(value) => (format!("{value:.4}"), judged(value, Some(*low), Some(*high))),
    };
    CheckRow { what, expected, got, verdict }
}

/// The mean of the last values up to a step that the curve has.
fn mean_up_to(curve: &[(f64, f64)], step: f64) -> Option<f64> {
    let end = curve.partition_point(|point| point.0 <= step);
    let last = curve.get(..end)?.last()?;
    if last.0 != step {
        return None;
    }
    let window = &curve[end.saturating_sub(WINDOW)..end];
    Some(window.iter().map(|point| point.1).sum::<f64>() / window.len() as f64)
}

/// A value that is not finite is in no interval.
fn judged(value: f64, low: Option<f64>, high: Option<f64>) -> Verdict {
    let is_in = low.is_none_or(|low| value >= low) && high.is_none_or(|high| value <= high);
    if is_in && value.is_finite() { Verdict::Within } else { Verdict::Outside }
}

fn figure_row(figure: &Figure, run: &Run) -> CheckRow {
    let Figure { of, value, low, high, on, precision, basis, .. } = figure;
    let format = |value: f64| of.format(value);
    let mut expected = match (low, high) {
        (Some(low), Some(high)) => format!("{} to {}", format(*low), format(*high)),
        (Some(low), None) => format!("at least {}", format(*low)),
        (None, Some(high)) => format!("at most {}", format(*high)),
        (None, None) => format!("about {}", format(*value)),
    };
    expected.push_str(&format!(", {}", basis.name()));
    let got = of.value(run);
    let reason = if low.is_none() && high.is_none() {
        Some("the recipe gives no interval".to_owned())
    } else if !run.facts.machine.as_deref().unwrap_or("").contains(on.as_str()) {
        let machine = run.facts.machine.as_deref().unwrap_or("unknown hardware");
        Some(format!("the figure is of {on}, the run of {machine}"))
    } else if !precision.is_empty() && run.facts.precision_name.as_ref() != Some(precision) {
        let own = run.facts.precision_name.as_deref().unwrap_or("unknown");
        Some(format!("the figure is of {precision}, the run of {own}"))
    } else if got.is_none() {
        Some("the run has no such value".to_owned())
    } else {
        None
    };
    let verdict = match (reason, got) {
        (Some(reason), _) => Verdict::NotCompared(reason),
        (None, value) => judged(value.unwrap_or(f64::NAN), *low, *high),
    };
    let got = got.map_or("none".to_owned(), format);
    CheckRow { what: of.name().to_owned(), expected, got, verdict }
}

impl Quantity {
    /// The run's value.
    fn value(self, run: &Run) -> Option<f64> {
        match self {
            Quantity::TokensPerS => run.median(Metric::TokensPerS),
            Quantity::PeakBytes => run.facts.peak_bytes_measured.or(run.facts.peak_bytes_predicted),
            Quantity::Mfu => run.utilization(),
            Quantity::Fp8Mfu => None,
            Quantity::StepS => Some(run.facts.tokens_per_step? / run.median(Metric::TokensPerS)?),
            Quantity::QuantizedShare => run.facts.quantized_share,
            Quantity::Params => run.facts.params,
        }
    }

    /// The value with its unit.
    pub(super) fn format(self, value: f64) -> String {
        match self {
            Quantity::TokensPerS | Quantity::Params => count(value),
            Quantity::PeakBytes => bytes(value),
            Quantity::Mfu | Quantity::Fp8Mfu | Quantity::QuantizedShare => percent(value),
            Quantity::StepS if value < 1.0 => format!("{:.1} ms", value * 1e3),
            Quantity::StepS => format!("{value:.2} s"),
        }
    }
}
