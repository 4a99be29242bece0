//! Specs of CUDA kernels, as plain data.
//!
//! A launcher, in the folder of its op, has the specs of a `.cu` file (or of a library call) and
//! the function that turns a call into launches. Selection reads only the specs, so planning works
//! without the GPU.

use deepwell_ir::{KernelRequest, Op, Target, Tile};
use deepwell_precision::QuantFormat;

use super::architecture::Architecture;
use super::prepare::{CallView, Device, Step};
use crate::KernelError;
use crate::runtime::epilogue::{EpilogueSet, no_epilogue};
use crate::runtime::predict::{Predict, roofline};

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
    /// A format of the family whose operands the kernel reads or writes, if any are quantized.
    pub family: QuantFormat,
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

impl CudaKernelSpec {
    /// A kernel for all architectures that calls no library, takes every request for `ops` without
    /// epilogue, workspace and tiles, with quantized operands in MXFP8, and is predicted at its
    /// roofline time.
    pub const fn new(
        name: &'static str,
        ops: &'static [&'static str],
        prepare: Prepare,
    ) -> CudaKernelSpec {
        CudaKernelSpec {
            name,
            ops,
            epilogue: no_epilogue,
            architectures: &Architecture::ALL,
            library: None,
            family: QuantFormat::MXFP8,
            reject: takes_all,
            predict: roofline,
            workspace_bytes: no_workspace,
            select_tile: None,
            prepare,
        }
    }

    /// The same kernel under another name.
    pub const fn name(self, name: &'static str) -> CudaKernelSpec {
        CudaKernelSpec { name, ..self }
    }

    /// The same kernel for other ops.
    pub const fn ops(self, ops: &'static [&'static str]) -> CudaKernelSpec {
        CudaKernelSpec { ops, ..self }
    }

    /// The same kernel with another launcher.
    pub const fn prepare(self, prepare: Prepare) -> CudaKernelSpec {
        CudaKernelSpec { prepare, ..self }
    }

    /// Sets the supported epilogues of a core.
    pub const fn epilogue(self, epilogue: fn(&Op) -> EpilogueSet) -> CudaKernelSpec {
        CudaKernelSpec { epilogue, ..self }
    }

    /// Sets the architectures of the compiled kernel.
    pub const fn architectures(self, architectures: &'static [Architecture]) -> CudaKernelSpec {
        CudaKernelSpec { architectures, ..self }
    }

    /// Sets the vendor's library that the kernel calls.
    pub const fn library(self, library: &'static str) -> CudaKernelSpec {
        CudaKernelSpec { library: Some(library), ..self }
    }

    /// Sets the family of quantized operands.
    pub const fn family(self, family: QuantFormat) -> CudaKernelSpec {
        CudaKernelSpec { family, ..self }
    }

    /// Sets the reasons against requests.
    pub const fn reject(self, reject: fn(&KernelRequest<'_>) -> Option<String>) -> CudaKernelSpec {
        CudaKernelSpec { reject, ..self }
    }

    /// Sets the prediction.
    pub const fn predict(self, predict: Predict) -> CudaKernelSpec {
        CudaKernelSpec { predict, ..self }
    }

    /// Sets the workspace in bytes.
    pub const fn workspace_bytes(
        self,
        workspace_bytes: fn(&KernelRequest<'_>, &Target) -> usize,
    ) -> CudaKernelSpec {
        CudaKernelSpec { workspace_bytes, ..self }
    }

    /// Sets the selection among the kernel's tiles.
    pub const fn select_tile(self, select_tile: SelectTile) -> CudaKernelSpec {
        CudaKernelSpec { select_tile: Some(select_tile), ..self }
    }
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

/// No scratch.
pub fn no_workspace(_: &KernelRequest<'_>, _: &Target) -> usize {
    0
}

/// Takes every request for its ops.
pub fn takes_all(_: &KernelRequest<'_>) -> Option<String> {
    None
}
