//! Typed instructions.
//!
//! [`decode`](self) turns the text of one kernel into a [`Program`]: functions inlined, registers
//! numbered, labels and symbols resolved.

mod instruction;
mod scalar_instruction;
mod types;

pub use instruction::*;
pub use scalar_instruction::*;
pub use types::*;

/// A kernel that can run.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Instructions; a position in here is a program counter. The last one is an exit.
    pub steps: Vec<Step>,
    /// Masks of predicates that a warp needs.
    pub predicate_count: u32,
    /// Rows of 32-bit words (and halves) that a warp needs.
    pub word_count: u32,
    /// Rows of 64-bit words that a warp needs.
    pub long_count: u32,
    /// Bytes of local memory of a thread.
    pub local_bytes: u32,
    /// Bytes of shared memory before the dynamic part, which begins at this offset.
    pub shared_static_bytes: u32,
    /// Parameters in order of their offsets.
    pub parameters: Vec<ParameterLayout>,
    /// Bytes of all parameters.
    pub parameter_bytes: u32,
    /// `.reqntid`.
    pub required_threads: Option<[u32; 3]>,
    /// `.maxntid`.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqnctapercluster`.
    pub required_cluster: Option<[u32; 3]>,
    /// `.explicitcluster`: must be launched with a cluster shape.
    pub explicit_cluster: bool,
    /// `.target`, such as `sm_100a`.
    pub target: String,
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterLayout {
    /// Its name.
    pub name: String,
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
    /// Of the first byte.
    pub alignment: u32,
}
