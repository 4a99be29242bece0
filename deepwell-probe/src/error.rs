//! What can go wrong outside of probing; probing itself records what is missing.

/// An error of reading a value back from text.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The JSON is not that of a [`Hardware`](crate::Hardware).
    #[error(
        "expected the JSON of a hardware description: {source}\nhint: `deepwell probe --json` \
         writes one"
    )]
    Json {
        /// Line, column and what was expected there.
        #[source]
        source: serde_json::Error,
    },
    /// A number format of that name is not known.
    #[error(
        "expected a number format (`fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `mxfp8`, \
         `mxfp6`, `mxfp4`, `nvfp4` or `int8`), got `{got}`"
    )]
    UnknownFormat {
        /// The text that was given.
        got: String,
    },
    /// The TOML is no description of a [`Cluster`](crate::Cluster).
    #[error("line {line}, column {column} of the cluster description: {what}")]
    Cluster {
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
        /// What was expected there, what is there, and what to do.
        what: String,
    },
    /// A line that names no cluster.
    #[error("cluster `{got}`: {what}")]
    ClusterName {
        /// The text that was given.
        got: String,
        /// What was expected of which part of it.
        what: String,
    },
    /// There is no preset of that name.
    #[error("expected a preset ({known}), got `{got}`")]
    UnknownPreset {
        /// The text that was given.
        got: String,
        /// The names that are known, separated by commas.
        known: String,
    },
}
