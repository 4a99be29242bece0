//! The corpus of the bundle: the default corpus of `deepwell`.
//!
//! On a machine without cargo `deepwell` cannot find the sources of the locked packages, so the
//! bundle contains them. `deepwell corpus` selects the files.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use xshell::{Shell, cmd};

use super::archive;

/// Size of the packed corpus.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Packed {
    pub(super) files: usize,
    pub(super) text_bytes: u64,
}

/// Writes the corpus of the workspace at `root` to `archive`, a gzip-compressed tar of one folder
/// `corpus`. `binary` is the command `deepwell`, `stage` a temporary folder for the unpacked files.
pub(super) fn pack(
    shell: &Shell,
    root: &Path,
    binary: &Path,
    stage: &Path,
    archive: &Path,
) -> Result<Packed> {
    let folder = stage.join("corpus");
    let said = cmd!(shell, "{binary} corpus {folder} --workspace {root} --json")
        .quiet()
        .read()
        .context("`deepwell corpus` does not write the corpus; its message is above")?;
    let packed = packed_in(&said).context("`deepwell corpus` said something else")?;
    archive::pack(stage, "corpus", archive)?;
    Ok(packed)
}

fn packed_in(said: &str) -> Option<Packed> {
    let said: Value = serde_json::from_str(said).ok()?;
    let files = usize::try_from(said["files"].as_u64()?).ok()?;
    Some(Packed { files, text_bytes: said["text_bytes"].as_u64()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_command_says() {
        let said = "{\n  \"files\": 3,\n  \"text_bytes\": 70000\n}\n";
        assert_eq!(packed_in(said), Some(Packed { files: 3, text_bytes: 70_000 }));
        assert_eq!(packed_in("{}"), None);
        assert_eq!(packed_in("3 files"), None);
    }
}
