//! Specs of CUDA kernels, as plain data.
//!
//! A launcher, in the folder of its op, has the specs of a `.cu` file (or of a library call) and
//! the function that turns a call into launches. Selection reads only the specs, so planning works
//! without the GPU.

use deepwell_ir::{KernelRequest, Op, Target, Tile};

use super::prepare::{CallView, Device, Step};
use crate::KernelError;
use crate::epilogue::EpilogueSet;
use crate::predict::Predict;

/// One kernel of the CUDA backend.
#[derive(Clone, Copy, Debug)]
pub struct CudaKernelSpec {
    /// Unique name, `cuda_rms_norm` or `cublaslt_bf16_linear` for example.
    pub name: &'static str,
    /// Names of the supported ops, or of the supported cores of fused ops.
    pub ops: &'static [&'static str],
    /// Supported epilogues of a core.
    pub epilogue: fn(&Op) -> EpilogueSet,
    /// Architectures of the compiled kernel.
    pub architectures: &'static [Architecture],
    /// The vendor's library that the kernel calls, as named in [`Target::libraries`].
    pub library: Option<&'static str>,
    /// Why the kernel cannot serve a request for its ops; `None` if it can.
    pub reject: fn(&KernelRequest<'_>) -> Option<String>,
    /// Predicted time of a request that the kernel serves.
    pub predict: Predict,
    /// Workspace in bytes.
    pub workspace_bytes: fn(&KernelRequest<'_>, &Target) -> usize,
    /// Selects the tile, if the kernel has several.
    pub select_tile: Option<SelectTile>,
    /// Turns a call into launches.
    pub prepare: Prepare,
}

/// Turns a call into launches.
pub type Prepare = for<'a, 'b> fn(&CallView<'a>, &mut Device<'b>) -> Result<Vec<Step>, KernelError>;

/// The tile chosen among a kernel's tiles, and the reasons against the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileSelection {
    /// The tile.
    pub tile: Tile,
    /// All other tiles, with reasons.
    pub rejected: Vec<(Tile, String)>,
}

/// Selects the tile for a request that a kernel serves.
pub type SelectTile = fn(&KernelRequest<'_>, &Target) -> TileSelection;

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

/// No scratch.
pub fn no_workspace(_: &KernelRequest<'_>, _: &Target) -> usize {
    0
}

/// Takes every request for its ops.
pub fn takes_all(_: &KernelRequest<'_>) -> Option<String> {
    None
}
