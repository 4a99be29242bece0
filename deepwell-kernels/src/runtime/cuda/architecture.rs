//! GPU architectures, and targets of the planner with a GPU.

use deepwell_ir::{Ranks, Target};

/// The GEMM library, as named in [`Target::libraries`].
pub const CUBLASLT: &str = "cublaslt";

/// The collective library, as named in [`Target::libraries`]: a
/// [`DeviceComm`](super::comm::DeviceComm).
pub const COLLECTIVES: &str = "collectives";

/// A GPU architecture that kernels are compiled for, with its architecture-specific features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// Hopper: H100, H200.
    Sm90a,
    /// Blackwell: B200, GB200.
    Sm100a,
    /// Blackwell Ultra: B300.
    Sm103a,
    /// Blackwell, consumer and workstation.
    Sm120a,
}

impl Architecture {
    /// All architectures, oldest first: portable kernels are compiled for each.
    pub const ALL: [Architecture; 4] =
        [Architecture::Sm90a, Architecture::Sm100a, Architecture::Sm103a, Architecture::Sm120a];

    /// As the compiler writes it, `sm_90a`.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Sm90a => "sm_90a",
            Architecture::Sm100a => "sm_100a",
            Architecture::Sm103a => "sm_103a",
            Architecture::Sm120a => "sm_120a",
        }
    }

    /// The spelling of [`Target::arch`].
    pub const fn target_name(self) -> &'static str {
        match self {
            Architecture::Sm90a => "hopper-sm90",
            Architecture::Sm100a => "blackwell-sm100",
            Architecture::Sm103a => "blackwell-sm103",
            Architecture::Sm120a => "blackwell-sm120",
        }
    }

    /// Short name, `sm90`.
    pub const fn short_name(self) -> &'static str {
        match self {
            Architecture::Sm90a => "sm90",
            Architecture::Sm100a => "sm100",
            Architecture::Sm103a => "sm103",
            Architecture::Sm120a => "sm120",
        }
    }

    /// The architecture of a [`Architecture::short_name`].
    pub fn of_short_name(name: &str) -> Option<Architecture> {
        Architecture::ALL.into_iter().find(|known| known.short_name() == name)
    }

    /// The architecture of a compute capability.
    pub fn of_capability(capability: (u32, u32)) -> Option<Architecture> {
        match capability {
            (9, 0) => Some(Architecture::Sm90a),
            (10, 0) => Some(Architecture::Sm100a),
            (10, 3) => Some(Architecture::Sm103a),
            (12, 0) => Some(Architecture::Sm120a),
            _ => None,
        }
    }
}

/// A target for the first GPU of the machine.
pub fn cuda_target(architecture: Architecture, sm_count: usize, libraries: &[&str]) -> Target {
    Target {
        arch: architecture.target_name().to_string(),
        features: Vec::new(),
        libraries: libraries.iter().map(|&library| library.to_string()).collect(),
        workers: sm_count,
        gpu: Some(0),
        gpu_name: None,
        ranks: Ranks::default(),
    }
}
