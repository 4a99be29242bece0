//! The catalog of CUDA kernels for the planner.

mod peak_share;

use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{
    Call, KernelCatalog, KernelChoice, KernelRequest, MathUnit, NoKernel, Op, ProcessGroup, Ranks,
    Rejected, Selection, Target,
};
use deepwell_precision::{QuantFormat, Role, ScaleFormat, ScaleRule};

use super::selection::{self, Candidate, Offer};
use super::targets::others_that_serve;
use crate::ops::OPS;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::prepare::RESERVED_BYTES;
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::epilogue::EpilogueSet;

/// The CUDA kernels as a catalog.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaCatalog;

/// Kernels that dequantize quantized operands and multiply in BF16.
const DEQUANTIZING: [&str; 5] = [
    "cublaslt_dequantized_mx_gemm",
    "cuda_sm90_dequantized_mxfp8_gemm",
    "cuda_sm90_dequantized_grouped_gemm",
    "cuda_sm90_dequantized_nvfp4_gemm",
    "cuda_sm90_dequantized_nvfp4_grouped_gemm",
];

/// All kernels, preferred kernels first within an op.
pub fn cuda_kernels() -> impl Iterator<Item = &'static CudaKernelSpec> {
    OPS.iter().flat_map(|op| op.cuda).copied().flatten()
}

/// GPU memory held by a CUDA context, its loaded kernels and the vendor's library before our first
/// allocation, by the driver's count of free memory: measured on an H200 with driver 580. An
/// emulated GPU has no context.
const CONTEXT_BYTES: usize = 560 << 20;

/// GPU memory held by NCCL: a base with any collective, a part per group, and a part per NVLink
/// peer that a rank sends to. Measured on two H100s and four H200s with NCCL 2.28
/// (benchmarks/ranks_h100_2026-11-27.md): 891 MiB with one group, 1,375 with two, 1,823 with two
/// expert-parallel ranks or two stages, with two groups and a peer.
const NCCL_BYTES: usize = 405 << 20;
const NCCL_GROUP_BYTES: usize = 486 << 20;
const NCCL_PEER_BYTES: usize = 446 << 20;

impl KernelCatalog for CudaCatalog {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let selected = selection::fastest(candidates(request, target));
        selected.map_err(|rejected| no_kernel(request, target, rejected))
    }

    fn choices(&self, request: &KernelRequest<'_>, target: &Target) -> Vec<KernelChoice> {
        let mut choices = Vec::new();
        for Candidate { kernel, tiles, offer } in candidates(request, target) {
            let Ok(Offer { tile, workspace_bytes, .. }) = offer else { continue };
            let tiles = tiles.into_iter().map(|(tile, _)| Some(tile));
            choices.extend([tile].into_iter().chain(tiles).map(|tile| KernelChoice {
                kernel: kernel.clone(),
                tile,
                workspace_bytes,
            }));
        }
        if let Ok(Selection { choice, .. }) = self.select(request, target) {
            choices.sort_by_key(|known| *known != choice);
        }
        choices
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        let serving =
            kernels_of(request.op).filter(|spec| rejection(spec, request, target).is_none());
        serving.map(|spec| (spec.predict)(request, target)).min_by(f64::total_cmp)
    }

    fn serves(&self, format: &QuantFormat, _: Role, _: &Target) -> Result<(), String> {
        served(format)
    }

    fn unit_of(&self, kernel: &str, unit: MathUnit) -> MathUnit {
        if DEQUANTIZING.contains(&kernel) { MathUnit::Bf16 } else { unit }
    }

    fn peak_share(&self, kernel: &str, target: &Target) -> f64 {
        peak_share::peak_share(kernel, target)
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        let of_gpu = target.gpu.map_or(0, |_| CONTEXT_BYTES + exchange_bytes(&target.ranks, calls));
        of_gpu + RESERVED_BYTES
    }
}

/// GPU memory held by NCCL on a rank. NCCL connects a rank to each peer of its sends: for pipeline
/// stages and rings the previous and the next rank, for experts with a capacity factor all ranks of
/// the group. All-gathers and reduce-scatters of tokens have no such peers.
fn exchange_bytes(ranks: &Ranks, calls: &[Call]) -> usize {
    let groups = || ranks.groups.iter().enumerate().filter(|(_, group)| group.ranks.len() > 1);
    if groups().next().is_none() {
        return 0;
    }
    let sends_to_all = |index: usize| {
        let is_one = |op: &Op| {
            matches!(op, Op::Collective(Collective { kind: CollectiveKind::AllToAll, group, .. })
                if group.0 as usize == index)
        };
        calls.iter().any(|call| is_one(&call.op))
    };
    let peers = |(index, group): (usize, &ProcessGroup)| match group.name.as_str() {
        ProcessGroup::PIPELINE | ProcessGroup::CONTEXT => 2.min(group.ranks.len() - 1),
        _ if sends_to_all(index) => group.ranks.len() - 1,
        _ => 0,
    };
    let of_group = |group| NCCL_GROUP_BYTES + peers(group) * NCCL_PEER_BYTES;
    NCCL_BYTES + groups().map(of_group).sum::<usize>()
}

/// The error of a request that no kernel serves.
pub(super) fn no_kernel(
    request: &KernelRequest<'_>,
    target: &Target,
    rejected: Vec<Rejected>,
) -> NoKernel {
    NoKernel {
        op: request.op.name().to_string(),
        arch: target.arch.clone(),
        rejected,
        others: others_that_serve(request, target),
    }
}

/// Kernels of a plain op, or kernels of a fused op's core that have an epilogue.
fn kernels_of(op: &Op) -> impl Iterator<Item = &'static CudaKernelSpec> {
    let (core, is_fused) = (op.leading(), !op.epilogue().is_empty());
    cuda_kernels().filter(move |spec| {
        let is_fusing = (spec.epilogue)(core) != EpilogueSet::NONE;
        spec.ops.contains(&core.rule().name()) && is_fusing == is_fused
    })
}

pub(super) fn candidates(request: &KernelRequest<'_>, target: &Target) -> Vec<Candidate> {
    kernels_of(request.op)
        .map(|spec| {
            let kernel = spec.name.to_string();
            if let Some(reason) = rejection(spec, request, target) {
                return Candidate { kernel, tiles: Vec::new(), offer: Err(reason) };
            }
            let tiles = spec.select_tile.map(|select| select(request, target));
            let offer = Offer {
                predicted_s: (spec.predict)(request, target),
                tile: tiles.as_ref().map(|found| found.tile),
                workspace_bytes: (spec.workspace_bytes)(request, target),
            };
            let tiles = tiles.map_or_else(Vec::new, |found| found.rejected);
            Candidate { kernel, tiles, offer: Ok(offer) }
        })
        .collect()
}

/// Why a kernel is unavailable on a target.
fn absence(spec: &CudaKernelSpec, target: &Target) -> Option<String> {
    let serves = |known: &Architecture| known.target_name() == target.arch;
    if !spec.architectures.iter().any(serves) {
        let known: Vec<_> = spec.architectures.iter().map(|known| known.target_name()).collect();
        return Some(format!("runs on {}, not on {}", known.join(", "), target.arch));
    }
    let library = spec.library?;
    let is_there = target.libraries.iter().any(|known| known == library);
    (!is_there).then(|| format!("needs the library `{library}`"))
}

fn rejection(
    spec: &CudaKernelSpec,
    request: &KernelRequest<'_>,
    target: &Target,
) -> Option<String> {
    absence(spec, target)
        .or_else(|| (spec.epilogue)(request.op.leading()).reject(request.op))
        .or_else(|| request.op.formats().iter().find_map(|format| unread(spec, format)))
        .or_else(|| (spec.reject)(request))
}

/// Why a kernel does not read or write operands of a format.
fn unread(spec: &CudaKernelSpec, format: &QuantFormat) -> Option<String> {
    if !format.is_of_family(&spec.family) {
        return Some(format!("takes {}, not {}", spec.family.name(), format.name()));
    }
    without_kernel(format.scale)
}

/// Why no kernel computes scales by a rule.
fn without_kernel(scale: ScaleFormat) -> Option<String> {
    match scale {
        // This rule reads the elements of a block again after their maximum magnitude is known.
        ScaleFormat::E8m0(rule @ ScaleRule::MinError) => {
            Some(format!("CUDA kernels quantize by the scale rules rceil and floor, not {rule}"))
        }
        _ => None,
    }
}

/// Whether kernels serve the GEMMs of tensors in a format: MXFP8 and NVFP4, of matrices and of
/// experts, on every architecture.
fn served(format: &QuantFormat) -> Result<(), String> {
    let [mxfp8, nvfp4] = [QuantFormat::MXFP8, QuantFormat::NVFP4];
    if format.is_of_family(&mxfp8) {
        return without_kernel(format.scale).map_or(Ok(()), Err);
    }
    if format.is_of_family(&nvfp4) {
        return Ok(());
    }
    let known = [mxfp8.name(), nvfp4.name()];
    Err(format!("CUDA kernels take {} and {}, not {}", known[0], known[1], format.name()))
}

#[cfg(test)]
mod tests;
