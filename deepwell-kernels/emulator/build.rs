//! Digest of the crate's sources, by which a proof names the emulator that made it.

use std::fs;
use std::io;
use std::path::Path;

/// Sources that only print, or only observe: no proof depends on them.
const NOT_COUNTED: [&str; 6] = [
    "src/bin/deepwell-emulate/cycles.rs",
    "src/bin/deepwell-emulate/json.rs",
    "src/bin/deepwell-emulate/main.rs",
    "src/bin/deepwell-emulate/output.rs",
    "src/bin/deepwell-emulate/text.rs",
    "src/cycles",
];

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    let mut hasher = blake3::Hasher::new();
    add(Path::new("src"), &mut hasher)?;
    let digest = hasher.finalize().to_hex();
    println!("cargo::rustc-env=DEEPWELL_EMULATOR_SOURCES={}", &digest[..16]);
    Ok(())
}

/// Adds the code of all files below `folder`, in the order of their names. Tests and comments
/// change nothing that the emulator computes.
fn add(folder: &Path, hasher: &mut blake3::Hasher) -> io::Result<()> {
    let mut entries = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<_>>>()?;
    entries.sort();
    for path in entries {
        let is_test = path.file_stem().is_some_and(|stem| stem == "tests");
        if is_test || NOT_COUNTED.iter().any(|source| path == Path::new(source)) {
            continue;
        }
        if path.is_dir() {
            add(&path, hasher)?;
            continue;
        }
        hasher.update(path.to_string_lossy().as_bytes());
        for line in fs::read_to_string(&path)?.lines().map(str::trim) {
            if !line.starts_with("//") {
                hasher.update(line.as_bytes());
            }
        }
    }
    Ok(())
}
