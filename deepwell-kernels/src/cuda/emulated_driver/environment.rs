//! Emulator settings from the environment, for the user who starts tests and commands.

use deepwell_emulator::launch::{Completion, Settings};
use deepwell_emulator::numerics::ResultMode;

use crate::runtime::cuda::driver::{DriverError, DriverResult};

/// Completion of asynchronous operations: `eager`, `lazy`, `lazy:SEED`, `demand` or `late-copies`.
pub const COMPLETION_VARIABLE: &str = "DEEPWELL_EMULATOR_COMPLETION";
/// Numerics of tensor cores: `hw`, `exact`, `fuzz` or `fuzz:SEED`.
pub const RESULTS_VARIABLE: &str = "DEEPWELL_EMULATOR_RESULTS";
/// Hazard tracker: `on` or `off`.
pub const TRACKER_VARIABLE: &str = "DEEPWELL_EMULATOR_TRACKER";
/// Warnings of the tracker: `report` or `fail`.
pub const WARNINGS_VARIABLE: &str = "DEEPWELL_EMULATOR_WARNINGS";
/// Maximum CTAs that an SM runs at a time: 1 to 32.
pub const CTAS_VARIABLE: &str = "DEEPWELL_EMULATOR_CTAS_PER_SM";

/// Returns `defaults`, overridden by the variables that are set and not empty.
///
/// # Errors
/// An invalid value of a variable; the message lists the valid values.
///
/// ```
/// use deepwell_kernels::cuda::emulator::launch::Settings;
/// use deepwell_kernels::cuda::emulator_settings;
///
/// let settings = emulator_settings(Settings::default(), |_| None).unwrap();
/// assert_eq!(settings, Settings::default());
/// let off = |name: &str| name.ends_with("_TRACKER").then(|| "off".to_string());
/// assert!(!emulator_settings(Settings::default(), off).unwrap().tracker);
/// ```
pub fn emulator_settings(
    defaults: Settings,
    variable: impl Fn(&str) -> Option<String>,
) -> DriverResult<Settings> {
    let mut settings = defaults;
    let value = |name: &str| variable(name).filter(|text| !text.is_empty());
    if let Some(text) = value(COMPLETION_VARIABLE) {
        settings.completion = match seeded(&text) {
            Some(("eager", None)) => Completion::Eager,
            Some(("demand", None)) => Completion::Demand,
            Some(("late-copies", None)) => Completion::LateCopies,
            Some(("lazy", seed)) => Completion::Lazy { seed: seed.unwrap_or(0) },
            _ => {
                let expected = "`eager`, `lazy`, `lazy:SEED`, `demand` or `late-copies`";
                return Err(refused(COMPLETION_VARIABLE, expected, &text));
            }
        };
    }
    if let Some(text) = value(RESULTS_VARIABLE) {
        settings.results = match seeded(&text) {
            Some(("hw", None)) => ResultMode::Hardware,
            Some(("exact", None)) => ResultMode::Exact,
            Some(("fuzz", seed)) => ResultMode::Fuzz(seed.unwrap_or(0)),
            _ => {
                let expected = "`hw`, `exact`, `fuzz` or `fuzz:SEED`";
                return Err(refused(RESULTS_VARIABLE, expected, &text));
            }
        };
    }
    if let Some(text) = value(TRACKER_VARIABLE) {
        settings.tracker = match text.as_str() {
            "on" => true,
            "off" => false,
            _ => return Err(refused(TRACKER_VARIABLE, "`on` or `off`", &text)),
        };
    }
    if let Some(text) = value(WARNINGS_VARIABLE) {
        settings.rules.warnings_fail = match text.as_str() {
            "report" => false,
            "fail" => true,
            _ => return Err(refused(WARNINGS_VARIABLE, "`report` or `fail`", &text)),
        };
    }
    if let Some(text) = value(CTAS_VARIABLE) {
        let ctas = text.parse().ok().filter(|ctas| (1..=32).contains(ctas));
        settings.ctas_per_sm =
            ctas.ok_or_else(|| refused(CTAS_VARIABLE, "a number from 1 to 32", &text))?;
    }
    Ok(settings)
}

/// A word, and the number after its colon, if present.
fn seeded(text: &str) -> Option<(&str, Option<u64>)> {
    match text.split_once(':') {
        Some((word, seed)) => seed.parse().ok().map(|seed| (word, Some(seed))),
        None => Some((text, None)),
    }
}

fn refused(variable: &str, expected: &str, got: &str) -> DriverError {
    DriverError::new(variable, format!("expected {expected}, got `{got}`"))
}

#[cfg(test)]
mod tests {
    use deepwell_emulator::hazard::Rules;

    use super::*;

    fn of(name: &str, value: &str) -> DriverResult<Settings> {
        emulator_settings(Settings::default(), |asked| (asked == name).then(|| value.to_string()))
    }

    #[test]
    fn variables_that_are_understood() {
        let check = |name: &str, value: &str, expected: Settings| {
            assert_eq!(of(name, value).unwrap(), expected, "{name}={value}");
        };
        let default = Settings::default;
        let completed = |completion| Settings { completion, ..default() };
        check(COMPLETION_VARIABLE, "", default());
        check(COMPLETION_VARIABLE, "eager", completed(Completion::Eager));
        check(COMPLETION_VARIABLE, "demand", completed(Completion::Demand));
        check(COMPLETION_VARIABLE, "lazy", completed(Completion::Lazy { seed: 0 }));
        check(COMPLETION_VARIABLE, "lazy:77", completed(Completion::Lazy { seed: 77 }));
        let resulting = |results| Settings { results, ..default() };
        check(RESULTS_VARIABLE, "hw", resulting(ResultMode::Hardware));
        check(RESULTS_VARIABLE, "exact", resulting(ResultMode::Exact));
        check(RESULTS_VARIABLE, "fuzz", resulting(ResultMode::Fuzz(0)));
        check(RESULTS_VARIABLE, "fuzz:3", resulting(ResultMode::Fuzz(3)));
        check(TRACKER_VARIABLE, "on", default());
        check(TRACKER_VARIABLE, "off", Settings { tracker: false, ..default() });
        let rules = Rules { warnings_fail: true, ..Rules::default() };
        check(WARNINGS_VARIABLE, "fail", Settings { rules, ..default() });
        check(COMPLETION_VARIABLE, "late-copies", completed(Completion::LateCopies));
        check(CTAS_VARIABLE, "8", Settings { ctas_per_sm: 8, ..default() });
    }

    #[test]
    fn variables_that_are_refused() {
        let check = |name: &str, value: &str, expected: &str| {
            let error = of(name, value).unwrap_err().to_string();
            let got = format!("got `{value}`");
            assert!(error.contains(name) && error.contains(&got), "{error}");
            assert!(error.contains(expected), "{error}");
        };
        for value in ["slow", "eager:1", "lazy:", "lazy:x", "demand:2", "Lazy"] {
            check(COMPLETION_VARIABLE, value, "`lazy:SEED`");
        }
        for value in ["hardware", "exact:1", "fuzz:-1"] {
            check(RESULTS_VARIABLE, value, "`fuzz:SEED`");
        }
        check(TRACKER_VARIABLE, "yes", "`on` or `off`");
        for value in ["0", "33", "many"] {
            check(CTAS_VARIABLE, value, "1 to 32");
        }
    }
}
