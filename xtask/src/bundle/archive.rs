//! Packs folders of the bundle as gzip-compressed tar archives, which every machine can unpack.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Packs the folder `name` of `parent`. The same files give the same bytes: names are sorted, times
/// and owner are fixed.
pub(super) fn pack(parent: &Path, name: &str, archive: &Path) -> Result<()> {
    let file =
        fs::File::create(archive).with_context(|| format!("cannot write {}", archive.display()))?;
    let output = Command::new("tar")
        .args(["--create", "--sort=name", "--mtime=@0", "--owner=0", "--group=0"])
        .args(["--numeric-owner", "--mode=a+r,u+w,go-w", "--use-compress-program=gzip -9n"])
        .arg("--directory")
        .args([parent.as_os_str(), name.as_ref()])
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(Stdio::piped())
        .output()
        .context("cannot start `tar`\nhint: GNU tar and gzip pack the bundle")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`tar` cannot pack {name}: {}", said.trim_end());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_the_same_for_the_same_files() {
        let folder = tempfile::tempdir().unwrap();
        let archive = |stage: &str, names: &[&str]| {
            let stage = folder.path().join(stage);
            for name in names {
                let path = stage.join("corpus").join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, name).unwrap();
            }
            let archive = stage.join("corpus.tar.gz");
            pack(&stage, "corpus", &archive).unwrap();
            fs::read(archive).unwrap()
        };
        let first = archive("a", &["x/1.rs", "y/2.rs"]);
        assert_eq!(archive("b", &["y/2.rs", "x/1.rs"]), first);
        assert_ne!(archive("c", &["y/2.rs", "x/3.rs"]), first);
    }
}
