//! PTX text as data.
//!
//! The grammar is what the compiler and authors of inline assembly write, not more than that: a
//! statement is a guard, a word with dots and operands, and nothing here knows what the words
//! mean. [`crate::decode`] does. Modifiers are in the author's order.
//!
//! ```
//! use deepwell_emulator::ptx;
//!
//! let text = ".version 9.0\n.target sm_90a\n.address_size 64\n\
//!     .visible .entry nothing(.param .u64 nothing_param_0) { ret; }";
//! let module = ptx::parse(text)?;
//! assert_eq!(module.kernels().next().unwrap().parameters.len(), 1);
//! # Ok::<(), ptx::ParseError>(())
//! ```

mod ast;
mod lexer;
mod literal;
mod operand;
mod parser;
mod statement;

pub use ast::{
    Directive, Function, Guard, InitialValue, Instruction, Module, Name, Opcode, Operand,
    RegisterDeclaration, Statement, StatementKind, Variable,
};
pub use parser::parse;

use thiserror::Error;

/// Text that is no PTX.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("PTX line {line}, column {column}: {message}")]
pub struct ParseError {
    /// From 1.
    pub line: u32,
    /// Byte in the line, from 1.
    pub column: u32,
    /// What was expected and what came.
    pub message: String,
}

#[cfg(test)]
mod tests;
