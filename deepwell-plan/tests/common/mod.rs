//! A machine and kernels that are not there: planning must not need any.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    Call, Graph, KernelCatalog, KernelChoice, KernelRequest, NoKernel, Op, PrecisionPolicy,
    Recompute, Rejected, Selection, Target,
};
use deepwell_plan::{OptimizerSpec, PlanError, PlanRequest, Planned, autoplan};
use deepwell_probe::{Cpu, Hardware};

/// What [`Kernels`] holds beside the arena.
pub(crate) const OVERHEAD_BYTES: usize = 1 << 16;

/// One kernel per op, `plain_` and the op's name; GEMMs want scratch.
pub(crate) struct Kernels;

/// Scratch of a GEMM.
pub(crate) const SCRATCH_BYTES: usize = 4096;

impl KernelCatalog for Kernels {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let op = request.op.name().to_string();
        let kernel = format!("plain_{op}");
        if target.arch != "cpu" {
            let reason = format!("runs on a cpu, not on {}", target.arch);
            let rejected = vec![Rejected { kernel, reason }];
            let others = Vec::new();
            return Err(NoKernel { op, arch: target.arch.clone(), rejected, others });
        }
        let wants_scratch = op.starts_with("linear") || op == "scaled_gemm";
        let workspace_bytes = if wants_scratch { SCRATCH_BYTES } else { 0 };
        let choice = KernelChoice { kernel, tile: None, workspace_bytes };
        Ok(Selection { choice, rejected: Vec::new() })
    }

    /// The same of every op but fused ones and updates that write copies, which there are none of.
    fn predicted_s(&self, request: &KernelRequest<'_>, _target: &Target) -> Option<f64> {
        let writes_copies = matches!(request.op, Op::AdamW(op) if !op.copies.is_empty());
        (request.op.epilogue().is_empty() && !writes_copies).then_some(1.0)
    }

    fn fixed_overhead_bytes(&self, _target: &Target, _calls: &[Call]) -> usize {
        OVERHEAD_BYTES
    }
}

pub(crate) fn target() -> Target {
    Target::cpu(2, Vec::new())
}

/// Two cores of 2.6 GHz with 16 GiB.
pub(crate) fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 16 << 30))
}

pub(crate) fn graph(preset: &str) -> Graph {
    capture(&LlamaConfig::preset(preset).unwrap()).unwrap()
}

pub(crate) fn request(policy: PrecisionPolicy, seq: usize, global_batch: usize) -> PlanRequest {
    PlanRequest {
        seq,
        global_batch,
        policy,
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: None,
        recompute: None,
        saved_activations: Default::default(),
    }
}

pub(crate) fn plan(preset: &str, request: &PlanRequest) -> Result<Planned, PlanError> {
    autoplan(&graph(preset), &hardware(), request, &Kernels, &target())
}

/// The planner's answer when micro-batch and recomputation are given.
pub(crate) fn planned(
    preset: &str,
    policy: PrecisionPolicy,
    seq: usize,
    batch: usize,
    micro_batch: usize,
    rule: Recompute,
) -> Planned {
    let fixed = PlanRequest {
        micro_batch: Some(micro_batch),
        recompute: Some(rule),
        ..request(policy, seq, batch)
    };
    plan(preset, &fixed).unwrap()
}
