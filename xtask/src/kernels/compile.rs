//! Compiles a source for an architecture: PTX, SASS, and a record of both.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::flags::{NVCC_FLAGS, PTXAS_FLAGS};
use super::lines;
use super::manifest::{Compiled, Cubin, Kernel};
use super::proofs::{SassProofs, sass_digest, source_digest};
use super::resources::parse_ptxas;
use super::sass::count_instructions;
use super::toolchain::Toolchain;
use super::unit::{CUDA_FOLDER, OPS_FOLDER, Source, feed};

/// The PTX that is compiled to SASS.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sass<'a> {
    None,
    /// All but the PTX in the table.
    Unproven(&'a SassProofs),
    All,
}

impl Sass<'_> {
    /// Whether PTX of a job need not be compiled, because no test runs it and its source is in the
    /// table.
    pub(crate) fn spares_ptx_of(self, job: &Job<'_>) -> bool {
        matches!(self, Sass::Unproven(proofs)
            if proofs.spares_ptx(&job.name(), &job.source_digest()))
    }
}

/// A source to compile for an architecture.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) source: &'a Source,
    pub(crate) architecture: &'static str,
    pub(crate) content_hash: String,
    /// Version text of nvcc and ptxas.
    compiler: &'a str,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        source: &'a Source,
        architecture: &'static str,
        compiler: &'a str,
    ) -> Job<'a> {
        let mut hasher = blake3::Hasher::new();
        feed(&mut hasher, compiler.as_bytes());
        for flag in NVCC_FLAGS.iter().chain(&PTXAS_FLAGS) {
            feed(&mut hasher, flag.as_bytes());
        }
        feed(&mut hasher, architecture.as_bytes());
        feed(&mut hasher, source.text_hash.as_bytes());
        let content_hash = hasher.finalize().to_hex().to_string();
        Job { source, architecture, content_hash, compiler }
    }

    fn source_hash(&self) -> String {
        self.source.text_hash.to_hex().to_string()
    }

    /// Returns the path of an output of this job in `out`, the folder of all kernels.
    pub(crate) fn output(&self, out: &Path, extension: &str) -> PathBuf {
        out.join(self.architecture).join(format!("{}.{extension}", self.source.stem))
    }

    /// Returns the name in the table of proofs.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.architecture, self.source.stem)
    }

    /// Returns the digest of compiled PTX for the table of proofs.
    pub(crate) fn sass_digest(&self, out: &Path) -> Option<String> {
        let ptx = fs::read_to_string(self.output(out, "ptx")).ok()?;
        Some(sass_digest(self.compiler, &lines::without(&ptx)))
    }

    /// Returns the digest of the source for the table of proofs.
    pub(crate) fn source_digest(&self) -> String {
        source_digest(&self.content_hash)
    }

    /// Returns the record of an earlier run with the same content, if its files still exist.
    pub(crate) fn up_to_date(&self, out: &Path, sass: Sass<'_>) -> Option<Compiled> {
        let text = fs::read(self.output(out, "json")).ok()?;
        let compiled = Compiled::from_json(&serde_json::from_slice::<Value>(&text).ok()?)?;
        let has = |extension: &str| self.output(out, extension).is_file();
        let is_same = compiled.content_hash == self.content_hash && has("ptx");
        let is_enough = || match sass {
            _ if compiled.cubin.is_some() && has("cubin") => true,
            Sass::None => true,
            Sass::Unproven(proofs) => {
                self.sass_digest(out).is_some_and(|digest| proofs.spares(&self.name(), &digest))
            }
            Sass::All => false,
        };
        let source_hash = self.source_hash();
        let is_current = is_same && is_enough();
        is_current.then_some(Compiled { source_hash, ..compiled })
    }

    /// Compiles the source. Old outputs are removed even if compilation fails, so that no stale
    /// kernel can run.
    pub(crate) fn compile(
        &self,
        toolchain: &Toolchain,
        root: &Path,
        out: &Path,
        sass: Sass<'_>,
    ) -> Result<Compiled> {
        // The record is removed first: outputs without a record count as absent.
        for extension in ["json", "cubin", "ptx"] {
            match fs::remove_file(self.output(out, extension)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    bail!("cannot remove {}: {error}", self.output(out, extension).display())
                }
                _ => {}
            }
        }
        let temporary = |extension: &str| {
            let name = format!(".{}.{}.{extension}", self.source.stem, std::process::id());
            out.join(self.architecture).join(name)
        };
        let (ptx, cubin, record) = (temporary("ptx"), temporary("cubin"), temporary("json"));
        let bare = temporary("bare.ptx");
        let result = (|| {
            let mut warnings = self.make_ptx(toolchain, root, &ptx)?;
            let text = lines::with_relative_files(&fs::read_to_string(&ptx)?, root);
            fs::write(&ptx, &text)?;
            let code = lines::without(&text);
            fs::write(&bare, &code)?;
            let is_spared = match sass {
                Sass::None => true,
                Sass::Unproven(proofs) => {
                    proofs.spares(&self.name(), &sass_digest(self.compiler, &code))
                }
                Sass::All => false,
            };
            let compiled_cubin = match is_spared {
                true => None,
                false => Some(self.make_cubin(toolchain, &bare, &cubin, &mut warnings)?),
            };
            let compiled = Compiled {
                stem: self.source.stem.clone(),
                architecture: self.architecture.to_string(),
                content_hash: self.content_hash.clone(),
                source_hash: self.source_hash(),
                ptx_bytes: fs::metadata(&ptx)?.len(),
                cubin: compiled_cubin,
            };
            fs::write(&record, format!("{:#}\n", compiled.to_json()))?;
            fs::rename(&ptx, self.output(out, "ptx"))?;
            if compiled.cubin.is_some() {
                fs::rename(&cubin, self.output(out, "cubin"))?;
            }
            fs::rename(&record, self.output(out, "json"))?;
            Ok(compiled)
        })();
        for leftover in [ptx, bare, cubin, record] {
            // Files that were renamed into place do not exist under this name any more.
            let _ = fs::remove_file(leftover);
        }
        result
    }

    fn make_ptx(&self, toolchain: &Toolchain, root: &Path, ptx: &Path) -> Result<Vec<String>> {
        let number = self.architecture.trim_start_matches("sm_");
        let mut command = toolchain.command("nvcc");
        // Paths are relative, so that messages and outputs do not depend on the location of the
        // checkout.
        command
            .current_dir(root)
            .args(NVCC_FLAGS)
            .arg(format!("-gencode=arch=compute_{number},code=compute_{number}"))
            .args(["-I", CUDA_FOLDER, "-o"])
            .arg(ptx)
            .arg(format!("{OPS_FOLDER}/{}/{}.cu", self.source.op, self.source.stem));
        let said = run(command)?;
        let is_warning =
            |line: &&str| line.contains("warning") && !line.trim_start().starts_with("Remark");
        Ok(said.lines().filter(is_warning).map(str::to_string).collect())
    }

    fn make_cubin(
        &self,
        toolchain: &Toolchain,
        ptx: &Path,
        cubin: &Path,
        warnings: &mut Vec<String>,
    ) -> Result<Cubin> {
        let mut command = toolchain.command("ptxas");
        command.args(PTXAS_FLAGS).arg(format!("-arch={}", self.architecture));
        command.arg("-o").arg(cubin).arg(ptx);
        let said = run(command)?;
        let is_warning =
            |line: &&str| line.contains("warning") || line.contains("Performance Loss");
        warnings.extend(said.lines().filter(is_warning).map(|line| line.trim().to_string()));

        let mut command = toolchain.command("nvdisasm");
        // `-ndf` skips the data-flow analysis, which is slow and unused here.
        command.args(["-c", "-ndf"]).arg(cubin);
        let sass = run(command)?;
        let mut counts = count_instructions(&sass);
        let mut kernels = Vec::new();
        for resources in parse_ptxas(&said) {
            let Some(instructions) = counts.remove(&resources.entry) else {
                bail!("ptxas names `{}`, which is not in its SASS", resources.entry);
            };
            kernels.push(Kernel { resources, instructions });
        }
        if kernels.is_empty() {
            bail!("no `extern \"C\" __global__` function in it");
        }
        // The callers of functions that were not inlined are unknown, so each function counts for
        // every kernel.
        for kernel in &mut kernels {
            for instructions in counts.values() {
                kernel.instructions.add(instructions);
            }
        }
        kernels.sort_by(|a, b| a.resources.entry.cmp(&b.resources.entry));
        Ok(Cubin { bytes: fs::metadata(cubin)?.len(), kernels, warnings: warnings.clone() })
    }
}

/// Runs a program and returns the text of both streams; if the program fails, the error contains
/// the text.
fn run(mut command: Command) -> Result<String> {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
    let program = program.display();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{program}`"))?;
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stdout));
    if !output.status.success() {
        bail!("`{program}` failed ({}):\n{}", output.status, text.trim_end());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(stem: &str, text: &str) -> Source {
        Source {
            stem: stem.to_string(),
            op: stem.to_string(),
            architectures: Ok(vec!["sm_90a"]),
            text_hash: blake3::hash(text.as_bytes()),
        }
    }

    #[test]
    fn the_content_hash_covers_source_architecture_and_compiler() {
        let hash = |text: &str, architecture, compiler: &str| {
            Job::new(&source("a", text), architecture, compiler).content_hash
        };
        let first = hash("x", "sm_90a", "13.0");
        assert_eq!(hash("x", "sm_90a", "13.0"), first);
        for other in
            [hash("y", "sm_90a", "13.0"), hash("x", "sm_100a", "13.0"), hash("x", "sm_90a", "13.1")]
        {
            assert_ne!(other, first);
        }
    }

    #[test]
    fn what_is_up_to_date() {
        let source = source("a", "x");
        let job = Job::new(&source, "sm_90a", "13.0");
        let cubin = Cubin { bytes: 3, kernels: vec![], warnings: vec![] };
        let record = |content_hash: &str, cubin| Compiled {
            stem: "a".to_string(),
            architecture: "sm_90a".to_string(),
            content_hash: content_hash.to_string(),
            source_hash: source.text_hash.to_hex().to_string(),
            ptx_bytes: 1,
            cubin,
        };
        let whole = record(&job.content_hash, Some(cubin.clone()));
        let ptx = record(&job.content_hash, None);
        let stale = record("0123", Some(cubin));
        let all: &[&str] = &["ptx", "cubin"];
        // The record, the files, and whether it serves for SASS and for PTX alone.
        for (record, files, expected) in [
            (Some(&whole), all, (true, true)),
            (Some(&whole), &["ptx"], (false, true)),
            (Some(&whole), &["cubin"], (false, false)),
            (Some(&ptx), &["ptx"], (false, true)),
            (Some(&ptx), all, (false, true)),
            (Some(&stale), all, (false, false)),
            (None, all, (false, false)),
        ] {
            let out = tempfile::tempdir().unwrap();
            fs::create_dir(out.path().join("sm_90a")).unwrap();
            for extension in files {
                fs::write(job.output(out.path(), extension), "x").unwrap();
            }
            if let Some(record) = record {
                fs::write(job.output(out.path(), "json"), record.to_json().to_string()).unwrap();
            }
            let found = |sass| job.up_to_date(out.path(), sass);
            let is_found = (found(Sass::All).is_some(), found(Sass::None).is_some());
            assert_eq!(is_found, expected, "{record:?}");
            if let Some(found) = found(Sass::None) {
                assert_eq!(Some(&found), record);
            }
        }
        // Half a record, as a full disk leaves it.
        let out = tempfile::tempdir().unwrap();
        fs::create_dir(out.path().join("sm_90a")).unwrap();
        fs::write(job.output(out.path(), "ptx"), "x").unwrap();
        fs::write(job.output(out.path(), "json"), "{\"file\": \"a\"").unwrap();
        assert_eq!(job.up_to_date(out.path(), Sass::None), None);
    }
}
