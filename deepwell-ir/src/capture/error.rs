//! Errors of reading a model.

use std::path::PathBuf;

use thiserror::Error;

use crate::IrError;

/// Errors of capture. `location` is the file, or the name that the caller gave to the text.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// A file cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A required file is missing.
    #[error("`{}`: expected {expected}\nhint: {hint}", path.display())]
    NotFound {
        /// Where the file was expected.
        path: PathBuf,
        /// What was expected there.
        expected: String,
        /// How to fix the problem.
        hint: String,
    },
    /// Text that is not JSON.
    #[error("{location}:{line}:{column}: not valid JSON: {message}")]
    Json {
        /// The file.
        location: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's message.
        message: String,
    },
    /// JSON of an unexpected form.
    #[error("{location}: expected {expected}, got {got}")]
    Form {
        /// The file.
        location: String,
        /// Expected content.
        expected: &'static str,
        /// Actual content.
        got: String,
    },
    /// A required key is missing.
    #[error("{location}: key `{key}` is missing\nhint: {hint}")]
    MissingKey {
        /// The file.
        location: String,
        /// The key.
        key: String,
        /// How to fix the problem.
        hint: String,
    },
    /// A key that capture does not know.
    #[error("{location}: unknown key `{key}` with value `{value}`\nhint: {hint}")]
    UnknownKey {
        /// The file.
        location: String,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// How to fix the problem.
        hint: String,
    },
    /// A value of the wrong type or out of range, possibly because of another key.
    #[error("{location}: key `{key}`: expected {expected}, got `{got}`{}", hint_line(hint))]
    Value {
        /// The file.
        location: String,
        /// The key.
        key: String,
        /// Allowed values.
        expected: String,
        /// The value as JSON, shortened.
        got: String,
        /// How to fix the problem; empty if `expected` is sufficient.
        hint: String,
    },
    /// A valid value that selects unsupported mathematics.
    #[error("{location}: key `{key}`: value `{value}` is not supported\nhint: {hint}")]
    Unsupported {
        /// The file.
        location: String,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// Supported values.
        hint: String,
    },
    /// A weight file with a broken header or a wrong length.
    #[error("`{}`: {problem}\nhint: {hint}", path.display())]
    WeightFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
        /// How to fix the problem.
        hint: String,
    },
    /// Weights under an unsupported name or in an unsupported format.
    #[error(
        "`{}`: expected weights in `model.safetensors`, in `model.safetensors.index.json` with its \
         shards, or in all shards `model-00001-of-0000N.safetensors`, got {found}\nhint: {hint}",
        folder.display()
    )]
    UnreadWeights {
        /// The model folder.
        folder: PathBuf,
        /// The files in the folder.
        found: String,
        /// How to fix the problem.
        hint: String,
    },
    /// A tensor required by the config is in no file.
    #[error("tensor `{name}`: expected {expected}, found in no file of `{}`\nhint: {hint}",
        folder.display())]
    MissingTensor {
        /// The tensor.
        name: String,
        /// Expected shape.
        expected: String,
        /// The model folder.
        folder: PathBuf,
        /// How to fix the problem.
        hint: String,
    },
    /// A tensor that is not part of the configured model.
    #[error("tensor `{name}` in `{}`: not part of the model that config.json describes\n\
        hint: {hint}", path.display())]
    UnexpectedTensor {
        /// The tensor.
        name: String,
        /// The file of the tensor.
        path: PathBuf,
        /// How to fix the problem.
        hint: String,
    },
    /// A tensor with an unexpected shape or element type.
    #[error("tensor `{name}` in `{}`: expected {expected}, got {got}\nhint: {hint}",
        path.display())]
    TensorMismatch {
        /// The tensor.
        name: String,
        /// The file of the tensor.
        path: PathBuf,
        /// Type according to the config.
        expected: String,
        /// Type in the file.
        got: String,
        /// How to fix the problem.
        hint: String,
    },
    /// A value of a tensor that is NaN or infinite.
    #[error("tensor `{name}` in `{}`: expected finite values, got {value} at element {index}",
        path.display())]
    NonFinite {
        /// The tensor.
        name: String,
        /// The file of the tensor.
        path: PathBuf,
        /// Row-major index of the first such element.
        index: usize,
        /// The value.
        value: f32,
    },
    /// An unreadable exported program.
    #[error("{location}: {what}\nhint: {hint}")]
    Export {
        /// The file.
        location: String,
        /// The problem.
        what: String,
        /// How to fix the problem.
        hint: String,
    },
    /// RoPE frequencies depend on the sequence length, but none was given.
    #[error(
        "rope_type `dynamic` turns at frequencies that depend on the sequence length\n\
        hint: say for how many tokens: `--seq TOKENS` on the command line"
    )]
    NeedsSequenceLength,
    /// The captured graph breaks a graph rule.
    #[error(transparent)]
    Graph(#[from] IrError),
}

fn hint_line(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("\nhint: {hint}") }
}
