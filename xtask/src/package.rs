//! `cargo xtask package`: the archives for crates.io, with compiled kernels in deepwell-kernels.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use lzma_rust2::{LzmaOptions, LzmaWriter};
use xshell::{Shell, cmd};

use crate::arguments::{Takes, flags};
use crate::packages::packages;
use crate::process::cargo;

const HELP: &str = "\
Make the archives of the published crates in target/package/

Usage: cargo xtask package [FLAGS]

Flags:
  --kernels DIR  compiled kernels to put into deepwell-kernels (target/kernels of
                 `cargo xtask kernels`)
  --no-kernels   no kernels: the archive of deepwell-kernels compiles and runs on CPUs only

Kernels are compressed into deepwell-kernels/cubins/, one file for each architecture, where they
stay; the archives are what `cargo package` makes. An archive above 10 MB, which crates.io refuses,
is an error.
";

/// Largest archive that crates.io takes.
const LARGEST_BYTES: u64 = 10_000_000;

pub(crate) fn run(shell: &Shell, root: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let mut kernels = Some(root.join("target/kernels"));
    let known = [("--kernels", Takes::Value), ("--no-kernels", Takes::Nothing)];
    for (flag, value) in flags("package", arguments, &known)? {
        kernels = (flag == "--kernels").then(|| PathBuf::from(value));
    }
    let cubins = root.join("deepwell-kernels/cubins");
    if cubins.exists() {
        fs::remove_dir_all(&cubins)?;
    }
    if let Some(kernels) = kernels {
        write_packs(&kernels, &cubins)?;
    }
    let cargo = cargo();
    let hidden = packages(root)?.into_iter().filter(|package| !package.is_published);
    let exclude: Vec<String> =
        hidden.flat_map(|package| ["--exclude".to_string(), package.name]).collect();
    cmd!(shell, "{cargo} package --quiet --workspace {exclude...} --no-verify --allow-dirty")
        .run()?;
    check_sizes(&root.join("target/package"))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a pack for each architecture with compiled kernels.
fn write_packs(kernels: &Path, cubins: &Path) -> Result<()> {
    let mut total = 0;
    for folder in sorted(kernels)?.into_iter().filter(|path| path.is_dir()) {
        let files = sorted(&folder)?;
        let files = files.iter().filter(|path| path.extension().is_some_and(|it| it == "cubin"));
        let files = files.map(|path| Ok((stem(path)?, fs::read(path)?)));
        let files = files.collect::<Result<Vec<_>>>()?;
        if files.is_empty() {
            continue;
        }
        let pack = pack(&files)?;
        fs::create_dir_all(cubins)?;
        let name = stem(&folder)?;
        println!("{name}: {} cubins in {:.2} MB", files.len(), pack.len() as f64 / 1e6);
        fs::write(cubins.join(format!("{name}.pack")), &pack)?;
        total += files.len();
    }
    if total == 0 {
        bail!(
            "{}: expected cubins, found none\nhint: `cargo xtask kernels` compiles them; \
             `--no-kernels` makes archives for CPUs",
            kernels.display()
        );
    }
    Ok(())
}

/// Compresses files. The format is that of `deepwell-kernels/src/runtime/cuda/packs.rs`.
fn pack(files: &[(String, Vec<u8>)]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (name, cubin) in files {
        bytes.extend(u32::try_from(name.len())?.to_le_bytes());
        bytes.extend(u32::try_from(cubin.len())?.to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(cubin);
    }
    let options = LzmaOptions::with_preset(9);
    let mut writer =
        LzmaWriter::new_use_header(Vec::new(), &options, Some(u64::try_from(bytes.len())?))?;
    writer.write_all(&bytes)?;
    Ok(writer.finish()?)
}

fn stem(path: &Path) -> Result<String> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    Ok(stem.with_context(|| format!("{}: expected a name in UTF-8", path.display()))?.to_string())
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| {
        format!("{}: cannot be read\nhint: `cargo xtask kernels` makes it", folder.display())
    })?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn check_sizes(folder: &Path) -> Result<()> {
    for path in sorted(folder)?.iter().filter(|path| path.extension().is_some_and(|e| e == "crate"))
    {
        let bytes = fs::metadata(path)?.len();
        println!("{}: {:.2} MB", path.display(), bytes as f64 / 1e6);
        if bytes > LARGEST_BYTES {
            bail!("{}: expected at most {LARGEST_BYTES} bytes, got {bytes}", path.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use lzma_rust2::LzmaReader;

    use super::*;

    #[test]
    fn a_pack_has_cubins_alone_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let (kernels, cubins) = (folder.path().join("kernels"), folder.path().join("cubins"));
        assert!(write_packs(&kernels, &cubins).is_err(), "no folder");
        fs::create_dir_all(kernels.join("sm_90a")).unwrap();
        assert!(write_packs(&kernels, &cubins).is_err(), "no cubins");
        for (name, content) in [("b.cubin", "two"), ("a.cubin", ""), ("a.ptx", "text")] {
            fs::write(kernels.join("sm_90a").join(name), content).unwrap();
        }
        write_packs(&kernels, &cubins).unwrap();
        let pack = fs::read(cubins.join("sm_90a.pack")).unwrap();
        let mut bytes = Vec::new();
        let mut reader = LzmaReader::new_mem_limit(pack.as_slice(), u32::MAX, None).unwrap();
        reader.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"\x01\0\0\0\0\0\0\0a\x01\0\0\0\x03\0\0\0btwo");
    }
}
