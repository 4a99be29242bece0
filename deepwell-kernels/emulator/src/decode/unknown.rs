//! Errors of the decoder.

use std::fmt;

use thiserror::Error;

/// A statement that the decoder does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownForm {
    /// Line, from 1.
    pub ptx_line: u32,
    /// The statement.
    pub text: String,
    /// Reason for the rejection.
    pub reason: String,
    /// Number of statements with the same form and reason.
    pub occurrences: u32,
}

impl fmt::Display for UnknownForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: `{}`: {}", self.ptx_line, self.text, self.reason)?;
        if self.occurrences > 1 {
            write!(f, " ({} times)", self.occurrences)?;
        }
        Ok(())
    }
}

/// Reasons why a kernel cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// No kernel has this name.
    #[error("no kernel is named `{name}`; there are {present}")]
    NoKernel {
        /// Requested name.
        name: String,
        /// Kernels of the module.
        present: String,
    },
    /// Unknown statements, each form once.
    #[error("{}", list(.0))]
    UnknownForms(Vec<UnknownForm>),
    /// The initializer or layout of a variable is invalid.
    #[error("variable `{name}`: {reason}")]
    Variable {
        /// Name of the variable.
        name: String,
        /// Expected and actual state.
        reason: String,
    },
}

fn list(forms: &[UnknownForm]) -> String {
    let lines: Vec<String> = forms.iter().map(|form| format!("\n  {form}")).collect();
    format!("{} forms are not known:{}", forms.len(), lines.concat())
}
