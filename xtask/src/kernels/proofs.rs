//! The table of SASS without faults: `--unproven` compiles SASS only for the PTX that is not in it.
//!
//! A digest covers the PTX without debug information, the compiler's version and flags, and the
//! rules for SASS. The compiler is pinned, so the same PTX has the same SASS. PTX that no test runs
//! is not compiled either where its source, the files that it includes and the rules are those of
//! the table.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::flags::PTXAS_FLAGS;
use super::unit::{NOT_RUN, feed};

/// The table, relative to the workspace's root.
const TABLE: &str = "deepwell-kernels/tests/cuda/proofs/sass.json";
/// Selects the tenth of the table that is compiled nevertheless; `all` for all.
const DRAW_VARIABLE: &str = "DEEPWELL_PROOF_DRAW";
/// Sources of the rules: another rule can find a fault in the same SASS.
const RULES: [&str; 3] =
    [include_str!("sass_rules.rs"), include_str!("sass.rs"), include_str!("resources.rs")];

/// Digests by architecture and source, such as `sm_90a adamw`.
pub(super) type Digests = BTreeMap<String, String>;

/// The committed table, and the word that selects a tenth of it.
#[derive(Debug, Default)]
pub(crate) struct SassProofs {
    proofs: Proofs,
    draw: String,
}

/// What the table holds.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Proofs {
    /// Digests of PTX.
    pub(super) sass: Digests,
    /// Digests of sources, of architectures whose PTX no test runs.
    pub(super) sources: Digests,
}

impl SassProofs {
    /// Reads the table of the workspace at `root`. A missing table and one that was edited by hand
    /// have no entries.
    pub(super) fn read(root: &Path) -> SassProofs {
        let proofs = fs::read(path(root)).ok().and_then(|text| parse(&text)).unwrap_or_default();
        SassProofs { proofs, draw: std::env::var(DRAW_VARIABLE).unwrap_or_default() }
    }

    /// Whether the table has the digest of this PTX.
    pub(super) fn has(&self, name: &str, digest: &str) -> bool {
        self.proofs.sass.get(name).is_some_and(|known| known == digest)
    }

    /// Whether SASS of this PTX need not be compiled: it is in the table and was not drawn.
    pub(super) fn spares(&self, name: &str, digest: &str) -> bool {
        self.has(name, digest) && !is_drawn(&self.draw, name)
    }

    /// Whether PTX of this source need not be compiled: no test runs it, and the table has the
    /// source, which was not drawn.
    pub(super) fn spares_ptx(&self, name: &str, source: &str) -> bool {
        let is_known = self.proofs.sources.get(name).is_some_and(|known| known == source);
        is_known && !is_drawn(&self.draw, name)
    }

    /// The digest of PTX that was not compiled because of its source.
    pub(super) fn spared(&self, name: &str, source: &str) -> Option<&String> {
        self.proofs.sass.get(name).filter(|_| self.spares_ptx(name, source))
    }
}

impl Proofs {
    /// Adds a kernel without faults.
    pub(super) fn add(&mut self, name: &str, sass: String, source: String) {
        if NOT_RUN.iter().any(|architecture| name.starts_with(&format!("{architecture} "))) {
            self.sources.insert(name.to_string(), source);
        }
        self.sass.insert(name.to_string(), sass);
    }
}

/// Writes the table.
pub(super) fn write(root: &Path, proofs: &Proofs) -> Result<()> {
    let table =
        json!({ "digest": digest_of(proofs), "sass": proofs.sass, "sources": proofs.sources });
    let path = path(root);
    fs::write(&path, format!("{table:#}\n"))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn path(root: &Path) -> PathBuf {
    root.join(TABLE)
}

/// Returns the entries of a table whose digest is right.
fn parse(text: &[u8]) -> Option<Proofs> {
    let table: Value = serde_json::from_slice(text).ok()?;
    let digests = |name: &str| serde_json::from_value::<Digests>(table.get(name)?.clone()).ok();
    let proofs = Proofs { sass: digests("sass")?, sources: digests("sources")? };
    (table.get("digest")?.as_str()? == digest_of(&proofs)).then_some(proofs)
}

fn digest_of(proofs: &Proofs) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, digest) in proofs.sass.iter().chain(&proofs.sources) {
        feed(&mut hasher, name.as_bytes());
        feed(&mut hasher, digest.as_bytes());
    }
    short(&hasher)
}

/// Returns the digest of PTX without debug information.
pub(super) fn sass_digest(compiler: &str, ptx: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    feed(&mut hasher, compiler.as_bytes());
    for text in PTXAS_FLAGS.iter().chain(&RULES) {
        feed(&mut hasher, text.as_bytes());
    }
    // Comments hold the compiler's build; blank lines separate functions.
    for line in ptx.lines().map(str::trim) {
        if !line.is_empty() && !line.starts_with("//") {
            feed(&mut hasher, line.as_bytes());
        }
    }
    short(&hasher)
}

/// Returns the digest of a source, from the hash of all that its PTX is made of.
pub(super) fn source_digest(content_hash: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in RULES.iter().chain(&[content_hash]) {
        feed(&mut hasher, text.as_bytes());
    }
    short(&hasher)
}

/// Returns the first 16 hexadecimal digits.
fn short(hasher: &blake3::Hasher) -> String {
    hasher.finalize().to_hex()[..16].to_string()
}

/// Whether an entry is compiled again. A word draws one entry in ten, the empty word draws none.
fn is_drawn(draw: &str, name: &str) -> bool {
    match draw {
        "" => false,
        "all" => true,
        _ => blake3::hash(format!("{draw} {name}").as_bytes()).as_bytes()[0].is_multiple_of(10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_cover_code_and_compiler() {
        let first = sass_digest("13.0", "add;\n");
        for (compiler, ptx, differs) in [
            ("13.0", "// comment\n\n\tadd;\n", false),
            ("13.1", "add;\n", true),
            ("13.0", "sub;\n", true),
            ("13.0", "add;\nret;\n", true),
        ] {
            assert_eq!(sass_digest(compiler, ptx) != first, differs, "{compiler} {ptx:?}");
        }
    }

    #[test]
    fn a_wrong_missing_or_drawn_entry_spares_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(path(root).parent().unwrap()).unwrap();
        let read = |draw: &str| SassProofs { draw: draw.to_string(), ..SassProofs::read(root) };
        assert!(!read("").spares("sm_90a adamw", "0123"), "without a table");

        let mut proofs = Proofs::default();
        proofs.add("sm_90a adamw", "0123".to_string(), "4567".to_string());
        proofs.add("sm_103a adamw", "89ab".to_string(), "cdef".to_string());
        write(root, &proofs).unwrap();
        assert_eq!(read("").proofs, proofs);
        // Architecture and source, digest, word; whether the entry spares.
        for (name, digest, draw, expected) in [
            ("sm_90a adamw", "0123", "", true),
            ("sm_90a adamw", "0124", "", false),
            ("sm_100a adamw", "0123", "", false),
            ("sm_90a adamw", "0123", "all", false),
        ] {
            assert_eq!(read(draw).spares(name, digest), expected, "{name} {digest} {draw}");
        }

        // Only of an architecture whose PTX no test runs.
        for (name, source, draw, expected) in [
            ("sm_90a adamw", "4567", "", false),
            ("sm_103a adamw", "cdef", "", true),
            ("sm_103a adamw", "cdee", "", false),
            ("sm_103a adamw", "cdef", "all", false),
        ] {
            let sass = read(draw).spared(name, source).cloned();
            assert_eq!(sass, expected.then(|| "89ab".to_string()), "{name} {source} {draw}");
        }

        let text = fs::read_to_string(path(root)).unwrap();
        fs::write(path(root), text.replace("0123", "0124")).unwrap();
        assert!(!read("").spares("sm_90a adamw", "0124"), "edited by hand");
    }

    #[test]
    fn a_word_draws_about_a_tenth() {
        let drawn = |word: &str| -> Vec<usize> {
            (0..1000).filter(|index| is_drawn(word, &format!("kernel {index}"))).collect()
        };
        // Binomial: 100 of 1000 with a deviation of 9.5; five of these to each side.
        assert!((52..=150).contains(&drawn("a").len()), "{}", drawn("a").len());
        assert_ne!(drawn("a"), drawn("b"));
    }
}
