//! Settings that have no effect in a run as it is: told, so that none is dropped in silence.

use crate::Settings;

/// A line for each setting that is given and has no effect, with the reason. `quantizes` says
/// whether any tensor is quantized.
pub(crate) fn without_effect(settings: &Settings, quantizes: bool) -> Vec<String> {
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
        settings.guards != defaults.guards && !quantizes,
        "guards",
        "no tensor is quantized, so that no layer can fall back",
    );
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_nothing_reads_are_told() {
        let check = |settings: Settings, quantizes, expected: &[&str]| {
            let told = without_effect(&settings, quantizes);
            let names: Vec<&str> = told.iter().filter_map(|line| line.split('`').nth(1)).collect();
            assert_eq!(names, expected, "{told:?}");
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
    }
}
