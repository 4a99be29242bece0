//! The table of proofs of a survey: which kernels were right before, with which PTX, launches and
//! emulator.
//!
//! A survey writes the table and no one else: its last line is a digest of the others, and a table
//! whose digest is wrong proves nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use deepwell_emulator::proof::{SOURCES_DIGEST, short};
use serde_json::{Value, json};

use crate::output::say;

/// What a survey found of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Proof {
    /// Digest of all that the verdict depends on.
    pub(crate) digest: String,
    /// Modes in which the kernel's launch was right.
    pub(crate) modes: usize,
    /// Mistakes that were noticed, or are redundant for a reason.
    pub(crate) mutants: usize,
}

/// Proofs by target, source and kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Proofs(BTreeMap<String, Proof>);

impl Proofs {
    /// Reads the table of a file. A missing file, and a table written by another emulator or by
    /// hand, give an empty table.
    pub(crate) fn read(path: &Path) -> Result<Proofs> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Proofs::default()),
            Err(error) => return Err(error).context(format!("cannot read {}", path.display())),
        };
        let proofs = Proofs::parse(&text);
        if proofs.is_none() {
            say(format_args!(
                "{}: not as a survey of this emulator wrote it: every kernel runs",
                path.display()
            ));
        }
        Ok(proofs.unwrap_or_default())
    }

    fn parse(text: &str) -> Option<Proofs> {
        let table: Value = serde_json::from_str(text).ok()?;
        if table["emulator"] != SOURCES_DIGEST {
            return None;
        }
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
        let proofs = table["kernels"].as_object()?.iter().map(|(name, proof)| {
            let digest = proof["digest"].as_str()?.to_string();
            let (modes, mutants) = (number(&proof["modes"])?, number(&proof["mutants"])?);
            Some((name.clone(), Proof { digest, modes, mutants }))
        });
        let proofs = Proofs(proofs.collect::<Option<_>>()?);
        (table["digest"] == proofs.digest()).then_some(proofs)
    }

    /// Writes the table.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let kernels: serde_json::Map<String, Value> = self
            .0
            .iter()
            .map(|(name, Proof { digest, modes, mutants })| {
                let proof = json!({ "digest": digest, "modes": modes, "mutants": mutants });
                (name.clone(), proof)
            })
            .collect();
        let table = json!({
            "digest": self.digest(),
            "emulator": SOURCES_DIGEST,
            "kernels": kernels,
        });
        fs::write(path, format!("{table:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Whether a kernel was right with this digest.
    pub(crate) fn has(&self, name: &str, digest: &str) -> bool {
        self.0.get(name).is_some_and(|proof| proof.digest == digest)
    }

    /// Enters what was found of a kernel, in the place of what was known.
    pub(crate) fn enter(&mut self, name: String, proof: Proof) {
        self.0.insert(name, proof);
    }

    fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(SOURCES_DIGEST.as_bytes());
        for (name, Proof { digest, modes, mutants }) in &self.0 {
            hasher.update(format!("{name} {digest} {modes} {mutants}\n").as_bytes());
        }
        short(&hasher)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proofs() -> Proofs {
        let proof = Proof { digest: "0123456789abcdef".to_string(), modes: 5, mutants: 12 };
        let mut proofs = Proofs::default();
        proofs.enter("sm_90a add add_bf16".to_string(), proof);
        proofs
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("proofs.json");
        assert_eq!(Proofs::read(&path).unwrap(), Proofs::default());
        proofs().write(&path).unwrap();
        let read = Proofs::read(&path).unwrap();
        assert_eq!(read, proofs());
        assert!(read.has("sm_90a add add_bf16", "0123456789abcdef"));
        assert!(!read.has("sm_90a add add_bf16", "0123456789abcdee"));
        assert!(!read.has("sm_90a add add_f32", "0123456789abcdef"));
    }

    #[test]
    fn a_table_that_a_hand_or_another_emulator_wrote_proves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("proofs.json");
        proofs().write(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(Proofs::parse(&text).is_some());
        for (from, to) in [
            ("0123456789abcdef", "0123456789abcdee"),
            ("\"mutants\": 12", "\"mutants\": 13"),
            ("add_bf16", "add_f32"),
            (SOURCES_DIGEST, "0000000000000000"),
            ("\"kernels\"", "\"rows\""),
        ] {
            let changed = text.replace(from, to);
            assert_ne!(changed, text, "{from}");
            assert_eq!(Proofs::parse(&changed), None, "{from}");
        }
    }
}
