//! The hash of loaded weights.

use std::collections::BTreeMap;

use crate::TrainError;
use crate::weights::MasterWeights;

/// The hash of weights, by the names of their tensors. The hash depends neither on the order of
/// loading nor on the ranks that loaded the tensors.
#[derive(Clone, Debug, Default)]
pub struct WeightsHash {
    tensors: BTreeMap<String, blake3::Hash>,
}

/// Words of 64 bits of the hash of a tensor.
const WORDS: usize = blake3::OUT_LEN / size_of::<u64>();

impl WeightsHash {
    /// The hash of all tensors written so far.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (name, hash) in &self.tensors {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(hash.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// The hashes of these tensors, for another process; zeros for tensors not written.
    pub(crate) fn words(&self, names: &[String]) -> Vec<u64> {
        let of = |name: &String| {
            let hash = self.tensors.get(name).map_or([0; blake3::OUT_LEN], |it| *it.as_bytes());
            bytemuck::cast::<_, [u64; WORDS]>(hash)
        };
        names.iter().flat_map(of).collect()
    }

    /// Adds the hashes of tensors written by another process.
    pub(crate) fn add_words(&mut self, names: &[String], words: &[u64]) {
        for (name, words) in names.iter().zip(words.as_chunks::<WORDS>().0) {
            if *words != [0; WORDS] {
                let hash = blake3::Hash::from_bytes(bytemuck::cast(*words));
                self.tensors.entry(name.clone()).or_insert(hash);
            }
        }
    }
}

/// Hashes weights during loading, so that nothing is read twice.
pub struct HashedWeights<'a> {
    target: &'a mut dyn MasterWeights,
    hash: WeightsHash,
    makes_copies: bool,
}

impl<'a> HashedWeights<'a> {
    /// Hashes weights written to `target`.
    pub fn new(target: &'a mut dyn MasterWeights) -> HashedWeights<'a> {
        HashedWeights { target, hash: WeightsHash::default(), makes_copies: true }
    }

    /// Continues with the hash of weights on other ranks.
    #[must_use]
    pub fn behind(self, hash: WeightsHash) -> HashedWeights<'a> {
        HashedWeights { hash, ..self }
    }

    /// Returns the hash state for the next rank.
    pub fn into_hash(self) -> WeightsHash {
        self.hash
    }

    /// Does not compute the compute copies, because the caller does so on all ranks.
    #[must_use]
    pub fn without_copies(self) -> HashedWeights<'a> {
        HashedWeights { makes_copies: false, ..self }
    }

    /// The hash of the written weights.
    pub fn hash(&self) -> String {
        self.hash.hash()
    }
}

impl MasterWeights for HashedWeights<'_> {
    fn program(&self) -> &deepwell_ir::Program {
        self.target.program()
    }

    fn write_master(&mut self, id: deepwell_ir::ValueId, bytes: &[u8]) -> Result<(), TrainError> {
        // A gathered value has another name than its parameter.
        let program = self.target.program();
        let state = program.parameters.iter().find(|state| state.master.value() == id);
        let name = state.map_or_else(|| &program.value(id).name, |state| &state.name);
        if !self.hash.tensors.contains_key(name) {
            self.hash.tensors.insert(name.clone(), blake3::hash(bytes));
        }
        self.target.write_master(id, bytes)
    }

    fn refresh_copies(&mut self) -> Result<(), TrainError> {
        if self.makes_copies { self.target.refresh_copies() } else { Ok(()) }
    }
}
