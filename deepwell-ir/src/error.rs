//! Errors in graphs and programs.

use thiserror::Error;

use crate::{Recompute, Stage};

/// Operands do not fit an op.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{op}`: expected {expected}, got {got}")]
pub struct OpError {
    /// Name of the op.
    pub op: &'static str,
    /// Operands that the op accepts.
    pub expected: String,
    /// Operands that the op got.
    pub got: String,
}

/// Errors of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IrError {
    /// A node's operands do not fit its op.
    #[error("node `{node}`: {source}")]
    Operands {
        /// The node.
        node: String,
        /// The mismatch.
        #[source]
        source: OpError,
    },
    /// The graph breaks a structural rule.
    #[error("graph `{graph}` after stage {stage:?}: {what}")]
    Invalid {
        /// The graph.
        graph: String,
        /// The stage of the graph.
        stage: Stage,
        /// The rule and the offender.
        what: String,
    },
    /// A pass was applied in the wrong order.
    #[error("pass `{pass}` wants a graph at stage {wants:?}, got {got:?}")]
    Stage {
        /// The pass.
        pass: &'static str,
        /// Stage that the pass accepts.
        wants: Stage,
        /// Stage of the graph.
        got: Stage,
    },
    /// More layers are to be recomputed than there are.
    #[error("recompute {rule}: expected at most {layers} layers")]
    RecomputedLayers {
        /// The rule.
        rule: Recompute,
        /// Layers of the graph.
        layers: usize,
    },
    /// An op has no derivative.
    #[error(
        "node `{node}`: op `{op}` has no backward rule\n\
         hint: a model that holds this op can be captured and counted, not trained yet"
    )]
    NotDifferentiable {
        /// The node.
        node: String,
        /// Name of the op; for an opaque call, the name in the source framework.
        op: String,
    },
    /// A gradient ends where it must be passed on, so earlier layers would not train.
    #[error("node `{node}`: op `{op}` loses the gradient of `{tensor}`: {what}")]
    LostGradient {
        /// The node.
        node: String,
        /// Its op.
        op: &'static str,
        /// The tensor whose gradient is lost.
        tensor: String,
        /// Where the gradient ends.
        what: String,
    },
    /// The precision policy cannot be applied.
    #[error(transparent)]
    Policy(#[from] deepwell_precision::PolicyError),
    /// The policy asks for a combination that no op supports.
    #[error("tensor `{tensor}`: {what}")]
    Precision {
        /// The tensor.
        tensor: String,
        /// The unsupported combination and a remedy.
        what: String,
    },
    /// Tensor-parallel ranks cannot split the graph.
    #[error("`{name}` over {ranks} ranks: {what}")]
    Split {
        /// The node or parameter.
        name: String,
        /// Number of ranks.
        ranks: usize,
        /// The expected and the actual value.
        what: String,
    },
    /// The program breaks a rule.
    #[error("program `{program}`: {what}")]
    Program {
        /// The program.
        program: String,
        /// The rule and the offender.
        what: String,
    },
    /// Text that does not parse.
    #[error("not a valid {what}: {source}")]
    Json {
        /// What was expected.
        what: &'static str,
        /// The parser's message.
        #[source]
        source: serde_json::Error,
    },
}
