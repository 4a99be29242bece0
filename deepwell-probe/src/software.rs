//! Installed libraries, and whether they are recent enough.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Drivers, libraries and their versions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Software {
    /// The kernel driver, as reported by its management library.
    pub driver: Library,
    /// The CUDA version of the driver (`libcuda`).
    pub cuda_driver_api: Library,
    /// The CUDA runtime (`libcudart`), which Deepwell itself does not need.
    pub cuda_runtime: Library,
    /// Collectives (`libnccl`).
    pub nccl: Library,
    /// GEMMs (`libcublasLt`).
    pub cublaslt: Library,
    /// The run-time compiler (`libnvrtc`).
    pub nvrtc: Library,
}

/// State of a library: found, missing, or not usable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Library {
    /// Found, and recent enough.
    Found {
        /// Version of the library.
        version: String,
        /// The loaded file, if the system reports it.
        path: Option<String>,
        /// Remark about the library.
        note: Option<String>,
    },
    /// Not found.
    Missing {
        /// The file names tried, in order.
        looked_for: Vec<String>,
        /// What to install.
        hint: String,
    },
    /// Found, but too old.
    TooOld {
        /// Version of the library.
        version: String,
        /// The minimum version, and the reason.
        needed: String,
        /// The loaded file, if the system reports it.
        path: Option<String>,
        /// What to install.
        hint: String,
    },
    /// Found, but does not answer.
    Unusable {
        /// The library's answer.
        reason: String,
        /// The loaded file, if the system reports it.
        path: Option<String>,
        /// What to do.
        hint: String,
    },
}

/// Requirements on a library.
pub(crate) struct Requirement {
    /// Display name.
    pub(crate) name: &'static str,
    /// The minimum version.
    pub(crate) minimum: (u32, u32),
    /// Reason for the minimum.
    pub(crate) reason: &'static str,
    /// What to install.
    pub(crate) hint: &'static str,
}

/// The kernel driver. Kernels are built ahead of time with CUDA 13.0, which requires driver 580 or
/// newer.
pub(crate) const DRIVER: Requirement = Requirement {
    name: "NVIDIA driver",
    minimum: (580, 0),
    reason: "kernels are built with CUDA 13.0",
    hint: "install NVIDIA driver 580 or newer; in a container, start it with the GPUs passed \
           through (`--gpus all`)",
};

/// The driver's CUDA interface.
pub(crate) const CUDA_DRIVER_API: Requirement = Requirement {
    name: "CUDA driver API",
    minimum: (13, 0),
    reason: "kernels are built with CUDA 13.0",
    hint: "install NVIDIA driver 580 or newer, which brings `libcuda.so.1`",
};

/// The runtime, reported only.
pub(crate) const CUDA_RUNTIME: Requirement = Requirement {
    name: "CUDA runtime",
    minimum: (0, 0),
    reason: "any version will do",
    hint: "not needed by Deepwell; it comes with the CUDA toolkit",
};

/// Collectives.
pub(crate) const NCCL: Requirement = Requirement {
    name: "NCCL",
    minimum: (2, 22),
    reason: "the oldest that is used",
    hint: "needed for more than one GPU: install `libnccl2`, or `pip install nvidia-nccl-cu13` and \
           name its file in `DEEPWELL_NCCL`",
};

/// GEMMs. Block scales of 32 elements require 12.8, of 128 elements 12.9.
pub(crate) const CUBLASLT: Requirement = Requirement {
    name: "cuBLASLt",
    minimum: (12, 9),
    reason: "block-scaled FP8 for Hopper came with 12.9",
    hint: "install cuBLAS of CUDA 13 (`libcublas-13-0`) or the CUDA toolkit",
};

/// The run-time compiler. `.block32` of block-scaled MMAs requires PTX ISA 8.8, of CUDA 12.9.
pub(crate) const NVRTC: Requirement = Requirement {
    name: "NVRTC",
    minimum: (12, 9),
    reason: "block-scaled MMAs need PTX ISA 8.8 of CUDA 12.9",
    hint: "needed only where no prebuilt kernels are: install `cuda-nvrtc-13-0` or the CUDA \
           toolkit",
};

impl Library {
    /// Whether the library is present and recent enough.
    pub fn is_found(&self) -> bool {
        matches!(self, Library::Found { .. })
    }

    /// Version of the library, even if too old.
    pub fn version(&self) -> Option<&str> {
        match self {
            Library::Found { version, .. } | Library::TooOld { version, .. } => Some(version),
            Library::Missing { .. } | Library::Unusable { .. } => None,
        }
    }

    /// Hint for the user, if any.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Library::Found { note, .. } => note.as_deref(),
            Library::Missing { hint, .. }
            | Library::TooOld { hint, .. }
            | Library::Unusable { hint, .. } => Some(hint),
        }
    }

    /// A library that was not searched for or not found.
    pub(crate) fn missing(requirement: &Requirement, looked_for: &[&str]) -> Library {
        Library::Missing {
            looked_for: looked_for.iter().map(|name| name.to_string()).collect(),
            hint: requirement.hint.to_owned(),
        }
    }

    /// A library with the reported `version`, compared with the requirement.
    pub(crate) fn judged(
        requirement: &Requirement,
        version: &str,
        path: Option<String>,
        note: Option<String>,
    ) -> Library {
        let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        let got = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if got >= requirement.minimum {
            return Library::Found { version: version.to_owned(), path, note };
        }
        let (major, minor) = requirement.minimum;
        Library::TooOld {
            version: version.to_owned(),
            needed: format!("{major}.{minor} or newer: {}", requirement.reason),
            path,
            hint: requirement.hint.to_owned(),
        }
    }

    /// A library that was loaded but did not answer.
    pub(crate) fn unusable(
        requirement: &Requirement,
        reason: String,
        path: Option<String>,
    ) -> Library {
        Library::Unusable { reason, path, hint: requirement.hint.to_owned() }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Library::Found { version, .. } => formatter.write_str(version),
            Library::Missing { looked_for, .. } if looked_for.is_empty() => {
                formatter.write_str("not looked for")
            }
            Library::Missing { .. } => formatter.write_str("not found"),
            Library::TooOld { version, needed, .. } => {
                write!(formatter, "{version}, too old (needs {needed})")
            }
            Library::Unusable { reason, .. } => write!(formatter, "unusable: {reason}"),
        }
    }
}

impl Software {
    /// Every library with its name, in table order.
    pub fn libraries(&self) -> [(&'static str, &Library); 6] {
        [
            (DRIVER.name, &self.driver),
            (CUDA_DRIVER_API.name, &self.cuda_driver_api),
            (CUDA_RUNTIME.name, &self.cuda_runtime),
            (NCCL.name, &self.nccl),
            (CUBLASLT.name, &self.cublaslt),
            (NVRTC.name, &self.nvrtc),
        ]
    }

    /// The software of a machine that was not probed.
    pub fn none() -> Software {
        Software {
            driver: Library::missing(&DRIVER, &[]),
            cuda_driver_api: Library::missing(&CUDA_DRIVER_API, &[]),
            cuda_runtime: Library::missing(&CUDA_RUNTIME, &[]),
            nccl: Library::missing(&NCCL, &[]),
            cublaslt: Library::missing(&CUBLASLT, &[]),
            nvrtc: Library::missing(&NVRTC, &[]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let rows = [
            (&DRIVER, "580.159.04", true),
            (&DRIVER, "575.57.08", false),
            (&DRIVER, "1000.1", true),
            (&NVRTC, "12.9", true),
            (&NVRTC, "12.10", true),
            (&NVRTC, "12.8.93", false),
            (&NVRTC, "13.0", true),
            (&NCCL, "2.9.1", false),
            (&NCCL, "2.22.3", true),
            (&CUDA_RUNTIME, "8.0", true),
            (&CUBLASLT, "nonsense", false),
        ];
        for (requirement, version, expected) in rows {
            let library = Library::judged(requirement, version, None, None);
            assert_eq!(library.is_found(), expected, "{} {version}", requirement.name);
            assert_eq!(library.version(), Some(version));
            assert_eq!(library.hint().is_none(), expected);
        }
    }
}
