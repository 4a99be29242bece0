//! What can be wrong with a model that is read.

use std::path::PathBuf;

use thiserror::Error;

use crate::IrError;

/// Errors of capture. `place` is the file, or whatever name the caller gave to the text.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// A file cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// A file that must be there is not.
    #[error("`{}`: expected {expected}\nhint: {hint}", path.display())]
    NotFound {
        /// Where it was looked for.
        path: PathBuf,
        /// What was looked for.
        expected: String,
        /// What to do.
        hint: String,
    },
    /// Text that is not JSON.
    #[error("{place}:{line}:{column}: not valid JSON: {message}")]
    Json {
        /// The file.
        place: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's words.
        message: String,
    },
    /// JSON that is not of the expected form.
    #[error("{place}: expected {expected}, got {got}")]
    Form {
        /// The file.
        place: String,
        /// What it should hold.
        expected: &'static str,
        /// What it holds.
        got: String,
    },
    /// A key that the model cannot be described without is missing.
    #[error("{place}: key `{key}` is missing\nhint: {hint}")]
    MissingKey {
        /// The file.
        place: String,
        /// The key.
        key: String,
        /// What to do.
        hint: String,
    },
    /// A key that capture does not know.
    #[error("{place}: unknown key `{key}` with value `{value}`\nhint: {hint}")]
    UnknownKey {
        /// The file.
        place: String,
        /// The key.
        key: String,
        /// Its value as JSON, shortened.
        value: String,
        /// What to do.
        hint: String,
    },
    /// A value of the wrong type or out of range, alone or beside another key.
    #[error("{place}: key `{key}`: expected {expected}, got `{got}`{}", hint_line(hint))]
    Value {
        /// The file.
        place: String,
        /// The key.
        key: String,
        /// What it may be.
        expected: String,
        /// Its value as JSON, shortened.
        got: String,
        /// What to do; empty if `expected` says it.
        hint: String,
    },
    /// A value that is right but changes the mathematics in a way that is not supported.
    #[error("{place}: key `{key}`: value `{value}` is not supported\nhint: {hint}")]
    Unsupported {
        /// The file.
        place: String,
        /// The key.
        key: String,
        /// Its value as JSON, shortened.
        value: String,
        /// What is supported.
        hint: String,
    },
    /// A weight file whose header is broken, or whose length does not fit it.
    #[error("`{}`: {problem}\nhint: {hint}", path.display())]
    WeightFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// Weights under a name or in a format that is not read.
    #[error(
        "`{}`: expected weights in `model.safetensors`, in `model.safetensors.index.json` with its \
         shards, or in all shards `model-00001-of-0000N.safetensors`, got {found}\nhint: {hint}",
        folder.display()
    )]
    UnreadWeights {
        /// The model folder.
        folder: PathBuf,
        /// The files that it holds.
        found: String,
        /// What to do.
        hint: String,
    },
    /// A tensor that the config asks for is in no file.
    #[error("tensor `{name}`: expected {expected}, found in no file of `{}`\nhint: {hint}",
        folder.display())]
    MissingTensor {
        /// The tensor.
        name: String,
        /// Its shape.
        expected: String,
        /// The model folder.
        folder: PathBuf,
        /// What to do.
        hint: String,
    },
    /// A tensor that the config has no place for.
    #[error("tensor `{name}` in `{}`: not part of the model that config.json describes\n\
        hint: {hint}", path.display())]
    UnexpectedTensor {
        /// The tensor.
        name: String,
        /// Its file.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// A tensor of another shape or element type than the model takes.
    #[error("tensor `{name}` in `{}`: expected {expected}, got {got}\nhint: {hint}",
        path.display())]
    TensorMismatch {
        /// The tensor.
        name: String,
        /// Its file.
        path: PathBuf,
        /// What the config asks for.
        expected: String,
        /// What the file holds.
        got: String,
        /// What to do.
        hint: String,
    },
    /// An exported program that cannot be read.
    #[error("{place}: {what}\nhint: {hint}")]
    Export {
        /// The file.
        place: String,
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
    /// RoPE frequencies depend on the length of the sequence, which was not given.
    #[error(
        "rope_type `dynamic` turns at frequencies that depend on the sequence length\n\
        hint: say for how many tokens: `--seq TOKENS` on the command line"
    )]
    NeedsSequenceLength,
    /// The captured graph breaks a rule of the graph.
    #[error(transparent)]
    Graph(#[from] IrError),
}

fn hint_line(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("\nhint: {hint}") }
}
