//! What can be wrong with a graph or a program.

use thiserror::Error;

use crate::Stage;

/// An op got operands that it does not take.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{op}`: expected {expected}, got {got}")]
pub struct OpError {
    /// Name of the op.
    pub op: &'static str,
    /// What the op takes.
    pub expected: String,
    /// What came.
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
        /// What does not fit.
        #[source]
        source: OpError,
    },
    /// The graph breaks a structural rule.
    #[error("graph `{graph}` after stage {stage:?}: {what}")]
    Invalid {
        /// The graph.
        graph: String,
        /// The stage it is in.
        stage: Stage,
        /// The rule and who breaks it.
        what: String,
    },
    /// A pass was applied in the wrong order.
    #[error("pass `{pass}` wants a graph at stage {wants:?}, got {got:?}")]
    Stage {
        /// The pass.
        pass: &'static str,
        /// Stage it takes.
        wants: Stage,
        /// Stage the graph is at.
        got: Stage,
    },
    /// An op has no derivative.
    #[error(
        "node `{node}`: op `{op}` has no backward rule\n\
         hint: a model that holds this op can be captured and counted, not trained yet"
    )]
    NotDifferentiable {
        /// The node.
        node: String,
        /// Its op; of a call that is not known, the name that its framework has for it.
        op: String,
    },
    /// A gradient would end where it must go on, and what it is of would not train.
    #[error("node `{node}`: op `{op}` loses the gradient of `{tensor}`: {what}")]
    LostGradient {
        /// The node.
        node: String,
        /// Its op.
        op: &'static str,
        /// What the gradient is of.
        tensor: String,
        /// Where it ends.
        what: String,
    },
    /// The precision policy cannot be applied.
    #[error(transparent)]
    Policy(#[from] deepwell_precision::PolicyError),
    /// The policy asks for a mixture that the ops do not have.
    #[error("tensor `{tensor}`: {what}")]
    Precision {
        /// The tensor.
        tensor: String,
        /// What is not possible and what to do.
        what: String,
    },
    /// A graph that tensor-parallel ranks cannot split.
    #[error("`{name}` over {ranks} ranks: {what}")]
    Split {
        /// The node or parameter.
        name: String,
        /// How many ranks there are.
        ranks: usize,
        /// What was expected and what came.
        what: String,
    },
    /// The program breaks a rule.
    #[error("program `{program}`: {what}")]
    Program {
        /// The program.
        program: String,
        /// The rule and who breaks it.
        what: String,
    },
    /// Text that is not what it should be.
    #[error("not a valid {what}: {source}")]
    Json {
        /// What was expected.
        what: &'static str,
        /// The parser's words.
        #[source]
        source: serde_json::Error,
    },
}
