//! Errors outside of probing; probing itself records what is missing.

/// An error of parsing a value from text.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Not the JSON of a [`Hardware`](crate::Hardware).
    #[error(
        "expected the JSON of a hardware description: {source}\nhint: `deepwell probe --json` \
         writes one"
    )]
    Json {
        /// Line, column and expected value.
        #[source]
        source: serde_json::Error,
    },
    /// Unknown name of a number format.
    #[error(
        "expected a number format (`fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `mxfp8`, \
         `mxfp6`, `mxfp4`, `nvfp4` or `int8`), got `{got}`"
    )]
    UnknownFormat {
        /// The given text.
        got: String,
    },
    /// Not a TOML description of a [`Cluster`](crate::Cluster).
    #[error("line {line}, column {column} of the cluster description: {what}")]
    Cluster {
        /// Line, from 1.
        line: usize,
        /// Column, from 1, in characters.
        column: usize,
        /// Expected value, actual value, and fix.
        what: String,
    },
    /// A line that does not name a cluster.
    #[error("cluster `{got}`: {what}")]
    ClusterName {
        /// The given text.
        got: String,
        /// The invalid part, and its expected value.
        what: String,
    },
    /// Unknown name of a preset.
    #[error("expected a preset ({known}), got `{got}`")]
    UnknownPreset {
        /// The given text.
        got: String,
        /// The known names, separated by commas.
        known: String,
    },
}
