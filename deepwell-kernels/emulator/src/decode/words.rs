//! The words of an opcode as a set, because authors of inline assembly order modifiers freely.

use super::types::{Scope, Semantics, Space, Type};
use crate::ptx::Opcode;

/// The unused words of an opcode.
pub(super) struct Words<'a> {
    opcode: &'a Opcode,
    used: u64,
}

impl<'a> Words<'a> {
    /// Starts with all words but the first.
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

    /// Returns the next unused word.
    pub(super) fn peek(&self) -> Option<&'a str> {
        self.unused().next().map(|(_, word)| word)
    }

    /// Takes a word if present.
    pub(super) fn take(&mut self, name: &str) -> bool {
        let found = self.unused().find(|(_, word)| *word == name);
        if let Some((position, _)) = found {
            self.used |= 1 << position;
        }
        found.is_some()
    }

    /// Takes the first word for which `choose` returns a value.
    pub(super) fn take_by<T>(&mut self, choose: impl Fn(&'a str) -> Option<T>) -> Option<T> {
        let (position, value) =
            self.unused().find_map(|(position, word)| Some((position, choose(word)?)))?;
        self.used |= 1 << position;
        Some(value)
    }

    /// Takes the first word that is in the table.
    pub(super) fn take_from<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        self.take_by(|word| table.iter().find(|row| row.0 == word).map(|row| row.1))
    }

    /// Takes the first type.
    pub(super) fn take_type(&mut self) -> Result<Type, String> {
        self.take_by(Type::from_name).ok_or_else(|| "no type is given".to_string())
    }

    /// Takes the first type, which must be one of `allowed`.
    pub(super) fn take_type_of(&mut self, allowed: &[Type]) -> Result<Type, String> {
        let found = self.take_type()?;
        if allowed.contains(&found) {
            return Ok(found);
        }
        Err(format!("type `.{found}` is not one of {}", names(allowed)))
    }

    /// Takes `.v2`, `.v4` or `.v8`; 1 otherwise.
    pub(super) fn take_vector(&mut self) -> usize {
        self.take_from(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
    }

    /// Takes `.cta`, `.cluster`, `.gpu` or `.sys`.
    pub(super) fn take_scope(&mut self) -> Option<Scope> {
        self.take_from(&[
            ("cta", Scope::Cta),
            ("cluster", Scope::Cluster),
            ("gpu", Scope::Device),
            ("sys", Scope::System),
        ])
    }

    /// Takes a memory order, including `.weak`, `.volatile` and `.mmio`.
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

    /// Takes a state space; [`Space::Generic`] otherwise.
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

    /// Takes all cache hints. Returns whether a policy operand follows.
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

    /// Takes one of two words. Returns whether the first is there; without either, an error.
    pub(super) fn either(&mut self, first: &str, second: &str) -> Result<bool, String> {
        if self.take(first) {
            return Ok(true);
        }
        self.expect(&[second]).map(|()| false)
    }

    /// Takes all of `names`, which must be present.
    pub(super) fn expect(&mut self, names: &[&str]) -> Result<(), String> {
        for name in names {
            if !self.take(name) {
                return Err(format!("`.{name}` is missing"));
            }
        }
        Ok(())
    }

    /// Checks that no word is left.
    pub(super) fn finish(&self) -> Result<(), String> {
        let left: Vec<String> = self.unused().map(|(_, word)| format!("`.{word}`")).collect();
        if left.is_empty() {
            return Ok(());
        }
        Err(format!("{} not known here", left.join(", ")))
    }
}

/// Formats types for messages.
pub(super) fn names(types: &[Type]) -> String {
    types.iter().map(|one| format!("`.{one}`")).collect::<Vec<_>>().join(", ")
}
