//! What cannot be decoded.

use std::fmt;

use thiserror::Error;

/// A statement that is not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownForm {
    /// From 1.
    pub ptx_line: u32,
    /// The statement.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
    /// How often the same form is there with the same reason.
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

/// Why a kernel does not become a program.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// No kernel has this name.
    #[error("no kernel is named `{name}`; there are {present}")]
    NoKernel {
        /// What was asked for.
        name: String,
        /// The module's kernels.
        present: String,
    },
    /// Every statement that is not understood, each form once.
    #[error("{}", list(.0))]
    UnknownForms(Vec<UnknownForm>),
    /// A variable's initializer or layout makes no sense.
    #[error("variable `{name}`: {reason}")]
    Variable {
        /// Which.
        name: String,
        /// What was expected and what came.
        reason: String,
    },
}

fn list(forms: &[UnknownForm]) -> String {
    let lines: Vec<String> = forms.iter().map(|form| format!("\n  {form}")).collect();
    format!("{} forms are not known:{}", forms.len(), lines.concat())
}
