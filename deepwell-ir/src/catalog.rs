//! The planner's interface to a set of kernels, independent of any particular kernel.

use std::fmt;

use deepwell_precision::{QuantFormat, Role};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Call, DType, MathUnit, Op, Ranks, storage_bytes};

/// Device that a program will run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// `cpu`, `hopper-sm90`, `blackwell-sm100`, ... as `deepwell-probe` prints it.
    pub arch: String,
    /// Machine features that kernels may require, `amx_bf16` for example.
    pub features: Vec<String>,
    /// Vendor libraries that may be called, `cublaslt` for example; empty under emulation.
    pub libraries: Vec<String>,
    /// Worker threads of a CPU, or SMs of a GPU.
    pub workers: usize,
    /// Index of the machine's GPU whose memory and rates are planned with. `None` if the CPU's are
    /// used, also for a GPU that the CPU emulates.
    #[serde(default)]
    pub gpu: Option<usize>,
    /// Name that the GPU reports, `NVIDIA H200` for example: the key of measured kernel times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_name: Option<String>,
    /// Rank that the program is for; omitted for a single rank.
    #[serde(default, skip_serializing_if = "Ranks::is_single")]
    pub ranks: Ranks,
}

impl Target {
    /// This machine's CPU with `workers` threads.
    pub fn cpu(workers: usize, features: Vec<String>) -> Target {
        Target {
            arch: "cpu".to_string(),
            features,
            libraries: Vec::new(),
            workers,
            gpu: None,
            gpu_name: None,
            ranks: Ranks::default(),
        }
    }

    /// Returns the same device as one rank of several.
    pub fn as_rank(self, ranks: Ranks) -> Target {
        Target { ranks, ..self }
    }
}

/// An operand as a kernel sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OperandType {
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl OperandType {
    /// Bytes of the operand; `None` if the number overflows `usize`.
    pub fn storage_bytes(&self) -> Option<usize> {
        storage_bytes(self.dtype, &self.shape)
    }
}

/// A call that needs a kernel: an op and the types of its operands.
#[derive(Clone, Debug)]
pub struct KernelRequest<'a> {
    /// What to compute.
    pub op: &'a Op,
    /// Inputs, then outputs.
    pub operands: &'a [OperandType],
    /// How many of the operands are inputs.
    pub input_count: usize,
}

/// Tile of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tile {
    /// Rows of the output tile, M.
    pub m: usize,
    /// Columns of the output tile, N.
    pub n: usize,
    /// Elements along K.
    pub k: usize,
    /// Tiles of a cluster along M and along N, computed at the same time with shared operand loads;
    /// `[1, 1]` without clusters.
    #[serde(default = "alone")]
    pub cluster: [usize; 2],
}

fn alone() -> [usize; 2] {
    [1, 1]
}

impl Tile {
    /// Returns a tile without a cluster.
    pub const fn new(m: usize, n: usize, k: usize) -> Tile {
        Tile { m, n, k, cluster: [1, 1] }
    }
}

impl fmt::Display for Tile {
    /// `256x128`, or `256x128 in clusters of 1x2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tile { m, n, k: _, cluster: [down, across] } = self;
        write!(f, "{m}x{n}")?;
        match (down, across) {
            (1, 1) => Ok(()),
            _ => write!(f, " in clusters of {down}x{across}"),
        }
    }
}

/// The kernel chosen for a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelChoice {
    /// Unique name, `cpu_mxfp8_gemm` for example.
    pub kernel: String,
    /// Its tile.
    pub tile: Option<Tile>,
    /// Scratch that the call needs in the arena.
    pub workspace_bytes: usize,
}

/// A rejected kernel, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected {
    /// The kernel.
    pub kernel: String,
    /// Why the kernel cannot serve the request, or how much slower it is predicted to be.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kernel, self.reason)
    }
}

/// Result of a kernel selection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The kernel to run.
    pub choice: KernelChoice,
    /// All other kernels of the op: unable to serve the request, or slower.
    pub rejected: Vec<Rejected>,
}

/// No kernel serves the request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no kernel for `{op}` on `{arch}`{}", reasons(self))]
pub struct NoKernel {
    /// Name of the op.
    pub op: String,
    /// Architecture of the target.
    pub arch: String,
    /// Every kernel that was considered.
    pub rejected: Vec<Rejected>,
    /// Architectures with a kernel for the request.
    pub others: Vec<String>,
}

/// Text of the rejections and of the architectures with a kernel.
fn reasons(missing: &NoKernel) -> String {
    let reasons: String = missing.rejected.iter().map(|r| format!("\n  {r}")).collect();
    let others: Vec<String> = missing.others.iter().map(|arch| format!("`{arch}`")).collect();
    match (missing.rejected.is_empty(), others.as_slice()) {
        (true, []) => "\nhint: no target has a kernel of this op; a graph that holds it can be \
                       captured and counted, not run"
            .to_string(),
        (false, []) => reasons,
        (_, others) => format!("{reasons}\nhint: there is a kernel on {}", others.join(", ")),
    }
}

/// The set of available kernels. Plain data: also answers for hardware that is not present.
pub trait KernelCatalog {
    /// Selects the kernel for a request on a target: the fastest measured one where a table has the
    /// shape, otherwise the one with the least predicted time. Every other kernel is listed as
    /// rejected, with the missing feature or the predicted slowdown.
    ///
    /// # Errors
    /// [`NoKernel`] with the reason of each rejection.
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel>;

    /// All kernels that accept a request, with each of their tiles, the selected one first.
    /// Benchmarks compare these.
    fn choices(&self, request: &KernelRequest<'_>, target: &Target) -> Vec<KernelChoice> {
        self.select(request, target).into_iter().map(|selection| selection.choice).collect()
    }

    /// Predicted time of the kernel for a request on a target, in seconds; `None` without a kernel.
    /// An op is fused if the fused op takes less time than its parts.
    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64>;

    /// Checks that kernels exist to quantize, multiply and dequantize operands of the GEMMs of a
    /// tensor of this role in a format. Tensors of a format without kernels are computed in BF16.
    ///
    /// # Errors
    /// The reason, for a report.
    fn serves(&self, _format: &QuantFormat, _role: Role, _target: &Target) -> Result<(), String> {
        Ok(())
    }

    /// Unit that computes a call of an op of `unit` with the named kernel: differs from `unit` if
    /// the kernel dequantizes its operands first.
    fn unit_of(&self, _kernel: &str, unit: MathUnit) -> MathUnit {
        unit
    }

    /// Largest fraction of its unit's peak that the named kernel reached on targets like this one;
    /// 1 if not measured.
    fn peak_share(&self, _kernel: &str, _target: &Target) -> f64 {
        1.0
    }

    /// Tables of measured times that selections for a target use, each with place and date of
    /// measurement and a hash of the contents.
    fn tables(&self, _target: &Target) -> Vec<String> {
        Vec::new()
    }

    /// Bytes that the backend holds on a target in addition to the arena of a program with these
    /// calls: thread stacks, library handles, connections to other ranks.
    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize;
}
