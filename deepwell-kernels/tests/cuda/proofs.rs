//! Proofs of rows: a row whose kernels and code are those that passed does not run again.
//!
//! `proofs/rows.json` holds a digest per row. The digest covers the PTX of all kernels that the row
//! launched, the Rust code of these kernels' ops, the Rust code that all rows share, and the
//! emulator. Comments change no digest. `cargo xtask emulate --all --record` writes the table; the
//! table's own digest detects edits by hand, and an edited table proves nothing.
//!
//! `DEEPWELL_PROOF_DRAW` is a word that selects a tenth of the proven rows to run again; CI sets
//! the commit's hash. With `all` every row runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::cuda::emulator::proof::{SOURCES_DIGEST, is_drawn, ptx_digest, short};
use serde_json::{Value, json};

use crate::ptx;

const DRAW_VARIABLE: &str = "DEEPWELL_PROOF_DRAW";
const TABLE: &str = "tests/cuda/proofs/rows.json";

/// Code that every row runs, relative to the crate. The ops' folders below `src/ops` are left out,
/// the exchanges between ranks, and the folder of `deepwell-ir` that reads models.
const SHARED: [&str; 7] = [
    "src",
    "tests/cuda",
    "trials/src",
    "../deepwell-precision/src",
    "../deepwell-ir/src",
    "../deepwell-moe/src",
    "../Cargo.lock",
];

/// Whether a folder belongs to some rows alone, or to none.
fn is_left_out(folder: &Path) -> bool {
    let is_op = folder.parent().is_some_and(|parent| parent.ends_with("src/ops"));
    is_op && folder.starts_with(here().join("src"))
        || folder == here().join("src/comm")
        || folder.ends_with("deepwell-ir/src/capture")
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn name(row: &str, architecture: Architecture) -> String {
    format!("{} {row}", architecture.name())
}

/// Whether the table says that a row passed as it is now.
pub(crate) fn is_proven(
    row: &str,
    architecture: Architecture,
    sources: &BTreeMap<String, PathBuf>,
) -> bool {
    let seed = std::env::var(DRAW_VARIABLE).unwrap_or_default();
    if seed == "all" || (!seed.is_empty() && is_drawn(&seed, row)) {
        return false;
    }
    let Some(proof) = TABLE_OF_ROWS.get(&name(row, architecture)) else { return false };
    digest(&proof.files, architecture, sources).is_some_and(|digest| digest == proof.digest)
}

/// The entry of a row that passed, of the kernels that it launched; none where the sources of this
/// test are not there.
pub(crate) fn entry(
    architecture: Architecture,
    launched: &BTreeSet<String>,
    sources: &BTreeMap<String, PathBuf>,
) -> Option<Value> {
    let is_launched = |file: &&String| {
        let compiled = compiled(file, architecture);
        compiled.is_some_and(|file| !file.kernels.is_disjoint(launched))
    };
    let files: BTreeSet<String> = sources.keys().filter(is_launched).cloned().collect();
    let digest = digest(&files, architecture, sources)?;
    Some(json!({ "files": files, "digest": digest }))
}

/// Names of the kernels of some PTX.
pub(crate) fn kernels(text: &str) -> impl Iterator<Item = &str> {
    let entries = text.lines().filter_map(|line| line.split_once(".entry "));
    entries.map(|(_, rest)| {
        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(rest)
    })
}

struct Proof {
    files: BTreeSet<String>,
    digest: String,
}

static TABLE_OF_ROWS: LazyLock<BTreeMap<String, Proof>> = LazyLock::new(|| {
    let text = fs::read_to_string(here().join(TABLE)).unwrap_or_default();
    parse(&text).unwrap_or_default()
});

fn parse(text: &str) -> Option<BTreeMap<String, Proof>> {
    let table: Value = serde_json::from_str(text).ok()?;
    let rows = table.get("rows")?;
    // As `xtask/src/emulate/rows.rs` computes it.
    let written = blake3::hash(rows.to_string().as_bytes()).to_hex();
    if table["digest"] != written[..16] {
        return None;
    }
    let proof = |proof: &Value| {
        let files = proof["files"].as_array()?.iter().map(|file| file.as_str().map(str::to_string));
        let digest = proof["digest"].as_str()?.to_string();
        Some(Proof { files: files.collect::<Option<_>>()?, digest })
    };
    let rows = rows.as_object()?.iter();
    rows.map(|(name, row)| Some((name.clone(), proof(row)?))).collect()
}

/// Digest of all that the verdict on rows of these `.cu` files depends on.
fn digest(
    files: &BTreeSet<String>,
    architecture: Architecture,
    sources: &BTreeMap<String, PathBuf>,
) -> Option<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(SOURCES_DIGEST.as_bytes());
    hasher.update(SHARED_DIGEST.as_ref()?.as_bytes());
    let mut ops = BTreeSet::new();
    for file in files {
        hasher.update(file.as_bytes());
        hasher.update(compiled(file, architecture)?.digest.as_bytes());
        ops.insert(sources.get(file)?.parent()?);
    }
    for op in ops {
        add_code(op, &mut hasher)?;
    }
    Some(short(&hasher))
}

/// PTX of a `.cu` file.
struct Compiled {
    digest: String,
    /// Names of its kernels.
    kernels: BTreeSet<String>,
}

/// The PTX of a `.cu` file, read once; none where the file is not for the architecture.
fn compiled(file: &str, architecture: Architecture) -> Option<Arc<Compiled>> {
    type Known = BTreeMap<(String, Architecture), Option<Arc<Compiled>>>;
    static KNOWN: Mutex<Known> = Mutex::new(Known::new());
    let key = (file.to_string(), architecture);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let read = known.entry(key).or_insert_with(|| {
        let text = ptx::compiled(file, architecture).ok()?;
        let kernels = kernels(&text).map(str::to_string).collect();
        Some(Arc::new(Compiled { digest: ptx_digest(&text), kernels }))
    });
    read.clone()
}

/// Of the code that all rows run; none where some of it is not there, as in a published archive.
static SHARED_DIGEST: LazyLock<Option<String>> = LazyLock::new(|| {
    let mut hasher = blake3::Hasher::new();
    for part in SHARED {
        add_code(&here().join(part), &mut hasher)?;
    }
    Some(short(&hasher))
});

/// Adds the code of a file, or of all Rust files below a folder in the order of their names, to a
/// digest. Lines that are comments, and blank lines, are left out.
fn add_code(path: &Path, hasher: &mut blake3::Hasher) -> Option<()> {
    if path.is_dir() {
        let entries = fs::read_dir(path).ok()?.map(|entry| Some(entry.ok()?.path()));
        let mut entries = entries.collect::<Option<Vec<PathBuf>>>()?;
        entries.sort();
        for entry in entries {
            let is_code = match entry.is_dir() {
                true => !is_left_out(&entry),
                false => entry.extension().is_some_and(|kind| kind == "rs"),
            };
            if is_code {
                add_code(&entry, hasher)?;
            }
        }
        return Some(());
    }
    hasher.update(path.strip_prefix(here()).ok()?.to_str()?.as_bytes());
    for line in fs::read_to_string(path).ok()?.lines().map(str::trim) {
        if !line.starts_with("//") && !line.is_empty() {
            hasher.update(line.as_bytes()).update(b"\n");
        }
    }
    Some(())
}

trial!(a_table_that_was_edited_proves_nothing);
fn a_table_that_was_edited_proves_nothing() {
    let rows = json!({ "sm_90a add": { "files": ["add"], "digest": "0123456789abcdef" } });
    let digest = blake3::hash(rows.to_string().as_bytes()).to_hex()[..16].to_string();
    let text = json!({ "digest": digest, "rows": rows }).to_string();
    let read = parse(&text).expect("a table");
    assert_eq!(read["sm_90a add"].digest, "0123456789abcdef");
    assert!(parse(&text.replace("cdef", "cdee")).is_none());
    assert!(parse(&text.replace("sm_90a", "sm_100a")).is_none());
    assert!(parse("").is_none());
}

trial!(comments_change_no_digest_and_code_does);
fn comments_change_no_digest_and_code_does() {
    let folder = here().join("../target/tmp");
    fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join(format!("proofs-{}.rs", std::process::id()));
    let of = |text: &str| {
        fs::write(&path, text).expect("written");
        let mut hasher = blake3::Hasher::new();
        add_code(&path, &mut hasher).expect("readable");
        short(&hasher)
    };
    let code = of("fn one() -> u32 {\n    1\n}\n");
    assert_eq!(of("/// The first.\nfn one() -> u32 {\n    // Of all.\n    1\n\n}\n"), code);
    assert_ne!(of("fn one() -> u32 {\n    2\n}\n"), code);
    fs::remove_file(&path).expect("removed");
}
