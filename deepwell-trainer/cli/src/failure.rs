//! Error output and exit codes of failed subcommands.

use std::error::Error;

use deepwell_plan::PlanError;
use deepwell_trainer::TrainError;

/// Exit code of a failed check or verdict.
pub(crate) const FAILED: u8 = 1;
/// Exit code of an unusable command line or input.
pub(crate) const UNUSABLE: u8 = 2;

/// The exit code of an error.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if error.chain().any(is_verdict) { FAILED } else { UNUSABLE }
}

/// Whether an error is a negative answer to a valid request: no plan fits into memory, or a guard
/// stops the training.
fn is_verdict(cause: &(dyn Error + 'static)) -> bool {
    match cause.downcast_ref::<TrainError>() {
        Some(TrainError::Guard(_)) => true,
        Some(TrainError::Plan(error)) => error.is_no_plan(),
        Some(_) => false,
        None => cause.downcast_ref::<PlanError>().is_some_and(PlanError::is_no_plan),
    }
}

/// Formats an error: `error:` with its causes, then the hints of all causes.
///
/// Libraries write their hints as lines `hint: …` of the message, and often include the message of
/// a cause in their own; such a cause is not repeated.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    let mut hints: Vec<String> = Vec::new();
    for (depth, cause) in error.chain().enumerate() {
        let message = cause.to_string();
        let (hint_lines, lines): (Vec<&str>, Vec<&str>) =
            message.lines().partition(|line| line.trim_start().starts_with("hint:"));
        for hint in hint_lines {
            let hint = hint.trim().to_string();
            if !hints.contains(&hint) {
                hints.push(hint);
            }
        }
        let lines = lines.join("\n");
        if !text.contains(&lines) {
            text.push_str(if depth == 0 { "error: " } else { "  caused by: " });
            text.push_str(&lines);
            text.push('\n');
        }
    }
    for hint in hints {
        text.push_str(&hint);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn check(error: &anyhow::Error, expected: &str) {
        assert_eq!(describe(error), expected);
    }

    #[test]
    fn errors_as_text() {
        check(&anyhow!("no model `x`"), "error: no model `x`\n");
        check(&anyhow!("no model\nhint: name one"), "error: no model\nhint: name one\n");
        check(
            &anyhow!("line 3\nhint: close it").context("file `a`\nhint: see the manual"),
            "error: file `a`\n  caused by: line 3\nhint: see the manual\nhint: close it\n",
        );
        // The cause is not repeated if the message already ends with it.
        check(&anyhow!("not found").context("file `a`: not found"), "error: file `a`: not found\n");
        check(
            &anyhow!("no plan fits; tried:\n  a\n  b\nhint: less"),
            "error: no plan fits; tried:\n  a\n  b\nhint: less\n",
        );
    }

    #[test]
    fn a_model_that_does_not_fit_is_a_verdict() {
        let nothing_fits = || PlanError::NothingFits { limit_bytes: 1, rejected: Vec::new() };
        assert_eq!(exit_code(&anyhow::Error::from(nothing_fits()).context("plan")), FAILED);
        assert_eq!(exit_code(&TrainError::from(nothing_fits()).into()), FAILED);
        let none_runs =
            PlanError::NoPlan { what: String::new(), rejected: Vec::new(), hint: String::new() };
        assert_eq!(exit_code(&none_runs.into()), FAILED);
        assert_eq!(exit_code(&anyhow!("no model `x`")), UNUSABLE);
    }
}
