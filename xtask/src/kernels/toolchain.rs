//! Finds NVIDIA's compiler, or installs it under `target/`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The oldest nvcc that supports all architectures.
const RELEASE_MIN: (u32, u32) = (12, 9);

/// The wheels installed if nvcc is missing: a requirements file for pip.
const WHEELS: &str = include_str!("wheels.txt");

/// Folder of the installed wheels.
const WHEELS_FOLDER: &str = "target/cuda-toolchain";

/// The required programs.
const PROGRAMS: [&str; 3] = ["nvcc", "ptxas", "nvdisasm"];

/// An nvcc and its companion programs.
#[derive(Debug)]
pub(crate) struct Toolchain {
    /// Folder of the programs.
    bin: PathBuf,
    /// Description of the place, for messages.
    pub(crate) origin: String,
    /// Versions printed by nvcc and ptxas; part of the content hash.
    pub(crate) version: String,
}

impl Toolchain {
    /// Finds a complete and sufficiently new toolchain in `CUDA_HOME` or on the path, otherwise in
    /// the wheels, which are installed if missing.
    pub(crate) fn find(root: &Path) -> Result<Toolchain> {
        for (bin, origin) in candidates() {
            match Toolchain::at(&bin, origin) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => eprintln!("note: {} does not serve: {error:#}", bin.display()),
            }
        }
        let home = installed_wheels(root)?;
        let origin = format!("wheels of NVIDIA in {}", below(root, &home).display());
        Toolchain::at(&home.join("nvidia/cu13/bin"), origin)
    }

    /// Whether a toolchain is available without installation.
    pub(crate) fn is_present(root: &Path) -> bool {
        let is_whole = |(bin, origin): (PathBuf, String)| Toolchain::at(&bin, origin).is_ok();
        candidates().into_iter().any(is_whole) || wheels_home(root).is_dir()
    }

    fn at(bin: &Path, origin: String) -> Result<Toolchain> {
        for program in PROGRAMS {
            if !bin.join(program).is_file() {
                bail!("no `{program}` there");
            }
        }
        let mut toolchain = Toolchain { bin: bin.to_path_buf(), origin, version: String::new() };
        let mut versions = Vec::new();
        for program in ["nvcc", "ptxas"] {
            let output = toolchain.command(program).arg("--version").output();
            let output = output.with_context(|| format!("cannot start `{program}`"))?;
            versions.push(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let release = release_in(&versions[0]).context("`nvcc --version` names no release")?;
        if release < RELEASE_MIN {
            let (major, minor) = release;
            bail!("it is CUDA {major}.{minor}, {}.{} is the oldest", RELEASE_MIN.0, RELEASE_MIN.1);
        }
        toolchain.version = joined_versions(&versions);
        Ok(toolchain)
    }

    /// Returns a command for one of the programs; the toolchain's folder is first on its path.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(self.bin.clone()).chain(env::split_paths(&path));
        if let Ok(path) = env::join_paths(folders) {
            command.env("PATH", path);
        }
        command
    }
}

/// Returns candidate folders and their origins in order of preference: `CUDA_HOME` first, then the
/// path.
fn candidates() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    if let Some(home) = env::var_os("CUDA_HOME") {
        found.push((PathBuf::from(home).join("bin"), "CUDA_HOME".to_string()));
    }
    for folder in env::split_paths(&env::var_os("PATH").unwrap_or_default()) {
        if folder.join("nvcc").is_file() {
            // A link in a shared folder may lack the companion programs next to it.
            let bin = fs::canonicalize(folder.join("nvcc"))
                .ok()
                .and_then(|nvcc| nvcc.parent().map(Path::to_path_buf))
                .unwrap_or(folder);
            found.push((bin, "PATH".to_string()));
        }
    }
    found
}

/// Returns `(13, 0)` for `Cuda compilation tools, release 13.0, V13.0.88`.
fn release_in(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Joins the release and build lines of the texts of `--version`, without duplicates.
fn joined_versions(texts: &[String]) -> String {
    let mut said: Vec<&str> = Vec::new();
    for line in texts.iter().flat_map(|text| text.lines()).map(str::trim) {
        let is_of_interest = line.contains("release ") || line.starts_with("Build ");
        if is_of_interest && !said.contains(&line) {
            said.push(line);
        }
    }
    said.join("; ")
}

/// Checks that nvcc will find a host compiler for preprocessing.
pub(crate) fn check_host_compiler() -> Result<()> {
    if env::var_os("NVCC_CCBIN").is_some() || is_on_path("g++") {
        return Ok(());
    }
    bail!(
        "no `g++` on the path; nvcc preprocesses with it\n\
         hint: install it (Debian, Ubuntu: `apt-get install g++`), or name a host compiler in \
         NVCC_CCBIN"
    )
}

fn is_on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Returns the folder for the pinned wheels, whether or not they are installed.
fn wheels_home(root: &Path) -> PathBuf {
    let hash = blake3::hash(WHEELS.as_bytes()).to_hex();
    root.join(WHEELS_FOLDER).join(format!("{}-{}", nvcc_version(), &hash[..8]))
}

/// Returns the folder of the wheels, and installs them if missing. Installation uses a temporary
/// folder, which is then renamed, so the folder is complete or absent.
fn installed_wheels(root: &Path) -> Result<PathBuf> {
    let parent = root.join(WHEELS_FOLDER);
    let home = wheels_home(root);
    if home.is_dir() {
        return Ok(home);
    }
    if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        bail!(
            "no nvcc of {}.{} or newer in CUDA_HOME or on the path, and the pinned wheels are for \
             Linux on x86_64 and aarch64\n\
             hint: install a CUDA toolkit and set CUDA_HOME",
            RELEASE_MIN.0,
            RELEASE_MIN.1
        );
    }
    let partial = parent.join(format!(".partial-{}", std::process::id()));
    fs::create_dir_all(&partial)
        .with_context(|| format!("cannot make {}", below(root, &partial).display()))?;
    let result = install(&partial, below(root, &home)).and_then(|()| {
        match fs::rename(partial.join("site"), &home) {
            Ok(()) => Ok(()),
            // Another process was faster.
            Err(_) if home.is_dir() => Ok(()),
            Err(error) => Err(error).context("cannot move the installed wheels to their place"),
        }
    });
    // The rest of the temporary folder is useless; failing to remove it is no error.
    let _ = fs::remove_dir_all(&partial);
    result.map(|()| home)
}

fn nvcc_version() -> &'static str {
    let rest = WHEELS.split("nvidia-cuda-nvcc==").nth(1).unwrap_or_default();
    rest.split_whitespace().next().unwrap_or_default()
}

fn install(partial: &Path, home: &Path) -> Result<()> {
    eprintln!(
        "no nvcc of {}.{} or newer in CUDA_HOME or on the path: installing NVIDIA's compiler {} \
         from PyPI into {} (107 MB to download, 276 MB on the disk)",
        RELEASE_MIN.0,
        RELEASE_MIN.1,
        nvcc_version(),
        home.display()
    );
    let requirements = partial.join("wheels.txt");
    fs::write(&requirements, WHEELS)
        .with_context(|| format!("cannot write {}", requirements.display()))?;
    let python = python_with_pip(partial)?;
    let output = Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
        .args(["--no-deps", "--only-binary", ":all:", "--require-hashes"])
        .arg("--target")
        .arg(partial.join("site"))
        .arg("--requirement")
        .arg(&requirements)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{}`", python.display()))?;
    if !output.status.success() {
        bail!(
            "pip cannot install NVIDIA's compiler:\n{}\n\
             hint: it needs a network; or install a CUDA toolkit of {}.{} or newer and set \
             CUDA_HOME",
            String::from_utf8_lossy(&output.stderr).trim_end(),
            RELEASE_MIN.0,
            RELEASE_MIN.1
        );
    }
    Ok(())
}

/// Returns a python3 with pip: from the path, or from a new virtual environment.
fn python_with_pip(partial: &Path) -> Result<PathBuf> {
    let hint = format!(
        "hint: install it (Debian, Ubuntu: `apt-get install python3-venv`), or install a CUDA \
         toolkit of {}.{} or newer and set CUDA_HOME",
        RELEASE_MIN.0, RELEASE_MIN.1
    );
    let succeeds = |program: &Path, arguments: &[&str]| {
        let mut command = Command::new(program);
        let command = command.args(arguments).stdin(Stdio::null());
        command.output().is_ok_and(|output| output.status.success())
    };
    let python = Path::new("python3");
    if !succeeds(python, &["--version"]) {
        bail!("no `python3` on the path; NVIDIA's compiler comes from PyPI\n{hint}");
    }
    if succeeds(python, &["-m", "pip", "--version"]) {
        return Ok(python.to_path_buf());
    }
    let environment = partial.join("venv");
    let inner = environment.join("bin/python");
    if succeeds(python, &["-m", "venv", &environment.to_string_lossy()])
        && succeeds(&inner, &["-m", "pip", "--version"])
    {
        return Ok(inner);
    }
    bail!("`python3` has neither pip nor venv; NVIDIA's compiler comes from PyPI\n{hint}")
}

/// Returns `path` relative to `root`, for messages.
pub(crate) fn below<'a>(root: &Path, path: &'a Path) -> &'a Path {
    path.strip_prefix(root).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        // Text, expected release, and whether the release is new enough.
        let check = |text: &str, expected: Option<(u32, u32)>, serves: bool| {
            let found = release_in(text);
            assert_eq!(found, expected, "{text}");
            assert_eq!(found.is_some_and(|release| release >= RELEASE_MIN), serves, "{text}");
        };
        check(
            "nvcc: NVIDIA (R) Cuda compiler driver\n\
             Cuda compilation tools, release 13.0, V13.0.88\n",
            Some((13, 0)),
            true,
        );
        check("Cuda compilation tools, release 12.10, V12.10.1", Some((12, 10)), true);
        check("Cuda compilation tools, release 12.9, V12.9.41", Some((12, 9)), true);
        check("Cuda compilation tools, release 12.8, V12.8.1", Some((12, 8)), false);
        check("Cuda compilation tools, release 11.8", Some((11, 8)), false);
        check("release x", None, false);
        check("", None, false);
    }

    #[test]
    fn versions_of_both_programs() {
        let check = |texts: &[&str], expected: &str| {
            let texts: Vec<_> = texts.iter().map(ToString::to_string).collect();
            assert_eq!(joined_versions(&texts), expected);
        };
        let text = "nvcc: NVIDIA\nBuilt on Wed\ntools, release 13.0, V13.0.88\nBuild cuda_13.0\n";
        check(&[text, text], "tools, release 13.0, V13.0.88; Build cuda_13.0");
        check(
            &[text, "tools, release 13.1, V13.1.2\n"],
            "tools, release 13.0, V13.0.88; Build cuda_13.0; tools, release 13.1, V13.1.2",
        );
        check(&["", ""], "");
    }

    #[test]
    fn every_wheel_is_pinned_with_a_hash_for_each_machine() {
        let text = WHEELS.replace("\\\n", " ");
        let lines: Vec<_> =
            text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
        let names: Vec<_> = lines.iter().filter_map(|line| line.split("==").next()).collect();
        let expected = [
            "nvidia-cuda-nvcc",
            "nvidia-cuda-crt",
            "nvidia-nvvm",
            "nvidia-cuda-runtime",
            "nvidia-cuda-cccl",
            "nvidia-cuda-cuobjdump",
            "nvidia-cuda-nvdisasm",
        ];
        assert_eq!(names, expected);
        for line in lines {
            assert_eq!(line.matches("--hash=sha256:").count(), 2, "{line}");
        }
        assert_eq!(nvcc_version(), "13.0.88");
    }
}
