//! Loads, stores and atomics.

use super::types::{Address, Register, Scope, Semantics, Source, Space, Type};

/// `ld`. The element of 128 bits is given as two of 64.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Where from.
    pub space: Space,
    /// Order.
    pub semantics: Semantics,
    /// Of [`Load::semantics`].
    pub scope: Scope,
    /// `.nc`: the bytes may not be written while the kernel runs.
    pub read_only: bool,
    /// Of one element. Signed elements are sign-extended to the register, others zero-extended.
    pub element: Type,
    /// One for each element; `None` is `_`.
    pub destinations: Box<[Option<Register>]>,
    /// First byte.
    pub address: Address,
}

/// `st`. The element of 128 bits is given as two of 64.
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    /// Where to.
    pub space: Space,
    /// Order.
    pub semantics: Semantics,
    /// Of [`Store::semantics`].
    pub scope: Scope,
    /// Of one element; registers are cut to it.
    pub element: Type,
    /// One for each element.
    pub sources: Box<[Source]>,
    /// First byte.
    pub address: Address,
}

/// What `atom` and `red` do with the old value and the operand.
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
    /// Where.
    pub space: Space,
    /// Order.
    pub semantics: Semantics,
    /// Of [`Atomic::semantics`].
    pub scope: Scope,
    /// What.
    pub operation: AtomicOperation,
    /// Of one element. For [`Type::B128`] every value is two sources, low half first.
    pub element: Type,
    /// Old values, one for each element; empty for `red` or for `_`.
    pub destinations: Box<[Option<Register>]>,
    /// First byte.
    pub address: Address,
    /// Operands, one for each element.
    pub values: Box<[Source]>,
    /// What [`AtomicOperation::CompareAndSwap`] compares with; else empty.
    pub compare: Box<[Source]>,
}
