//! The text that the bundle carries: what `deepwell` trains on when it is given nothing else.
//!
//! On a machine without cargo `deepwell` cannot find the sources of the locked packages, so they
//! travel. The command itself says which files they are.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use xshell::{Shell, cmd};

use super::archive;

/// What was packed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Packed {
    pub(super) files: usize,
    pub(super) text_bytes: u64,
}

/// Writes the corpus of the workspace at `root` as `archive`, a tar of one folder `corpus`,
/// compressed by gzip, which every machine can undo. `binary` is the command `deepwell`, `stage` a
/// folder of our own for the files before they are packed.
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
