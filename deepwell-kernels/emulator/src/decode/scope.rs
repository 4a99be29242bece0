//! Scopes and names.

use std::collections::HashMap;
use std::sync::Arc;

use super::types::{Register, Space, Type};
use crate::ptx::{Name, RegisterDeclaration, Statement, StatementKind};

/// Meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Binding {
    /// A predicate register.
    Predicate(u32),
    /// A register of up to 64 bits.
    Value(Register),
    /// A register of 128 bits: the index of its low half.
    Wide(u32),
    /// A variable, by space and address.
    Variable {
        /// Memory space.
        space: Space,
        /// Address of the first byte in the space.
        address: u64,
        /// Size in bytes.
        bytes: u32,
    },
}

/// Used registers of each class, and used bytes of local memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tops {
    pub(super) predicates: u32,
    pub(super) words: u32,
    pub(super) longs: u32,
    pub(super) local_bytes: u32,
}

impl Tops {
    /// Returns the maximum of each count.
    pub(super) fn maximum(self, other: Tops) -> Tops {
        Tops {
            predicates: self.predicates.max(other.predicates),
            words: self.words.max(other.words),
            longs: self.longs.max(other.longs),
            local_bytes: self.local_bytes.max(other.local_bytes),
        }
    }

    /// Allocates `count` consecutive registers of a type. Returns the binding of the first.
    pub(super) fn allocate(&mut self, register_type: Type, count: u32) -> Result<Binding, String> {
        let take = |top: &mut u32, count: u32| {
            let first = *top;
            *top = first.checked_add(count).ok_or("too many registers".to_string())?;
            Ok::<u32, String>(first)
        };
        Ok(match register_type {
            Type::Predicate => Binding::Predicate(take(&mut self.predicates, count)?),
            Type::B128 => {
                let halves = count.checked_mul(2).ok_or("too many registers".to_string())?;
                Binding::Wide(take(&mut self.longs, halves)?)
            }
            _ => match register_type.bits() {
                0..=16 => Binding::Value(Register::Half(take(&mut self.words, count)?)),
                17..=32 => Binding::Value(Register::Word(take(&mut self.words, count)?)),
                _ => Binding::Value(Register::Long(take(&mut self.longs, count)?)),
            },
        })
    }
}

impl Binding {
    /// Returns the binding of a register `distance` after this one.
    fn neighbor(self, distance: u32) -> Binding {
        match self {
            Binding::Predicate(index) => Binding::Predicate(index + distance),
            Binding::Wide(index) => Binding::Wide(index + 2 * distance),
            Binding::Value(Register::Half(index)) => {
                Binding::Value(Register::Half(index + distance))
            }
            Binding::Value(Register::Word(index)) => {
                Binding::Value(Register::Word(index + distance))
            }
            Binding::Value(Register::Long(index)) => {
                Binding::Value(Register::Long(index + distance))
            }
            variable @ Binding::Variable { .. } => variable,
        }
    }
}

/// A scope between braces.
pub(super) struct Scope {
    /// Index among the function's scopes, in the order of the text.
    pub(super) ordinal: usize,
    /// Whether this is the outermost scope of a function, which hides the caller's names.
    pub(super) is_root: bool,
    /// Allocation state to restore at the end of the scope.
    pub(super) tops: Tops,
    names: HashMap<Name, Binding>,
    prefixes: HashMap<Name, (u32, Binding)>,
}

impl Scope {
    pub(super) fn new(ordinal: usize, is_root: bool, tops: Tops) -> Scope {
        Scope { ordinal, is_root, tops, names: HashMap::new(), prefixes: HashMap::new() }
    }

    /// Binds a name.
    pub(super) fn bind(&mut self, name: Name, binding: Binding) {
        self.names.insert(name, binding);
    }

    /// Declares registers.
    pub(super) fn declare(
        &mut self,
        declaration: &RegisterDeclaration,
        tops: &mut Tops,
    ) -> Result<(), String> {
        if declaration.vector != 1 {
            return Err("registers that are vectors are not known".to_string());
        }
        for (name, count) in &declaration.names {
            let binding = tops.allocate(declaration.register_type, count.unwrap_or(1))?;
            match count {
                Some(count) => {
                    self.prefixes.insert(name.clone(), (*count, binding));
                }
                None => self.bind(name.clone(), binding),
            }
        }
        Ok(())
    }

    /// Looks up a name in this scope.
    pub(super) fn find(&self, name: &str) -> Option<Binding> {
        if let Some(binding) = self.names.get(name) {
            return Some(*binding);
        }
        if self.prefixes.is_empty() {
            return None;
        }
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        // A prefix may itself end in digits, as in `x1<4>`.
        for split in name.len() - digits..name.len() {
            let (prefix, number) = name.split_at(split);
            if let Some((count, first)) = self.prefixes.get(prefix) {
                let number: u32 = number.parse().ok()?;
                return (number < *count).then(|| first.neighbor(number));
            }
        }
        None
    }
}

/// Labels and branch tables of one function, by scope.
#[derive(Debug, Default)]
pub(super) struct Labels {
    scopes: Vec<LabelScope>,
    /// Number of labels in all scopes.
    pub(super) count: u32,
}

#[derive(Debug, Default)]
struct LabelScope {
    labels: HashMap<Name, u32>,
    tables: HashMap<Name, Arc<[Name]>>,
}

impl Labels {
    /// Collects all labels, so that forward branches can be resolved.
    pub(super) fn new(body: &[Statement]) -> Labels {
        let mut labels = Labels { scopes: vec![LabelScope::default()], count: 0 };
        let mut open = vec![0];
        for statement in body {
            match &statement.kind {
                StatementKind::ScopeBegin => {
                    open.push(labels.scopes.len());
                    labels.scopes.push(LabelScope::default());
                }
                StatementKind::ScopeEnd => {
                    open.pop();
                }
                StatementKind::Label(name) => {
                    if let Some(&scope) = open.last() {
                        labels.scopes[scope].labels.insert(name.clone(), labels.count);
                        labels.count += 1;
                    }
                }
                StatementKind::BranchTargets { name, targets } => {
                    if let Some(&scope) = open.last() {
                        labels.scopes[scope].tables.insert(name.clone(), targets[..].into());
                    }
                }
                _ => {}
            }
        }
        labels
    }

    /// Looks up a label of one scope.
    pub(super) fn find(&self, ordinal: usize, name: &str) -> Option<u32> {
        self.scopes.get(ordinal)?.labels.get(name).copied()
    }

    /// Looks up a branch table of one scope.
    pub(super) fn table(&self, ordinal: usize, name: &str) -> Option<Arc<[Name]>> {
        self.scopes.get(ordinal)?.tables.get(name).cloned()
    }
}
