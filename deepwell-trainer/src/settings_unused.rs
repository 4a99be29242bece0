//! Warns about settings that have no effect in a run, so that none is ignored silently.

use crate::Settings;

/// Facts of a run that decide which settings have an effect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunFacts {
    /// Whether any tensor is quantized.
    pub(crate) quantizes: bool,
    /// Whether the model has parameters exported as frozen.
    pub(crate) has_frozen: bool,
    /// Whether the data has records with fields.
    pub(crate) has_records: bool,
}

/// Returns a line with the reason for each given setting without effect.
pub(crate) fn without_effect(settings: &Settings, facts: RunFacts) -> Vec<String> {
    let defaults = Settings::default();
    let mut told = Vec::new();
    let mut tell = |is_unused: bool, setting: &str, reason: &str| {
        if is_unused {
            told.push(format!("`{setting}` has no effect: {reason}"));
        }
    };
    tell(
        settings.zero > 0 && settings.parallel().data == 1,
        "zero",
        "there is one data-parallel rank, which has all of the optimizer state",
    );
    let reason = "`no_checkpoints` leaves them out";
    tell(settings.no_checkpoints && settings.async_checkpoints, "async_checkpoints", reason);
    tell(
        settings.no_checkpoints && settings.checkpoint_every.is_some(),
        "checkpoint_every",
        reason,
    );
    tell(
        settings.policy.is_some() && settings.precision != defaults.precision,
        "precision",
        "`policy` takes its place",
    );
    tell(
        settings.guards != defaults.guards && !facts.quantizes,
        "guards",
        "no tensor is quantized, so that no GEMM can fall back",
    );
    tell(
        settings.fallback.is_some() && !facts.quantizes,
        "fallback",
        "no tensor is quantized, so that no GEMM can fall back",
    );
    tell(
        settings.train_frozen && !facts.has_frozen,
        "train_frozen",
        "the model has no parameters with `requires_grad = false`",
    );
    tell(
        settings.text_field.is_some() && !facts.has_records,
        "text_field",
        "no file of the data has records: .jsonl, .json and .parquet have",
    );
    told
}

#[cfg(test)]
mod tests {
    use deepwell_precision::Fallback;

    use super::*;

    #[test]
    fn settings_that_nothing_reads_are_told() {
        let check_in = |facts: RunFacts, settings: Settings, expected: &[&str]| {
            let told = without_effect(&settings, facts);
            let names: Vec<&str> = told.iter().filter_map(|line| line.split('`').nth(1)).collect();
            assert_eq!(names, expected, "{told:?}");
        };
        let all = RunFacts { quantizes: true, has_frozen: true, has_records: true };
        let check = |settings: Settings, quantizes, expected: &[&str]| {
            check_in(RunFacts { quantizes, ..all }, settings, expected);
        };
        let base = Settings::default;
        check(base(), true, &[]);
        check(base(), false, &[]);
        check(Settings { zero: 2, ..base() }, true, &["zero"]);
        check(Settings { zero: 2, ranks: 2, ..base() }, true, &[]);
        let kept = Settings { async_checkpoints: true, checkpoint_every: Some(5), ..base() };
        check(kept.clone(), true, &[]);
        let none = Settings { no_checkpoints: true, ..kept };
        check(none, true, &["async_checkpoints", "checkpoint_every"]);
        let policy = Settings { policy: Some("policy.toml".into()), ..base() };
        check(policy.clone(), true, &[]);
        check(Settings { precision: "nvfp4".to_string(), ..policy }, true, &["precision"]);
        let mut guards = base();
        guards.guards.strikes_max += 1;
        check(guards.clone(), true, &[]);
        check(guards, false, &["guards"]);
        let tells = Settings { fallback: Some(Fallback::Off), ..base() };
        check(tells.clone(), true, &[]);
        check(tells, false, &["fallback"]);
        let frozen = Settings { train_frozen: true, ..base() };
        check(frozen.clone(), true, &[]);
        check_in(RunFacts { has_frozen: false, ..all }, frozen, &["train_frozen"]);
        let field = Settings { text_field: Some("body".to_string()), ..base() };
        check(field.clone(), true, &[]);
        check_in(RunFacts { has_records: false, ..all }, field, &["text_field"]);
    }
}
