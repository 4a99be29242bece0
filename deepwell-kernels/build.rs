//! Embeds the compiled kernels in `cubins/`, which a published archive has and a clone has not.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let folder = root.join("cubins");
    if folder.is_dir() {
        println!("cargo:rerun-if-changed={}", folder.display());
    }
    let rows: String = packs(&folder)
        .iter()
        .map(|(name, path)| format!("({name:?}, include_bytes!({path:?}).as_slice()), "))
        .collect();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("packs.rs"), format!("&[{rows}]")).expect("OUT_DIR can be written");
}

/// Packs by the name of their architecture, in order.
fn packs(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(String, PathBuf)> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pack"))
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_string(), path)))
        .collect();
    found.sort();
    found
}
