//! The words of an opcode as a set: authors of inline assembly order modifiers as they like.

use super::types::{Scope, Semantics, Space, Type};
use crate::ptx::Opcode;

/// Words that were not asked for yet.
pub(super) struct Words<'a> {
    opcode: &'a Opcode,
    used: u64,
}

impl<'a> Words<'a> {
    /// All words but the first.
    pub(super) fn new(opcode: &'a Opcode) -> Result<Words<'a>, String> {
        if opcode.words.len() > 64 {
            return Err("more than 64 words in an opcode".to_string());
        }
        Ok(Words { opcode, used: 1 })
    }

    fn unused(&self) -> impl Iterator<Item = (usize, &'a str)> + use<'a> {
        let used = self.used;
        self.opcode
            .words
            .iter()
            .enumerate()
            .filter(move |(position, _)| used >> position & 1 == 0)
            .map(|(position, word)| (position, &**word))
    }

    /// The next unused word.
    pub(super) fn peek(&self) -> Option<&'a str> {
        self.unused().next().map(|(_, word)| word)
    }

    /// Uses up a word if it is there.
    pub(super) fn take(&mut self, name: &str) -> bool {
        let found = self.unused().find(|(_, word)| *word == name);
        if let Some((position, _)) = found {
            self.used |= 1 << position;
        }
        found.is_some()
    }

    /// Uses up the first word that `choose` knows.
    pub(super) fn take_by<T>(&mut self, choose: impl Fn(&'a str) -> Option<T>) -> Option<T> {
        let (position, value) =
            self.unused().find_map(|(position, word)| Some((position, choose(word)?)))?;
        self.used |= 1 << position;
        Some(value)
    }

    /// Uses up the first word of a table.
    pub(super) fn take_from<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        self.take_by(|word| table.iter().find(|row| row.0 == word).map(|row| row.1))
    }

    /// The first type.
    pub(super) fn take_type(&mut self) -> Result<Type, String> {
        self.take_by(Type::from_name).ok_or_else(|| "no type is given".to_string())
    }

    /// The first type, which has to be one of `allowed`.
    pub(super) fn take_type_of(&mut self, allowed: &[Type]) -> Result<Type, String> {
        let found = self.take_type()?;
        if allowed.contains(&found) {
            return Ok(found);
        }
        Err(format!("type `.{found}` is not one of {}", names(allowed)))
    }

    /// `.v2`, `.v4`, `.v8`, or 1.
    pub(super) fn take_vector(&mut self) -> usize {
        self.take_from(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
    }

    /// `.cta`, `.cluster`, `.gpu`, `.sys`.
    pub(super) fn take_scope(&mut self) -> Option<Scope> {
        self.take_from(&[
            ("cta", Scope::Cta),
            ("cluster", Scope::Cluster),
            ("gpu", Scope::Device),
            ("sys", Scope::System),
        ])
    }

    /// An order, weaker ones included.
    pub(super) fn take_semantics(&mut self) -> Option<Semantics> {
        self.take_from(&[
            ("mmio", Semantics::Mmio),
            ("weak", Semantics::Weak),
            ("volatile", Semantics::Volatile),
            ("relaxed", Semantics::Relaxed),
            ("acquire", Semantics::Acquire),
            ("release", Semantics::Release),
            ("acq_rel", Semantics::AcquireRelease),
            ("sc", Semantics::SequentiallyConsistent),
        ])
    }

    /// A state space, or [`Space::Generic`].
    pub(super) fn take_space(&mut self) -> Space {
        self.take_from(&[
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("shared::cluster", Space::SharedCluster),
            ("local", Space::Local),
            ("param", Space::Parameter),
            ("param::entry", Space::Parameter),
            ("param::func", Space::Parameter),
            ("const", Space::Constant),
        ])
        .unwrap_or(Space::Generic)
    }

    /// Uses up what only steers caches; true where a policy operand follows.
    pub(super) fn take_cache_hints(&mut self) -> bool {
        let mut policy = false;
        loop {
            let found = self.take_by(|word| match word {
                "L2::cache_hint" => Some(true),
                "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" => Some(false),
                "L1::evict_normal"
                | "L1::evict_unchanged"
                | "L1::evict_first"
                | "L1::evict_last"
                | "L1::no_allocate"
                | "L2::evict_normal"
                | "L2::evict_first"
                | "L2::evict_last"
                | "L2::64B"
                | "L2::128B"
                | "L2::256B" => Some(false),
                _ => None,
            });
            match found {
                Some(hint) => policy |= hint,
                None => return policy,
            }
        }
    }

    /// Every one of `names` has to be there.
    pub(super) fn expect(&mut self, names: &[&str]) -> Result<(), String> {
        for name in names {
            if !self.take(name) {
                return Err(format!("`.{name}` is missing"));
            }
        }
        Ok(())
    }

    /// Nothing may be left.
    pub(super) fn finish(&self) -> Result<(), String> {
        let left: Vec<String> = self.unused().map(|(_, word)| format!("`.{word}`")).collect();
        if left.is_empty() {
            return Ok(());
        }
        Err(format!("{} not known here", left.join(", ")))
    }
}

/// Names of types for messages.
pub(super) fn names(types: &[Type]) -> String {
    types.iter().map(|one| format!("`.{one}`")).collect::<Vec<_>>().join(", ")
}
