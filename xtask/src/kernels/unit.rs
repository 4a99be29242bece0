//! Kernel sources with their architectures and includes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Folder of the header layers, relative to the workspace's root.
pub(crate) const CUDA_FOLDER: &str = "deepwell-kernels/cuda";
/// Folder of the ops, each with the kernels of the op, relative to the workspace's root.
pub(crate) const OPS_FOLDER: &str = "deepwell-kernels/src/ops";

/// The supported architectures, oldest first.
pub(crate) const ARCHITECTURES: [&str; 4] = ["sm_90a", "sm_100a", "sm_103a", "sm_120a"];

/// Architectures whose PTX no test runs: the emulator's rows of sm_100a stand for them.
pub(crate) const NOT_RUN: [&str; 1] = ["sm_103a"];

/// Prefix of the line with a kernel's architectures.
pub(crate) const ARCHITECTURES_MARK: &str = "// architectures:";

/// One `.cu` file.
#[derive(Debug)]
pub(crate) struct Source {
    /// Name without `.cu`.
    pub(crate) stem: String,
    /// Name of the folder: the op.
    pub(crate) op: String,
    /// Architectures named in the source, or the error in that line.
    pub(crate) architectures: Result<Vec<&'static str>, String>,
    /// Hash of the file and of all included files.
    pub(crate) text_hash: blake3::Hash,
}

/// Returns the kernels of all ops of the workspace at `root`, sorted by name.
pub(crate) fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    for op in listed(&root.join(OPS_FOLDER))?.iter().filter(|path| path.is_dir()) {
        found.extend(sources_of(root, op)?);
    }
    found.sort_by(|a, b| a.stem.cmp(&b.stem));
    // Compiled kernels of all ops are in the same folder and are loaded by this name.
    match found.windows(2).find(|pair| pair[0].stem == pair[1].stem) {
        Some(pair) => {
            let (stem, first, second) = (&pair[0].stem, &pair[0].op, &pair[1].op);
            bail!("`{stem}.cu` is in {first}/ and in {second}/; give one of them another name")
        }
        None => Ok(found),
    }
}

/// Lists a folder.
fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    Ok(entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?)
}

/// Returns the kernels in the folder of an op.
fn sources_of(root: &Path, op: &Path) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    for path in listed(op)? {
        let (Some(stem), Some("cu")) =
            (path.file_stem(), path.extension().and_then(|extension| extension.to_str()))
        else {
            continue;
        };
        let stem = stem.to_string_lossy().into_owned();
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let architectures = architectures_in(&text);
        let text_hash = hash_with_includes(root, &path);
        let op = op.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push(Source { stem, op, architectures, text_hash });
    }
    Ok(found)
}

/// Returns the names in the `// architectures:` line of a kernel's source, in the order of
/// [`ARCHITECTURES`].
pub(crate) fn architectures_in(text: &str) -> Result<Vec<&'static str>, String> {
    let all = ARCHITECTURES.join(" ");
    let mut lines = text.lines().filter_map(|line| line.trim().strip_prefix(ARCHITECTURES_MARK));
    let Some(names) = lines.next() else {
        return Err(format!("no line `{ARCHITECTURES_MARK} ...`; add one with some of {all}"));
    };
    if lines.next().is_some() {
        return Err(format!("more than one line `{ARCHITECTURES_MARK} ...`; keep one"));
    }
    let names: Vec<&str> = names.split_whitespace().collect();
    if names.is_empty() {
        return Err(format!("`{ARCHITECTURES_MARK}` names none; it takes some of {all}"));
    }
    if let Some(name) = names.iter().find(|name| !ARCHITECTURES.contains(name)) {
        return Err(format!("`{name}` is no architecture; `{ARCHITECTURES_MARK}` takes {all}"));
    }
    Ok(ARCHITECTURES.into_iter().filter(|name| names.contains(name)).collect())
}

/// An `#include` directive.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Include<'a> {
    /// `#include "x"`
    Own(&'a str),
    /// `#include <x>`
    System(&'a str),
}

/// Returns the `#include` on a line, if any.
pub(crate) fn include_in(line: &str) -> Option<Include<'_>> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
    let rest = rest.trim_start();
    if let Some(rest) = rest.strip_prefix('"') {
        return rest.split_once('"').map(|(name, _)| Include::Own(name));
    }
    let rest = rest.strip_prefix('<')?;
    rest.split_once('>').map(|(name, _)| Include::System(name))
}

/// Returns the hash of `source` and of all included files, ignoring `#if`. The hash does not depend
/// on the location of the workspace.
pub(crate) fn hash_with_includes(root: &Path, source: &Path) -> blake3::Hash {
    let cuda = root.join(CUDA_FOLDER);
    let mut texts: BTreeMap<PathBuf, Option<Vec<u8>>> = BTreeMap::new();
    let mut open = vec![source.to_path_buf()];
    while let Some(path) = open.pop() {
        if texts.contains_key(&path) {
            continue;
        }
        // The compiler reports a missing file; when the file appears, the hash changes.
        let text = fs::read(&path).ok();
        let included = String::from_utf8_lossy(text.as_deref().unwrap_or_default());
        for line in included.lines() {
            if let Some(Include::Own(name)) = include_in(line) {
                // The search order of the compiler: the folder of the file comes first.
                let beside = path.parent().unwrap_or(&cuda).join(name);
                open.push(if beside.is_file() { beside } else { cuda.join(name) });
            }
        }
        texts.insert(path, text);
    }
    let mut hasher = blake3::Hasher::new();
    for (path, text) in texts {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        feed(&mut hasher, name.as_bytes());
        hasher.update(&[u8::from(text.is_some())]);
        feed(&mut hasher, text.as_deref().unwrap_or_default());
    }
    hasher.finalize()
}

/// Hashes the number of bytes and the bytes, so that different splits of the same concatenation
/// have different hashes.
pub(crate) fn feed(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_name_architectures() {
        let check = |text: &str, expected: Result<&[&str], &str>| match (
            architectures_in(text),
            expected,
        ) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
            (Err(found), Err(expected)) => {
                assert!(found.contains(expected), "expected `{expected}` in `{found}`");
            }
            (found, _) => panic!("{text}: {found:?}"),
        };
        check("// Adds.\n//\n// architectures: sm_90a\nint x;\n", Ok(&["sm_90a"]));
        check("// architectures: sm_120a sm_90a\n", Ok(&["sm_90a", "sm_120a"]));
        check("  // architectures:\tsm_103a  sm_100a sm_100a\r\n", Ok(&["sm_100a", "sm_103a"]));
        check("// Adds.\n", Err("no line `// architectures: ...`"));
        check("// architectures:\n", Err("names none"));
        check("// architectures: sm_90\n", Err("`sm_90` is no architecture"));
        check("// architectures: sm_90a, sm_100a\n", Err("`sm_90a,` is no architecture"));
        check("// architectures: sm_90a\n// architectures: sm_90a\n", Err("more than one"));
    }

    #[test]
    fn includes_of_a_line() {
        let check = |line: &str, expected: Option<Include<'_>>| {
            assert_eq!(include_in(line), expected, "{line}");
        };
        check("#include \"common/types.cuh\"", Some(Include::Own("common/types.cuh")));
        check("  #  include\t\"a.cuh\" // why", Some(Include::Own("a.cuh")));
        check("#include <cuda_bf16.h>", Some(Include::System("cuda_bf16.h")));
        check("#include<cstdint>", Some(Include::System("cstdint")));
        check("#include \"open", None);
        check("// #include \"a.cuh\"", None);
        check("#define include \"a\"", None);
        check("include \"a\"", None);
    }

    const KERNEL: &str = "deepwell-kernels/src/ops/add/a.cu";

    /// Returns the path of a file of a layer, or of any other file.
    fn place(root: &Path, name: &str) -> PathBuf {
        root.join(if name.starts_with(OPS_FOLDER) { "" } else { CUDA_FOLDER }).join(name)
    }

    /// Makes a workspace with these files.
    fn workspace(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = place(folder.path(), name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn the_hash_covers_everything_that_is_included() {
        let files = [
            (KERNEL, "#include \"mma/m.cuh\"\n"),
            ("mma/m.cuh", "#include \"ptx/p.cuh\"\n#include \"beside.cuh\"\n"),
            ("mma/beside.cuh", "#include \"mma/m.cuh\"\n"),
            ("ptx/p.cuh", "#if 0\n#include \"common/gone.cuh\"\n#endif\n"),
            ("common/other.cuh", "int other;\n"),
        ];
        let hash_of = |folder: &Path| hash_with_includes(folder, &folder.join(KERNEL));
        let first = workspace(&files);
        let expected = hash_of(first.path());
        assert_eq!(hash_of(workspace(&files).path()), expected, "of the place it does not depend");
        // File to write, its text, and whether the hash changes.
        for (name, text, differs) in [
            (KERNEL, "#include \"mma/m.cuh\"\n\n", true),
            ("mma/m.cuh", "#include \"ptx/p.cuh\"\n", true),
            ("mma/beside.cuh", "", true),
            ("ptx/p.cuh", "", true),
            ("common/gone.cuh", "", true),
            ("common/other.cuh", "int changed;\n", false),
            ("common/new.cuh", "int unused;\n", false),
        ] {
            let folder = workspace(&files);
            fs::write(place(folder.path(), name), text).unwrap();
            assert_eq!(hash_of(folder.path()) != expected, differs, "{name}");
        }
    }

    #[test]
    fn sources_are_the_cu_files_of_the_ops() {
        let twice = "`b.cu` is in add/ and in mul/; give one of them another name";
        for (name, expected) in [
            ("deepwell-kernels/src/ops/mul/c.cu", Ok([("a", "add"), ("b", "add"), ("c", "mul")])),
            ("deepwell-kernels/src/ops/mul/b.cu", Err(twice)),
        ] {
            let folder = workspace(&[
                ("deepwell-kernels/src/ops/add/b.cu", "// architectures: sm_90a\n"),
                (KERNEL, ""),
                ("deepwell-kernels/src/ops/add/a.cuh", ""),
                ("deepwell-kernels/src/ops/add/cuda.rs", ""),
                ("deepwell-kernels/src/ops/add/tests/t.cu", ""),
                ("deepwell-kernels/src/ops/m.cu", ""),
                ("mma/m.cu", ""),
                (name, ""),
            ]);
            let found = sources(folder.path());
            let found = found.map_err(|error| error.to_string()).map(|found| {
                assert!(found.iter().all(|one| one.architectures.is_ok() == (one.stem == "b")));
                let names = |one: Source| (one.stem, one.op);
                found.into_iter().map(names).collect::<Vec<_>>()
            });
            let expected = expected
                .map(|names| names.map(|(stem, op)| (stem.to_string(), op.to_string())).to_vec())
                .map_err(ToString::to_string);
            assert_eq!(found, expected, "{name}");
        }
    }
}
