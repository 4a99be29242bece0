//! Parser for PTX text.
//!
//! The grammar covers the output of the compiler and of authors of inline assembly, and nothing
//! more. A statement is a guard, a dotted word and operands. The parser does not interpret the
//! words; [`crate::decode`] does. Modifiers keep the author's order.
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

/// A syntax error in PTX text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("PTX line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: u32,
    /// Byte in the line, from 1.
    pub column: u32,
    /// Expected and actual token.
    pub message: String,
}

#[cfg(test)]
mod tests;
