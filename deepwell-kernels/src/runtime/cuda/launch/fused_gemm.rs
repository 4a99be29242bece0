//! Shared by launchers of GEMMs on tcgen05 with an epilogue (`epilogue/fused_tensor_tile.cuh`): an
//! elementwise function of the result, and quantization of the last result.

use deepwell_ir::ops::{Activation, Axis, Epilogue, QuantizeStep};
use deepwell_ir::{DType, GemmKind, KernelRequest, Op, OperandType};

use super::mx;
use super::tcgen05::GemmSizes;
use super::tcgen05_cost::ResultCost;
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device};
use crate::runtime::epilogue::EpilogueSet;

/// Elements of a 16-byte vector, and of a block with a single scale: rows of results consist of
/// whole vectors or blocks.
const VECTOR: usize = 8;
const BLOCK: usize = 32;

/// BF16 GEMMs for which there are kernels with an epilogue.
pub(crate) const BF16_OPS: &[&str] = &["linear", "linear_dgrad"];
/// MXFP8 GEMMs for which there are kernels with an epilogue.
pub(crate) const MX_OPS: &[&str] = &["scaled_gemm"];

/// GELU after fprop, its gradient after dgrad, and quantization of the last result. The result of
/// wgrad is not an activation, so wgrad only quantizes.
pub(crate) fn epilogue(core: &Op) -> EpilogueSet {
    let kind = match core {
        Op::Linear(_) => GemmKind::Fprop,
        Op::LinearDgrad(_) => GemmKind::Dgrad,
        Op::ScaledGemm(op) => op.kind,
        _ => GemmKind::Wgrad,
    };
    let quantizing = EpilogueSet::quantizing(&[0]);
    match kind {
        GemmKind::Fprop => EpilogueSet { activations: &["gelu"], ..quantizing },
        GemmKind::Dgrad => EpilogueSet { activations: &["gelu_backward"], ..quantizing },
        GemmKind::Wgrad => quantizing,
    }
}

/// The parts of a fused op.
#[derive(Clone, Debug)]
pub(crate) struct FusedGemm<'a> {
    /// The GEMM.
    pub(crate) core: &'a Op,
    /// Number of the GEMM's own inputs; a further input, if any, is read by the activation's
    /// gradient.
    core_inputs: usize,
    activation: Option<&'a Activation>,
    /// Output indices of the stored results of the GEMM and of the activation.
    core_at: Option<usize>,
    activated_at: Option<usize>,
    /// The quantization of the last result.
    quantize: Option<QuantizeStep<'a>>,
}

impl<'a> FusedGemm<'a> {
    /// The parts of a fused op with `inputs` inputs; `None` for other ops.
    pub(crate) fn of(op: &'a Op, inputs: usize) -> Option<FusedGemm<'a>> {
        let Op::Fused(op) = op else { return None };
        let activation = match op.epilogue.first() {
            Some(Epilogue::Activation { function, .. }) => Some(function),
            _ => None,
        };
        Some(FusedGemm {
            core: &op.core,
            core_inputs: op.core_input_count(inputs),
            activation,
            core_at: op.position(0),
            activated_at: activation.and_then(|_| op.position(1)),
            quantize: op.quantizations().next(),
        })
    }

    /// The kernel's code for the elementwise function.
    fn activation_code(&self) -> Option<u32> {
        Some(match self.activation {
            None => 0,
            Some(Activation::Gelu(op)) => 1 + u32::from(op.tanh),
            Some(Activation::GeluBackward(op)) => 3 + u32::from(op.tanh),
            Some(Activation::SwiGlu(_)) => return None,
        })
    }

    /// The cost of writing the results.
    pub(crate) fn cost(&self) -> ResultCost {
        let activation = match self.activation {
            Some(Activation::Gelu(op)) => Some((false, op.tanh)),
            Some(Activation::GeluBackward(op)) => Some((true, op.tanh)),
            _ => None,
        };
        let stored = [self.core_at, self.activated_at].into_iter().flatten().count();
        let operands = self.quantize.as_ref().map_or(0, |step| match step.quantize.axis {
            Axis::Both => 2,
            Axis::Row | Axis::Column => 1,
        });
        ResultCost::fused(activation, stored as u64, operands)
    }
}

/// Calls `use_it` with the request of the GEMM alone, with a BF16 result.
fn with_core<R>(
    request: &KernelRequest<'_>,
    fused: &FusedGemm<'_>,
    shape: Vec<usize>,
    use_it: impl FnOnce(&KernelRequest<'_>) -> R,
) -> R {
    let count = fused.core_inputs.min(request.input_count);
    let mut operands = request.operands[..count].to_vec();
    operands.push(OperandType { dtype: DType::Bf16, shape });
    use_it(&KernelRequest { op: fused.core, operands: &operands, input_count: count })
}

/// Why a request that [`epilogue`] accepts cannot be served, given the checks and the sizes of the
/// kernel of the plain GEMM.
pub(crate) fn reject(
    request: &KernelRequest<'_>,
    reject_core: impl FnOnce(&KernelRequest<'_>) -> Option<String>,
    sizes: impl FnOnce(&KernelRequest<'_>) -> GemmSizes,
) -> Option<String> {
    let Some(fused) = FusedGemm::of(request.op, request.input_count) else {
        return Some(format!("takes a GEMM and what follows it, not `{}`", request.op.name()));
    };
    let sizes = with_core(request, &fused, Vec::new(), sizes);
    let shape = vec![sizes.m, sizes.n];
    if let Some(reason) = with_core(request, &fused, shape.clone(), reject_core) {
        return Some(reason);
    }
    let of_outputs = [fused.core_at, fused.activated_at].into_iter().flatten();
    let floats = (fused.core_inputs..request.input_count)
        .chain(of_outputs.map(|position| request.input_count + position));
    for index in floats {
        let dtype = request.operands[index].dtype;
        if dtype != DType::Bf16 {
            return Some(format!("takes and gives bf16, not {dtype}"));
        }
    }
    let columns = sizes.n;
    let Some(step) = &fused.quantize else {
        let odd = !columns.is_multiple_of(VECTOR);
        return odd.then(|| format!("gives rows of multiples of {VECTOR}, not {columns}"));
    };
    if !columns.is_multiple_of(BLOCK) {
        return Some(format!("quantizes rows of multiples of {BLOCK}, not {columns}"));
    }
    let spec = step.quantize.format;
    if spec.block.is_square() {
        return Some("quantizes groups of a row or a column, not squares".to_string());
    }
    if spec.block.k != 32 {
        let elements = usize::from(spec.block.k);
        return Some(format!("quantizes groups of {BLOCK}, not of {elements}"));
    }
    mx::reject(step.quantize, &shape)
}

/// Arguments after the operands, in the order of `FUSED_ARGUMENTS`.
pub(crate) fn arguments(
    call: &CallView<'_>,
    fused: &FusedGemm<'_>,
    device: &mut Device<'_>,
    bias: DevicePtr,
    sizes: GemmSizes,
) -> Result<Vec<Argument>, KernelError> {
    let none = Argument::Pointer(DevicePtr(0));
    let Some(activation) = fused.activation_code() else {
        return Err(call.refuse("expected gelu or its backward behind the GEMM"));
    };
    let output = |at: Option<usize>| at.map_or(none, |position| call.output(position).argument());
    let forward = match fused.core_inputs < call.call.input_count {
        true => call.input(fused.core_inputs).argument(),
        false => none,
    };
    let mut arguments =
        vec![Argument::Pointer(bias), output(fused.core_at), forward, output(fused.activated_at)];
    let extents = [sizes.m, sizes.n, sizes.k].map(|size| Argument::I32(size as i32));
    let (targets, flags, counts) = match &fused.quantize {
        Some(step) => {
            let mx::Outputs { places, statistics } =
                mx::outputs(call, step.quantize.axis, step.positions.start);
            let counts = [mx::totals(device, 1)?, statistics];
            (places, mx::flags(&step.quantize.format), counts)
        }
        None => ([none; 4], 0, [none; 2]),
    };
    arguments.extend(targets);
    arguments.extend(extents);
    arguments.extend([Argument::U32(activation), Argument::U32(flags)]);
    arguments.extend(counts);
    Ok(arguments)
}
