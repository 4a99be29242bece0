//! Which CPU kernels there are: what each takes, needs of the machine, and its scratch.
//!
//! Plain data and pure functions: selection works for a processor that is not this one.

use std::sync::LazyLock;

use deepwell_ir::{
    DType, KernelCatalog, KernelChoice, KernelRequest, NoKernel, Op, Rejected, Selection, Target,
};

use half::bf16;

use super::calls::{Scratch, attention_shape, with_activation_workspace_bytes};
use super::gemm::{self, DataKind, Tier};
use crate::ops::{
    add::cpu as add, attention::cpu as attention, layer_norm::cpu as layer_norm,
    linear_cross_entropy::cpu as linear_cross_entropy, rms_norm::cpu as rms_norm,
};
use crate::targets::others_that_serve;

/// One kernel of the CPU backend.
#[derive(Clone, Debug)]
pub struct CpuKernelSpec {
    /// Unique name: `cpu_`, the op, and the tier if it has one.
    pub name: String,
    /// The op that it computes.
    pub op: &'static str,
    /// The matrix instructions that it runs on, for kernels that multiply matrices.
    pub tier: Option<Tier>,
    /// Scratch for a request, in bytes, on a number of threads.
    workspace_bytes: fn(&KernelRequest<'_>, Tier, usize) -> usize,
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
        let tiered = TIERED.iter().flat_map(|&(op, workspace_bytes)| {
            Tier::ALL.into_iter().rev().map(move |tier| CpuKernelSpec {
                name: format!("cpu_{op}_{}", tier_suffix(tier)),
                op,
                tier: Some(tier),
                workspace_bytes,
            })
        });
        let plain = PLAIN.iter().map(|&(op, workspace_bytes)| CpuKernelSpec {
            name: format!("cpu_{op}"),
            op,
            tier: None,
            workspace_bytes,
        });
        tiered.chain(plain).collect()
    });
    &KERNELS
}

type WorkspaceBytes = fn(&KernelRequest<'_>, Tier, usize) -> usize;

/// Ops that multiply matrices: one kernel per tier.
const TIERED: [(&str, WorkspaceBytes); 19] = [
    ("linear", matrix),
    ("linear_input_grad", matrix),
    ("linear_weight_grad", matrix),
    ("mx_gemm", matrix),
    ("linear_gelu", with_activation),
    ("linear_input_grad_gelu_backward", with_activation),
    ("mx_gemm_gelu", with_activation),
    ("mx_gemm_gelu_backward", with_activation),
    ("linear_quantize", with_quantize),
    ("linear_input_grad_quantize", with_quantize),
    ("mx_gemm_quantize", with_quantize),
    ("linear_gelu_quantize", with_quantize),
    ("linear_input_grad_gelu_backward_quantize", with_quantize),
    ("mx_gemm_gelu_quantize", with_quantize),
    ("mx_gemm_gelu_backward_quantize", with_quantize),
    ("attention", attention_forward),
    ("attention_backward", attention_backward),
    ("linear_cross_entropy", head),
    ("linear_cross_entropy_grad", head),
];

/// Ops with one kernel.
const PLAIN: [(&str, WorkspaceBytes); 37] = [
    ("embedding", none),
    ("embedding_backward", none),
    ("add_positions", none),
    ("add_positions_backward", none),
    ("bias_grad", bias_grad),
    ("rms_norm", none),
    ("add_rms_norm", none),
    ("rms_norm_backward", rms_norm_backward),
    ("head_rms_norm", none),
    ("head_rms_norm_backward", head_rms_norm_backward),
    ("layer_norm", none),
    ("add_layer_norm", none),
    ("layer_norm_backward", layer_norm_backward),
    ("rope", rope_tables),
    ("rope_backward", rope_tables),
    ("swiglu", none),
    ("swiglu_backward", none),
    ("gelu", none),
    ("gelu_backward", none),
    ("add", none),
    ("cast", none),
    ("quantize", none),
    ("dequantize", none),
    ("stochastic_round", none),
    ("grad_norm", none),
    ("adamw", none),
    ("rms_norm_quantize", with_quantize),
    ("add_rms_norm_quantize", with_quantize),
    ("rms_norm_backward_quantize", with_quantize),
    ("layer_norm_quantize", with_quantize),
    ("add_layer_norm_quantize", with_quantize),
    ("layer_norm_backward_quantize", with_quantize),
    ("rope_backward_quantize", with_quantize),
    ("swiglu_quantize", with_quantize),
    ("swiglu_backward_quantize", with_quantize),
    ("gelu_quantize", with_quantize),
    ("gelu_backward_quantize", with_quantize),
];

fn none(_: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    0
}

fn data_kind(dtype: DType) -> DataKind {
    match dtype {
        DType::Bf16 => DataKind::Bf16,
        DType::E4m3 => DataKind::Mx,
        _ => DataKind::F32,
    }
}

fn matrix(request: &KernelRequest<'_>, tier: Tier, _: usize) -> usize {
    let operands = request.operands;
    let second = if matches!(request.op, Op::MxGemm(_)) { 2 } else { 1 };
    let (a, b) = (&operands[0].shape, &operands[second].shape);
    let (m, n, k) = match request.op {
        Op::LinearInputGrad(_) => (a[0], b[1], a[1]),
        Op::LinearWeightGrad(_) => (a[1], b[1], a[0]),
        _ => (a[0], b[0], a[1]),
    };
    let kinds = (data_kind(operands[0].dtype), data_kind(operands[second].dtype));
    gemm::workspace_bytes(tier, m, n, k, kinds.0, kinds.1)
}

fn rms_norm_backward(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let x = &request.operands[1].shape;
    rms_norm::rms_norm_backward_workspace_bytes(x[0], x[1])
}

fn head_rms_norm_backward(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let (head_dim, rows) = (request.operands[2].shape[0], request.operands[3].shape[0]);
    rms_norm::rms_norm_backward_workspace_bytes(rows, head_dim)
}

fn layer_norm_backward(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let x = &request.operands[1].shape;
    layer_norm::layer_norm_backward_workspace_bytes(x[0], x[1])
}

/// What the product wants, and room for it where it is not stored.
fn with_activation(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let Op::WithActivation(op) = request.op else { return 0 };
    with_activation_workspace_bytes(request, op, |product| matrix(product, tier, threads))
}

/// What the producer wants, and room for those of its outputs that are not stored.
fn with_quantize(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let Op::WithQuantize(op) = request.op else { return 0 };
    let inputs = &request.operands[..request.input_count];
    // Operands that the op does not take are refused when the call is prepared.
    let Ok(scratch) = Scratch::new(op, inputs) else { return 0 };
    let name = op.producer.name();
    let Some(spec) = cpu_kernels().iter().find(|spec| spec.op == name) else { return 0 };
    let operands = [inputs, &scratch.outputs].concat();
    let producer =
        KernelRequest { op: &op.producer, operands: &operands, input_count: inputs.len() };
    scratch.bytes + (spec.workspace_bytes)(&producer, tier, threads)
}

fn bias_grad(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let dy = &request.operands[0].shape;
    add::bias_add_backward_workspace_bytes(dy[0], dy[1])
}

/// Cosines and sines of every position: positions never exceed the tokens of a micro-batch.
fn rope_tables(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let rope = match request.op {
        Op::Rope(rope) => rope,
        Op::RopeBackward(backward) => &backward.forward,
        _ => return 0,
    };
    2 * request.operands[0].shape[0] * rope.inverse_frequencies.len() * size_of::<f32>()
}

fn attention_forward(request: &KernelRequest<'_>, _: Tier, threads: usize) -> usize {
    let Op::Attention(op) = request.op else { return 0 };
    let lse = &request.operands[4].shape;
    let shape = attention_shape(&op.heads, lse[0], lse[2]);
    match request.operands[0].dtype {
        DType::Bf16 => attention::forward_workspace_bytes::<bf16>(&shape, threads),
        _ => attention::forward_workspace_bytes::<f32>(&shape, threads),
    }
}

fn attention_backward(request: &KernelRequest<'_>, _: Tier, threads: usize) -> usize {
    let Op::AttentionBackward(op) = request.op else { return 0 };
    let lse = &request.operands[5].shape;
    let shape = attention_shape(&op.heads, lse[0], lse[2]);
    match request.operands[0].dtype {
        DType::Bf16 => attention::backward_workspace_bytes::<bf16>(&shape, threads),
        _ => attention::backward_workspace_bytes::<f32>(&shape, threads),
    }
}

fn head(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let (x, w) = (&request.operands[0].shape, &request.operands[1].shape);
    let (tokens, hidden, vocab) = (x[0], x[1], w[0]);
    let gradients = matches!(request.op, Op::LinearCrossEntropyGrad(_));
    match request.operands[0].dtype {
        DType::Bf16 => {
            linear_cross_entropy::workspace_bytes::<bf16>(tokens, hidden, vocab, gradients)
        }
        _ => linear_cross_entropy::workspace_bytes::<f32>(tokens, hidden, vocab, gradients),
    }
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
