//! Rejects invalid values of settings by name, before anything runs.

use deepwell_plan::Parallel;

use crate::{Documents, Settings, TrainError};

impl Settings {
    /// Checks the values that are not checked elsewhere.
    ///
    /// # Errors
    /// [`TrainError::Setting`] names the first invalid value.
    pub fn check(&self) -> Result<(), TrainError> {
        check(self)
    }

    /// Checks the values that do not depend on the parallelism.
    ///
    /// # Errors
    /// As [`Settings::check`].
    pub fn check_values(&self) -> Result<(), TrainError> {
        check_values(self)
    }
}

/// Constraint on a number. Numbers used by kernels are checked as `f32`.
#[derive(Clone, Copy)]
enum Must {
    BeAtLeastOne,
    BePositive,
    NotBeNegative,
    LieFromZeroToOne,
    LieFromZeroBelowOne,
    BeAtMost(u64),
}

impl Must {
    fn holds_for(self, value: f64) -> bool {
        let value = f64::from(value as f32);
        let fits = match self {
            Must::BeAtLeastOne => value >= 1.0,
            Must::BePositive => value > 0.0,
            Must::NotBeNegative => value >= 0.0,
            Must::LieFromZeroToOne => (0.0..=1.0).contains(&value),
            Must::LieFromZeroBelowOne => (0.0..1.0).contains(&value),
            Must::BeAtMost(most) => value <= most as f64,
        };
        // NaN fits nowhere; infinity fits without an upper limit, but is invalid too.
        fits && value.is_finite()
    }

    fn expected(self) -> String {
        match self {
            Must::BeAtLeastOne => "at least 1".to_string(),
            Must::BePositive => "a positive number".to_string(),
            Must::NotBeNegative => "a number of at least 0".to_string(),
            Must::LieFromZeroToOne => "a number from 0 to 1".to_string(),
            Must::LieFromZeroBelowOne => "a number from 0 to less than 1".to_string(),
            Must::BeAtMost(most) => format!("at most {most}"),
        }
    }
}

type Row = (&'static str, Option<f64>, Must, Option<&'static str>);

/// Rejects the first invalid value that does not depend on the parallelism.
fn check_values(settings: &Settings) -> Result<(), TrainError> {
    let rows = counts(settings).into_iter().chain(numbers(settings)).chain(guards(settings));
    for (setting, value, must, hint) in rows {
        let Some(value) = value.filter(|&value| !must.holds_for(value)) else { continue };
        let (got, hint) = (value.to_string(), hint.map(str::to_string));
        return Err(TrainError::Setting { setting, expected: must.expected(), got, hint });
    }
    // A ZeRO stage and a schedule may be invalid with any number of ranks.
    Parallel { zero: settings.zero, ..Parallel::default() }.check()?;
    let schedule = settings.pipeline_schedule;
    Parallel { schedule, pipeline: 2, ..Parallel::default() }.check()?;
    Ok(())
}

/// Rejects the first invalid value.
fn check(settings: &Settings) -> Result<(), TrainError> {
    check_values(settings)?;
    let parallel = settings.parallel();
    if parallel.world_size() != settings.ranks {
        let (tensor, pipeline) = (settings.tensor, settings.pipeline);
        return Err(TrainError::Setting {
            setting: "ranks",
            expected: format!("a multiple of {tensor} tensor times {pipeline} pipeline ranks"),
            got: settings.ranks.to_string(),
            hint: Some("`--devices cpu:4 --tp 2` has two of each".to_string()),
        });
    }
    parallel.check()?;
    if settings.documents == Documents::Masked && settings.context > 1 {
        return Err(TrainError::Setting {
            setting: "documents",
            expected: "`joined` where ranks split each sequence, as keys go around by chunks"
                .to_string(),
            got: format!("masked with {} context-parallel ranks", settings.context),
            hint: Some("take data-, tensor- or pipeline-parallel ranks".to_string()),
        });
    }
    if settings.audit && settings.ranks > 1 {
        return Err(TrainError::Setting {
            setting: "audit",
            expected: "one rank, whose calls follow from its own operands".to_string(),
            got: format!("{} ranks", settings.ranks),
            hint: Some("audit the model on one device".to_string()),
        });
    }
    Ok(())
}

fn counts(settings: &Settings) -> Vec<Row> {
    let count = |value: u64| Some(value as f64);
    let size = |value: usize| Some(value as f64);
    use Must::{BeAtLeastOne, BeAtMost};
    vec![
        (
            "steps",
            count(settings.steps),
            BeAtLeastOne,
            Some("`deepwell eval MODEL --data FILE` evaluates without a step of training"),
        ),
        ("seq_len", size(settings.seq_len), BeAtLeastOne, None),
        ("batch_size", size(settings.batch_size), BeAtLeastOne, None),
        ("ranks", size(settings.ranks), BeAtLeastOne, Some("`--devices cpu:4`")),
        ("tensor", size(settings.tensor), BeAtLeastOne, None),
        ("context", size(settings.context), BeAtLeastOne, None),
        ("pipeline", size(settings.pipeline), BeAtLeastOne, None),
        ("chunks", size(settings.chunks), BeAtLeastOne, Some("`--pp 2 --vpp 2`")),
        ("expert", size(settings.expert), BeAtLeastOne, None),
        (
            "rank_timeout_s",
            count(settings.rank_timeout_s),
            BeAtLeastOne,
            Some("`--rank-timeout 600` ends a run ten minutes after a rank is stuck"),
        ),
        ("micro_batch", settings.micro_batch.and_then(size), BeAtLeastOne, None),
        ("memory_limit_bytes", settings.memory_limit_bytes.and_then(count), BeAtLeastOne, None),
        ("keep_last", size(settings.keep_last), BeAtLeastOne, None),
        ("eval_tokens", count(settings.eval_tokens), BeAtLeastOne, None),
        (
            "interim_eval_tokens",
            settings.interim_eval_tokens.and_then(count),
            BeAtLeastOne,
            Some("without it every evaluation reads `eval_tokens`"),
        ),
        ("eval_every", settings.eval_every.and_then(count), BeAtLeastOne, None),
        ("checkpoint_every", settings.checkpoint_every.and_then(count), BeAtLeastOne, None),
        (
            "warmup_steps",
            settings.warmup_steps.and_then(count),
            BeAtMost(settings.steps),
            Some("the run would end before it reaches its learning rate"),
        ),
    ]
}

/// An `f32` with its own short digits, for messages.
fn of(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

fn numbers(settings: &Settings) -> Vec<Row> {
    use Must::{BePositive, LieFromZeroBelowOne, LieFromZeroToOne, NotBeNegative};
    let optimizer = &settings.optimizer;
    let divides = "AdamW divides by 1 less this, to the power of the step";
    vec![
        ("learning_rate", settings.learning_rate, BePositive, None),
        ("max_grad_norm", Some(settings.max_grad_norm), BePositive, None),
        (
            "final_learning_rate_ratio",
            Some(settings.final_learning_rate_ratio),
            LieFromZeroToOne,
            Some("it is the last learning rate over the largest"),
        ),
        ("optimizer.beta1", of(optimizer.beta1), LieFromZeroBelowOne, Some(divides)),
        ("optimizer.beta2", of(optimizer.beta2), LieFromZeroBelowOne, Some(divides)),
        (
            "optimizer.eps",
            of(optimizer.eps),
            BePositive,
            Some("without it a gradient of zeros is divided by zero"),
        ),
        ("optimizer.weight_decay", of(optimizer.weight_decay), NotBeNegative, None),
        ("optimizer.selection_bias_rate", of(optimizer.selection_bias_rate), NotBeNegative, None),
        ("router.balance", Some(settings.router.balance), NotBeNegative, None),
        ("router.z", Some(settings.router.z), NotBeNegative, None),
        ("router.capacity_factor", settings.router.capacity_factor, BePositive, None),
    ]
}

fn guards(settings: &Settings) -> Vec<Row> {
    use Must::{BeAtLeastOne, BeAtMost, BePositive, LieFromZeroToOne, NotBeNegative};
    let guards = &settings.guards;
    let size = |value: usize| Some(value as f64);
    let share = Some("it is a share: 0.5 is half of a tensor");
    vec![
        (
            "guards.underflow_fraction_max",
            Some(guards.underflow_fraction_max),
            LieFromZeroToOne,
            share,
        ),
        (
            "guards.saturation_fraction_max",
            Some(guards.saturation_fraction_max),
            LieFromZeroToOne,
            share,
        ),
        (
            "guards.scale_clamp_fraction_max",
            Some(guards.scale_clamp_fraction_max),
            LieFromZeroToOne,
            share,
        ),
        ("guards.amax_growth_max", of(guards.amax_growth_max), BePositive, None),
        ("guards.amax_history_len", size(guards.amax_history_len), BeAtLeastOne, None),
        ("guards.strikes_max", Some(f64::from(guards.strikes_max)), BeAtLeastOne, None),
        ("guards.loss_window", size(guards.loss_window), BeAtLeastOne, None),
        (
            "guards.loss_warmup",
            size(guards.loss_warmup),
            BeAtMost(guards.loss_window as u64),
            Some("`guards.loss_window` is the number of losses that are kept"),
        ),
        ("guards.spike_deviations", of(guards.spike_deviations), BePositive, None),
        ("guards.spike_fraction_min", of(guards.spike_fraction_min), NotBeNegative, None),
        ("guards.spike_departure_min", of(guards.spike_departure_min), BePositive, None),
        (
            "guards.nonfinite_steps_max",
            Some(f64::from(guards.nonfinite_steps_max)),
            BeAtLeastOne,
            None,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use crate::Settings;

    /// A run file with one line; `expected` is the whole error, `None` for a valid file.
    #[track_caller]
    fn check(toml: &str, expected: Option<&str>) {
        let error = Settings::from_toml(toml, "run.toml").err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), expected, "{toml}");
    }

    #[test]
    fn values_that_cannot_be() {
        let divides = "\nhint: AdamW divides by 1 less this, to the power of the step";
        for (beta, got) in [("1.0", "1"), ("nan", "NaN"), ("-0.1", "-0.1")] {
            for name in ["beta1", "beta2"] {
                let expected = format!(
                    "optimizer.{name}: expected a number from 0 to less than 1, got {got}{divides}"
                );
                check(&format!("optimizer.{name} = {beta}"), Some(&expected));
            }
        }
        let zeros = "\nhint: without it a gradient of zeros is divided by zero";
        for (eps, got) in [("0.0", "0"), ("-1.0", "-1"), ("inf", "inf")] {
            let expected = format!("optimizer.eps: expected a positive number, got {got}{zeros}");
            check(&format!("optimizer.eps = {eps}"), Some(&expected));
        }
        let ratio = "\nhint: it is the last learning rate over the largest";
        for (value, got) in [("nan", "NaN"), ("-0.1", "-0.1"), ("1.5", "1.5"), ("inf", "inf")] {
            let expected = format!(
                "final_learning_rate_ratio: expected a number from 0 to 1, got {got}{ratio}"
            );
            check(&format!("final_learning_rate_ratio = {value}"), Some(&expected));
        }
        let small = format!("a positive number, got 0.{}1", "0".repeat(45));
        let large = format!("a positive number, got 1{}", "0".repeat(39));
        for (line, expected) in [
            ("optimizer.weight_decay = nan", "a number of at least 0, got NaN"),
            ("optimizer.weight_decay = -0.5", "a number of at least 0, got -0.5"),
            ("optimizer.selection_bias_rate = -1.0", "a number of at least 0, got -1"),
            ("learning_rate = 0.0", "a positive number, got 0"),
            // Zero as an f32, and infinite.
            ("learning_rate = 1e-46", small.as_str()),
            ("max_grad_norm = 1e39", large.as_str()),
            ("max_grad_norm = inf", "a positive number, got inf"),
            (
                "steps = 0",
                "at least 1, got 0\nhint: `deepwell eval MODEL --data FILE` evaluates without a \
                 step of training",
            ),
            ("eval_every = 0", "at least 1, got 0"),
            (
                "interim_eval_tokens = 0",
                "at least 1, got 0\nhint: without it every evaluation reads `eval_tokens`",
            ),
            ("checkpoint_every = 0", "at least 1, got 0"),
            ("guards.strikes_max = 0", "at least 1, got 0"),
            (
                "guards.underflow_fraction_max = 5.0",
                "a number from 0 to 1, got 5\nhint: it is a share: 0.5 is half of a tensor",
            ),
        ] {
            let name = line.split(' ').next().unwrap_or_default();
            check(line, Some(&format!("{name}: expected {expected}")));
        }
        check(
            "steps = 20\nwarmup_steps = 21",
            Some(
                "warmup_steps: expected at most 20, got 21\nhint: the run would end before it \
                 reaches its learning rate",
            ),
        );
    }

    #[test]
    fn values_at_the_ends() {
        for line in [
            "optimizer = { beta1 = 0.0, beta2 = 0.999, eps = 1e-15, weight_decay = 0.0 }",
            "final_learning_rate_ratio = 0.0",
            "final_learning_rate_ratio = 1.0",
            "steps = 20\nwarmup_steps = 20",
            "warmup_steps = 0",
            "guards.underflow_fraction_max = 1.0",
        ] {
            check(line, None);
        }
    }
}
