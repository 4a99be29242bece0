//! What the planner asks of a set of kernels, without knowing any of them.

use std::fmt;

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Call, DType, MathUnit, Op, Ranks, storage_bytes};

/// What the program will run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// `cpu`, `hopper-sm90`, `blackwell-sm100`, ... as `deepwell-probe` prints it.
    pub arch: String,
    /// Features of the machine that kernels ask for, `amx_bf16` for example.
    pub features: Vec<String>,
    /// Vendor libraries that may be called, `cublaslt` for example; none under emulation.
    pub libraries: Vec<String>,
    /// Worker threads of a CPU, or SMs of a GPU.
    pub workers: usize,
    /// The machine's GPU whose memory and rates the program has, by its index; none where they are
    /// the processor's, also for a GPU that the processor emulates.
    #[serde(default)]
    pub gpu: Option<usize>,
    /// What that GPU calls itself, `NVIDIA H200` for example: kernels measured on such a GPU are
    /// known by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_name: Option<String>,
    /// The rank that the program is for; left out where there is one rank alone.
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

    /// The same device as a rank among several.
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
    /// Bytes that it takes; none where that is more than an address can count.
    pub fn storage_bytes(&self) -> Option<usize> {
        storage_bytes(self.dtype, &self.shape)
    }
}

/// A call that wants a kernel: inputs of the op, then its outputs.
#[derive(Clone, Debug)]
pub struct KernelRequest<'a> {
    /// What to compute.
    pub op: &'a Op,
    /// Inputs, then outputs.
    pub operands: &'a [OperandType],
    /// How many of the operands are inputs.
    pub input_count: usize,
}

/// Tile of a kernel, for those that have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tile {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Elements of the contraction.
    pub k: usize,
    /// Tiles, one below the other and side by side, that are computed at the same time and share
    /// what they read of the operands; 1 and 1 if each is alone.
    #[serde(default = "alone")]
    pub cluster: [usize; 2],
}

fn alone() -> [usize; 2] {
    [1, 1]
}

impl Tile {
    /// A tile alone.
    pub const fn new(m: usize, n: usize, k: usize) -> Tile {
        Tile { m, n, k, cluster: [1, 1] }
    }
}

impl fmt::Display for Tile {
    /// `256x128`, and `256x128 in clusters of 1x2` if it shares.
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

/// A kernel that was not taken, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected {
    /// The kernel.
    pub kernel: String,
    /// Why it does not serve here, or how much slower it is predicted to be.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kernel, self.reason)
    }
}

/// What a catalog answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The kernel to run.
    pub choice: KernelChoice,
    /// All others of the op: those that cannot serve, and those that would be slower.
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
    /// Every kernel that was looked at.
    pub rejected: Vec<Rejected>,
    /// Architectures of other targets that have a kernel for the request.
    pub others: Vec<String>,
}

/// What was looked at, and who has a kernel.
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

/// Knows which kernels there are. Plain data: it answers for hardware that is not here.
pub trait KernelCatalog {
    /// The kernel for a request on a target: of those that take it the one with the least
    /// predicted time, or the least measured one where a table has the shape. Every other one is
    /// among the rejected, with what it lacks or how much slower it is.
    ///
    /// # Errors
    /// [`NoKernel`] with the reason of each rejection.
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel>;

    /// Every kernel that takes a request, with each of its tiles, the selected one first: what a
    /// benchmark compares.
    fn choices(&self, request: &KernelRequest<'_>, target: &Target) -> Vec<KernelChoice> {
        self.select(request, target).into_iter().map(|selection| selection.choice).collect()
    }

    /// What the kernel for a request is predicted to take on a target, in seconds; none where there
    /// is no kernel. Fusions are made where the fused op takes less than its parts.
    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64>;

    /// Whether there are kernels that make, multiply and dequantize operands of a format, and if
    /// not, why. Tensors of a format that is not served are computed in BF16.
    ///
    /// # Errors
    /// The reason, for a report.
    fn serves(&self, _format: &QuantFormat, _target: &Target) -> Result<(), String> {
        Ok(())
    }

    /// The unit that computes a call of an op of `unit` by a kernel of this name: another where the
    /// kernel dequantizes its operands first.
    fn unit_of(&self, _kernel: &str, unit: MathUnit) -> MathUnit {
        unit
    }

    /// The most of its unit's peak that a kernel of this name was measured at on targets like this
    /// one; 1 where nothing was measured.
    fn peak_share(&self, _kernel: &str, _target: &Target) -> f64 {
        1.0
    }

    /// The tables of measured times that selections for a target follow where they have a shape,
    /// each named with where and when it was measured and a hash of what is in it.
    fn tables(&self, _target: &Target) -> Vec<String> {
        Vec::new()
    }

    /// Bytes that the backend holds on a target beside the arena of a program with these calls:
    /// thread stacks, library handles, connections to the ranks that it sends to.
    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize;
}
