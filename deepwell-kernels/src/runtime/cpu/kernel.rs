//! Kernels of the CPU backend as plain data: the op, scratch, matrix instructions, and the function
//! that binds a call's operands.

use deepwell_ir::{KernelRequest, Op};

use super::gemm::Tier;
use super::operands::{Operands, Run};
use crate::KernelError;

/// The kernels that prepared calls are made of.
pub(crate) struct CpuKernels {
    /// Preferred kernels first within an op.
    pub(crate) specs: Vec<CpuKernelSpec>,
    /// Prepares a fused op from the kernels of its parts.
    pub(crate) fused: Prepare,
}

/// A kernel, as the folder of its op registers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuKernel {
    /// The op that the kernel computes.
    op: &'static str,
    /// Whether the kernel multiplies matrices, and so has a variant for each [`Tier`].
    is_tiered: bool,
    workspace_bytes: WorkspaceBytes,
    prepare: Prepare,
}

/// Returns the scratch of a request in bytes, on a number of threads.
pub(crate) type WorkspaceBytes = fn(&KernelRequest<'_>, Tier, usize) -> usize;

/// Turns operands into a runnable call; the op is the call's or a part of it.
pub(crate) type Prepare = for<'a> fn(&Operands<'a>, &Op) -> Result<Run, KernelError>;

impl CpuKernel {
    /// A kernel without tiers and without scratch.
    pub(crate) const fn new(op: &'static str, prepare: Prepare) -> CpuKernel {
        CpuKernel { op, is_tiered: false, workspace_bytes: |_, _, _| 0, prepare }
    }

    /// Adds scratch.
    pub(crate) const fn scratch(self, workspace_bytes: WorkspaceBytes) -> CpuKernel {
        CpuKernel { workspace_bytes, ..self }
    }

    /// Adds variants for the matrix instructions.
    pub(crate) const fn tiered(self) -> CpuKernel {
        CpuKernel { is_tiered: true, ..self }
    }

    /// All variants, preferred variants first.
    pub(crate) fn specs(self) -> Vec<CpuKernelSpec> {
        let CpuKernel { op, is_tiered, workspace_bytes, prepare } = self;
        let spec = |name, tier| CpuKernelSpec { name, op, tier, workspace_bytes, prepare };
        if !is_tiered {
            return vec![spec(format!("cpu_{op}"), None)];
        }
        let tiers = Tier::ALL.into_iter().rev();
        tiers.map(|tier| spec(format!("cpu_{op}_{}", tier_suffix(tier)), Some(tier))).collect()
    }
}

/// One kernel of the CPU backend.
#[derive(Clone, Debug)]
pub struct CpuKernelSpec {
    /// Unique name: `cpu_`, the op, and the tier if it has one.
    pub name: String,
    /// The op that the kernel computes.
    pub op: &'static str,
    /// The matrix instructions, for kernels that multiply matrices.
    pub tier: Option<Tier>,
    pub(crate) workspace_bytes: WorkspaceBytes,
    pub(crate) prepare: Prepare,
}

/// The feature name of a matrix tier in a target.
pub fn tier_feature(tier: Tier) -> Option<&'static str> {
    match tier {
        Tier::AmxBf16 => Some("amx_bf16"),
        Tier::Avx512Bf16 => Some("avx512bf16"),
        Tier::Avx512 => Some("avx512f"),
        Tier::F32 => None,
    }
}

fn tier_suffix(tier: Tier) -> &'static str {
    match tier {
        Tier::AmxBf16 => "amx",
        Tier::Avx512Bf16 => "avx512",
        Tier::Avx512 => "avx512f",
        Tier::F32 => "f32",
    }
}
