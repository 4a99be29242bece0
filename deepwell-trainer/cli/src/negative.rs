//! Negative numbers on the command line; no option takes a negative number.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Returns an explanation if the parser took `-1` for an unknown option or could not read `-1` as a
/// number; none for other errors.
pub(crate) fn explain(error: &clap::Error, args: impl Iterator<Item = OsString>) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
    let (option, value) = match error.kind() {
        ErrorKind::UnknownArgument => {
            // The parser reports only the first letter of a supposed group of short options.
            let first = context(ContextKind::InvalidArg)?;
            let at = args.iter().position(|arg| is_negative(arg) && arg.starts_with(first))?;
            let option = args.get(at.checked_sub(1)?)?;
            (option.strip_prefix("--").map(|_| option.clone())?, args[at].clone())
        }
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            let value = context(ContextKind::InvalidValue)?;
            let option = context(ContextKind::InvalidArg)?.split(' ').next()?;
            (option.to_string(), value.to_string())
        }
        _ => return None,
    };
    is_negative(&value).then(|| {
        format!(
            "error: {option}: expected a number of 0 or more, got `{value}`\n\n\
             For more information, try '--help'."
        )
    })
}

/// `-1`, `-0.5`, `-1e-3`; not `-v`.
fn is_negative(text: &str) -> bool {
    let digits = text.strip_prefix('-');
    digits.is_some_and(|digits| {
        digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
            && digits.parse::<f64>().is_ok()
    })
}
