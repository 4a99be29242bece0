//! Loads, stores and atomics.

use super::types::{Address, Register, Scope, Semantics, Source, Space, Type};

/// `ld`. A 128-bit element is decoded as two 64-bit elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Memory space.
    pub space: Space,
    /// Memory order.
    pub semantics: Semantics,
    /// Scope of the order.
    pub scope: Scope,
    /// `.nc`: the bytes must not be written while the kernel runs.
    pub read_only: bool,
    /// Element type. Signed elements are sign-extended to the register, others zero-extended.
    pub element: Type,
    /// One register per element; `None` is `_`.
    pub destinations: Box<[Option<Register>]>,
    /// First byte.
    pub address: Address,
}

/// `st`. A 128-bit element is decoded as two 64-bit elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    /// Memory space.
    pub space: Space,
    /// Memory order.
    pub semantics: Semantics,
    /// Scope of the order.
    pub scope: Scope,
    /// Element type; registers are truncated to it.
    pub element: Type,
    /// One source per element.
    pub sources: Box<[Source]>,
    /// First byte.
    pub address: Address,
}

/// Operations of `atom` and `red`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AtomicOperation {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    /// `old >= operand ? 0 : old + 1`.
    Increment,
    /// `old == 0 || old > operand ? operand : old - 1`.
    Decrement,
    Exchange,
    CompareAndSwap,
}

/// `atom`, `red`.
#[derive(Clone, Debug, PartialEq)]
pub struct Atomic {
    /// Memory space.
    pub space: Space,
    /// Memory order.
    pub semantics: Semantics,
    /// Scope of the order.
    pub scope: Scope,
    /// Operation.
    pub operation: AtomicOperation,
    /// Element type. A [`Type::B128`] value is two sources, low half first.
    pub element: Type,
    /// Registers for the old values, one per element; empty for `red` or for `_`.
    pub destinations: Box<[Option<Register>]>,
    /// First byte.
    pub address: Address,
    /// Operands, one per element.
    pub values: Box<[Source]>,
    /// Expected values of [`AtomicOperation::CompareAndSwap`]; otherwise empty.
    pub compare: Box<[Source]>,
}
