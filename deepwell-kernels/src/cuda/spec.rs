//! What a CUDA kernel says of itself, as plain data.
//!
//! A launcher, in the folder of its op, holds the specs of one `.cu` file (or of one library call)
//! and the function that turns a call into launches. Selection reads only the specs, so it works
//! for a GPU that is not here.

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
    /// Names of the ops that it computes, or that are the core of what it computes.
    pub ops: &'static [&'static str],
    /// What it takes behind one of them.
    pub epilogue: fn(&Op) -> EpilogueSet,
    /// Architectures that it is compiled for.
    pub architectures: &'static [Architecture],
    /// The vendor's library that it calls, as [`Target::libraries`] names it.
    pub library: Option<&'static str>,
    /// Why it cannot serve a request whose op it has, `None` when it can.
    pub reject: fn(&KernelRequest<'_>) -> Option<String>,
    /// What it is predicted to take for a request that it serves.
    pub predict: Predict,
    /// Scratch in bytes.
    pub workspace_bytes: fn(&KernelRequest<'_>, &Target) -> usize,
    /// Selects its tile, if it has several.
    pub select_tile: Option<SelectTile>,
    /// Turns a call into launches.
    pub prepare: Prepare,
}

/// Turns a call into launches.
pub type Prepare = for<'a, 'b> fn(&CallView<'a>, &mut Device<'b>) -> Result<Vec<Step>, KernelError>;

/// One of the tiles that a kernel has, and why not the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileSelection {
    /// The tile.
    pub tile: Tile,
    /// All others and the reasons.
    pub rejected: Vec<(Tile, String)>,
}

/// Selects the tile for a request that a kernel takes.
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
    /// All, oldest first: what portable kernels are compiled for.
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

    /// As [`Target::arch`] writes it.
    pub const fn target_name(self) -> &'static str {
        match self {
            Architecture::Sm90a => "hopper-sm90",
            Architecture::Sm100a => "blackwell-sm100",
            Architecture::Sm103a => "blackwell-sm103",
            Architecture::Sm120a => "blackwell-sm120",
        }
    }

    /// As people write it, `sm90`.
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
