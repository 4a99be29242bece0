//! Specifications of the CPU kernels: accepted requests, required instructions, scratch.
//!
//! Plain data and pure functions, so that selection also works for another machine's processor.

use std::sync::LazyLock;

use deepwell_ir::ops::{AdamW, Axis};
use deepwell_ir::{
    Call, DType, KernelCatalog, KernelRequest, NoKernel, Op, OperandType, Selection, Target,
};

use deepwell_precision::hadamard::POINTS;
use deepwell_precision::{QuantFormat, Role};

use super::composed::{COMPOSED, SplitRequest, fused};
use crate::ops::OPS;
use crate::registry::selection::{self, Candidate, Offer};
use crate::registry::targets::others_that_serve;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::kernel::{CpuKernelSpec, CpuKernels, tier_feature};
use crate::runtime::predict::Rates;

/// Describes this machine's processor with `threads` workers as a target.
pub fn cpu_target(threads: usize) -> Target {
    let features = Tier::ALL
        .into_iter()
        .filter(|tier| tier.is_available())
        .filter_map(tier_feature)
        .map(str::to_string)
        .collect();
    Target::cpu(threads, features)
}

/// Returns every kernel of the CPU backend, preferred kernels first within an op.
pub fn cpu_kernels() -> &'static [CpuKernelSpec] {
    &kernels().specs
}

/// The kernels, for preparing calls.
pub(crate) fn kernels() -> &'static CpuKernels {
    static KERNELS: LazyLock<CpuKernels> = LazyLock::new(|| {
        let all = OPS.iter().flat_map(|op| op.cpu).chain(COMPOSED);
        CpuKernels { specs: all.flat_map(|kernel| kernel.specs()).collect(), fused }
    });
    &KERNELS
}

/// Scratch bytes of the kernel of a request's op.
pub(super) fn workspace_of(request: &KernelRequest<'_>, tier: Tier, threads: usize) -> usize {
    let spec = kernels_of(request.op).next();
    spec.map_or(0, |spec| (spec.workspace_bytes)(request, tier, threads))
}

/// The CPU kernels, as a catalog.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuCatalog;

/// Bytes of one worker thread of the pool, including its stack, once the worker has run.
const BYTES_PER_WORKER: usize = 64 * 1024;

/// Additional bytes of a worker in a program that quantizes: its current tile and, for each split
/// on the way to the tile, the lists of rows. In four small models two workers held from 0.4 to 1.1
/// MB more in MXFP8 than in BF16.
const BYTES_PER_QUANTIZING_WORKER: usize = 192 * 1024;

/// Bytes of the process per call: operands, prepared form, and a share of the evaluation's program.
const BYTES_PER_CALL: usize = 3 * 1024;

/// Additional bytes per call of a program that quantizes: the program with its GEMMs in BF16, to
/// which guards fall back. Three small MXFP8 runs held from 8 to 13 kB per call beyond the arena
/// and the constants above, where earlier work had left no free memory behind.
const BYTES_PER_FALLBACK_CALL: usize = 8 * 1024;

impl KernelCatalog for CpuCatalog {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let candidates = candidates(request, target);
        selection::fastest(candidates).map_err(|rejected| NoKernel {
            op: request.op.name().to_string(),
            arch: target.arch.clone(),
            rejected,
            others: others_that_serve(request, target),
        })
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        selection::least_s(&candidates(request, target))
    }

    fn serves(&self, format: &QuantFormat, _: Role, _: &Target) -> Result<(), String> {
        unserved(format)
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        let quantizes = calls.iter().any(|call| matches!(call.op, Op::Quantize(_)));
        let (of_worker, of_call) = match quantizes {
            true => (BYTES_PER_QUANTIZING_WORKER, BYTES_PER_FALLBACK_CALL),
            false => (0, 0),
        };
        target.workers * (BYTES_PER_WORKER + of_worker) + calls.len() * (BYTES_PER_CALL + of_call)
    }
}

/// Returns the kernels of an op, each with its offer or the reason for refusing. The kernels of a
/// fused op are those of its core: epilogue steps run on their own kernels, so fusing saves no time
/// here. Neither does writing copies of weights during an update.
fn candidates(request: &KernelRequest<'_>, target: &Target) -> Vec<Candidate> {
    let mut found = Vec::new();
    let Op::Fused(op) = request.op else {
        let copies_s = match request.op {
            Op::AdamW(op) => copies_s(op, request, target),
            _ => Ok(None),
        };
        for spec in kernels_of(request.op) {
            let offer = copies_s.clone().and_then(|copies_s| {
                let whole = offer(spec, request, target)?;
                let predicted_s = copies_s.unwrap_or(whole.predicted_s);
                Ok(Offer { predicted_s, ..whole })
            });
            found.push(Candidate { kernel: spec.name.clone(), tiles: Vec::new(), offer });
        }
        return found;
    };
    let (inputs, outputs) = request.operands.split_at(request.input_count);
    let parts = SplitRequest::new(op, inputs, outputs).map_err(|error| error.to_string());
    for spec in kernels_of(&op.core) {
        let offer = parts.clone().and_then(|parts| {
            let core = offer(spec, &parts.core.request(), target)?;
            let mut predicted_s = core.predicted_s;
            for step in &parts.steps {
                predicted_s += CpuCatalog
                    .predicted_s(&step.request(), target)
                    .ok_or_else(|| format!("there is no kernel of `{}`", step.op.name()))?;
            }
            let workspace_bytes = parts.bytes + core.workspace_bytes;
            Ok(Offer { predicted_s, workspace_bytes, ..core })
        });
        found.push(Candidate { kernel: spec.name.clone(), tiles: Vec::new(), offer });
    }
    found
}

/// Time of an update plus that of the copies that the update writes; `None` without copies.
fn copies_s(
    op: &AdamW,
    request: &KernelRequest<'_>,
    target: &Target,
) -> Result<Option<f64>, String> {
    if op.copies.is_empty() {
        return Ok(None);
    }
    let (inputs, outputs) = request.operands.split_at(op.input_count());
    let plain = Op::from(AdamW { copies: Vec::new(), ..op.clone() });
    let mut parts = vec![(plain, inputs.to_vec(), inputs.len())];
    for (copy, places) in op.copies_with_outputs() {
        let master = inputs.get(AdamW::master(copy.parameter));
        let (Some(master), Some(outputs)) = (master, outputs.get(places)) else {
            return Err("expected the tensors of each copy".to_string());
        };
        let operands = [std::slice::from_ref(master), outputs].concat();
        parts.push((copy.kind.to_op(), operands, 1));
    }
    let of_part = |(op, operands, input_count): &(Op, Vec<OperandType>, usize)| {
        let request = KernelRequest { op, operands, input_count: *input_count };
        let least_s = CpuCatalog.predicted_s(&request, target);
        least_s.ok_or_else(|| format!("there is no kernel of `{}`", op.name()))
    };
    parts.iter().map(of_part).sum::<Result<f64, String>>().map(Some)
}

fn kernels_of(op: &Op) -> impl Iterator<Item = &'static CpuKernelSpec> {
    let name = op.rule().name();
    cpu_kernels().iter().filter(move |spec| spec.op == name)
}

fn offer(
    spec: &CpuKernelSpec,
    request: &KernelRequest<'_>,
    target: &Target,
) -> Result<Offer, String> {
    if let Some(reason) = rejection(spec, request, target) {
        return Err(reason);
    }
    let tier = spec.tier.unwrap_or(Tier::F32);
    let workspace_bytes = (spec.workspace_bytes)(request, tier, target.workers);
    let rates = Rates::of_cpu(target, tier);
    // Scratch holds operands in the layout of the instructions, written once and read once.
    let predicted_s = rates.roofline_s(request, 1.0) + rates.bytes_s(2.0 * workspace_bytes as f64);
    Ok(Offer { predicted_s, tile: None, workspace_bytes })
}

/// Whether a kernel takes the request on every processor.
pub(crate) fn serves(request: &KernelRequest<'_>) -> bool {
    let plain = Target::cpu(1, Vec::new());
    candidates(request, &plain).iter().any(|candidate| candidate.offer.is_ok())
}

/// Returns an error if no kernel takes operands of this format.
fn unserved(format: &QuantFormat) -> Result<(), String> {
    if QuantFormat::FAMILIES.iter().any(|family| format.is_of_family(family)) {
        return Ok(());
    }
    let known: Vec<&str> = QuantFormat::FAMILIES.iter().map(QuantFormat::name).collect();
    Err(format!("CPU kernels take {}, not {}", known.join(" and "), format.name()))
}

/// Why a transform of this quantization does not divide the contraction into whole groups.
fn partial_groups(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Quantize(op) = request.op else { return None };
    op.format.hadamard?;
    let &[rows, columns] = request.operands[0].shape.as_slice() else { return None };
    let along = |axis: &Axis| if *axis == Axis::Column { rows } else { columns };
    let k = op.axes().iter().map(along).find(|k| !k.is_multiple_of(POINTS))?;
    Some(format!(
        "a Hadamard transform takes groups of {POINTS} tokens, got {k}: choose a micro-batch and a \
         sequence length whose product is a multiple of {POINTS}, or `hadamard = false` for both \
         operands of wgrad"
    ))
}

fn rejection(spec: &CpuKernelSpec, request: &KernelRequest<'_>, target: &Target) -> Option<String> {
    if target.arch != "cpu" {
        return Some(format!("runs on a cpu, not on {}", target.arch));
    }
    if let Some(why) = request.op.formats().iter().find_map(|format| unserved(format).err()) {
        return Some(why);
    }
    if let Some(why) = partial_groups(request) {
        return Some(why);
    }
    if let Op::Collective(op) = request.op {
        let (inputs, outputs) = request.operands.split_at(request.input_count);
        return op.check(inputs, outputs).err().map(|error| error.to_string());
    }
    let tier = spec.tier?;
    match tier_feature(tier) {
        Some(feature) if !target.features.iter().any(|available| available == feature) => {
            Some(format!("needs the processor's `{feature}`"))
        }
        Some(_) if request.operands[0].dtype == DType::F32 => {
            Some("takes bf16 operands, not f32".to_string())
        }
        _ => None,
    }
}
