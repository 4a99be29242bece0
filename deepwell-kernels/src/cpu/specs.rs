//! Which CPU kernels there are: what each takes, needs of the machine, and its scratch.
//!
//! Plain data and pure functions: selection works for a processor that is not this one.

use std::sync::LazyLock;

use deepwell_ir::{
    DType, KernelCatalog, KernelChoice, KernelRequest, NoKernel, Op, Rejected, Selection, Target,
};

use super::calls::{Operands, Run, with_activation, with_quantize};
use super::gemm::Tier;
use crate::KernelError;
use crate::ops::OPS;
use crate::targets::others_that_serve;

/// A kernel as the folder of its op registers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuKernel {
    /// The op that it computes.
    op: &'static str,
    /// Whether it multiplies matrices, so that there is one for each [`Tier`].
    is_tiered: bool,
    workspace_bytes: WorkspaceBytes,
    prepare: Prepare,
}

/// Scratch for a request, in bytes, on a number of threads.
type WorkspaceBytes = fn(&KernelRequest<'_>, Tier, usize) -> usize;

/// Turns operands into what a call does; the op is the call's or a part of it.
type Prepare = for<'a> fn(&Operands<'a>, &Op) -> Result<Run, KernelError>;

impl CpuKernel {
    /// One that runs the same everywhere, without scratch.
    pub(crate) const fn new(op: &'static str, prepare: Prepare) -> CpuKernel {
        CpuKernel { op, is_tiered: false, workspace_bytes: |_, _, _| 0, prepare }
    }

    /// With scratch.
    pub(crate) const fn scratch(self, workspace_bytes: WorkspaceBytes) -> CpuKernel {
        CpuKernel { workspace_bytes, ..self }
    }

    /// On matrix instructions.
    pub(crate) const fn tiered(self) -> CpuKernel {
        CpuKernel { is_tiered: true, ..self }
    }

    /// All that are made of it, preferred ones first.
    fn specs(self) -> Vec<CpuKernelSpec> {
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
    /// The op that it computes.
    pub op: &'static str,
    /// The matrix instructions that it runs on, for kernels that multiply matrices.
    pub tier: Option<Tier>,
    workspace_bytes: WorkspaceBytes,
    pub(super) prepare: Prepare,
}

/// The feature name under which a target has a matrix tier.
pub fn tier_feature(tier: Tier) -> Option<&'static str> {
    match tier {
        Tier::AmxBf16 => Some("amx_bf16"),
        Tier::Avx512Bf16 => Some("avx512bf16"),
        Tier::F32 => None,
    }
}

fn tier_suffix(tier: Tier) -> &'static str {
    match tier {
        Tier::AmxBf16 => "amx",
        Tier::Avx512Bf16 => "avx512",
        Tier::F32 => "f32",
    }
}

/// This machine's processor with `threads` workers, as a target.
pub fn cpu_target(threads: usize) -> Target {
    let features = Tier::ALL
        .into_iter()
        .filter(|tier| tier.is_available())
        .filter_map(tier_feature)
        .map(str::to_string)
        .collect();
    Target::cpu(threads, features)
}

/// Every kernel of the CPU backend, preferred ones first within an op.
pub fn cpu_kernels() -> &'static [CpuKernelSpec] {
    static KERNELS: LazyLock<Vec<CpuKernelSpec>> = LazyLock::new(|| {
        let of_ops = OPS.iter().flat_map(|op| op.cpu);
        of_ops.chain(COMPOSITES).flat_map(|kernel| kernel.specs()).collect()
    });
    &KERNELS
}

const fn activated(op: &'static str) -> CpuKernel {
    CpuKernel::new(op, with_activation::prepare).scratch(with_activation).tiered()
}

const fn quantized(op: &'static str) -> CpuKernel {
    CpuKernel::new(op, with_quantize::prepare).scratch(with_quantize)
}

/// Several ops in one call.
const COMPOSITES: &[CpuKernel] = &[
    activated("linear_gelu"),
    activated("linear_input_grad_gelu_backward"),
    activated("mx_gemm_gelu"),
    activated("mx_gemm_gelu_backward"),
    quantized("linear_quantize").tiered(),
    quantized("linear_input_grad_quantize").tiered(),
    quantized("mx_gemm_quantize").tiered(),
    quantized("linear_gelu_quantize").tiered(),
    quantized("linear_input_grad_gelu_backward_quantize").tiered(),
    quantized("mx_gemm_gelu_quantize").tiered(),
    quantized("mx_gemm_gelu_backward_quantize").tiered(),
    quantized("rms_norm_quantize"),
    quantized("add_rms_norm_quantize"),
    quantized("rms_norm_backward_quantize"),
    quantized("layer_norm_quantize"),
    quantized("add_layer_norm_quantize"),
    quantized("layer_norm_backward_quantize"),
    quantized("rope_backward_quantize"),
    quantized("swiglu_quantize"),
    quantized("swiglu_backward_quantize"),
    quantized("gelu_quantize"),
    quantized("gelu_backward_quantize"),
];

/// Scratch of the kernel of a request's op.
fn workspace_of(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let spec = cpu_kernels().iter().find(|spec| spec.op == request.op.name());
    spec.map_or(0, |spec| (spec.workspace_bytes)(request, tier, threads))
}

/// What the product wants, and room for it where it is not stored.
fn with_activation(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let Op::WithActivation(op) = request.op else { return 0 };
    with_activation::workspace_bytes(request, op, |product| workspace_of(product, tier, threads))
}

/// What the producer wants, and room for those of its outputs that are not stored.
fn with_quantize(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let Op::WithQuantize(op) = request.op else { return 0 };
    let inputs = &request.operands[..request.input_count];
    // Operands that the op does not take are refused when the call is prepared.
    let Ok(scratch) = with_quantize::Scratch::new(op, inputs) else { return 0 };
    let operands = [inputs, &scratch.outputs].concat();
    let producer =
        KernelRequest { op: &op.producer, operands: &operands, input_count: inputs.len() };
    scratch.bytes + workspace_of(&producer, tier, threads)
}

/// The CPU kernels as a catalog.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuCatalog;

/// What one worker thread of the pool and its stack hold once they have run.
const BYTES_PER_WORKER: usize = 128 * 1024;

impl KernelCatalog for CpuCatalog {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let op = request.op.name();
        let mut rejected = Vec::new();
        for spec in cpu_kernels().iter().filter(|spec| spec.op == op) {
            match rejection(spec, request, target) {
                Some(reason) => rejected.push(Rejected { kernel: spec.name.clone(), reason }),
                None => {
                    let tier = spec.tier.unwrap_or(Tier::F32);
                    let choice = KernelChoice {
                        kernel: spec.name.clone(),
                        tile: None,
                        workspace_bytes: (spec.workspace_bytes)(request, tier, target.workers),
                    };
                    return Ok(Selection { choice, rejected });
                }
            }
        }
        let others = others_that_serve(request, target);
        Err(NoKernel { op, arch: target.arch.clone(), rejected, others })
    }

    fn fixed_overhead_bytes(&self, target: &Target) -> usize {
        target.workers * BYTES_PER_WORKER
    }
}

/// Whether a kernel takes the request on every processor.
pub(crate) fn serves(request: &KernelRequest<'_>) -> bool {
    let plain = Target::cpu(1, Vec::new());
    let op = request.op.name();
    cpu_kernels().iter().any(|spec| spec.op == op && rejection(spec, request, &plain).is_none())
}

fn rejection(spec: &CpuKernelSpec, request: &KernelRequest<'_>, target: &Target) -> Option<String> {
    if target.arch != "cpu" {
        return Some(format!("runs on a cpu, not on {}", target.arch));
    }
    if let Op::Collective(op) = request.op {
        let (inputs, outputs) = request.operands.split_at(request.input_count);
        return op.check(inputs, outputs).err().map(|error| error.to_string());
    }
    let tier = spec.tier?;
    match tier_feature(tier) {
        Some(feature) if !target.features.iter().any(|known| known == feature) => {
            Some(format!("needs the processor's `{feature}`"))
        }
        Some(_) if request.operands[0].dtype == DType::F32 => {
            Some("takes bf16 operands, not f32".to_string())
        }
        _ => None,
    }
}
