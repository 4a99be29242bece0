//! What products on tcgen05 share that compute more than the product (`epilogue/
//! fused_tensor_tile.cuh`): a function of its elements, and the MXFP8 copies of what comes last.

use deepwell_ir::ops::{Axis, QuantizedOutput, WithActivation};
use deepwell_ir::{DType, KernelRequest, Op, OperandType};
use deepwell_precision::{BlockShape, Granularity};

use super::tcgen05::ProductSizes;
use super::tcgen05_cost::ResultCost;
use super::{fused, mx};
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr};
use crate::cuda::prepare::{CallView, Device};

/// Elements of a row in 16 bytes, and of a group with one scale: rows of results are whole ones.
const PIECE: usize = 8;
const BLOCK: usize = 32;

/// Ops that BF16 products are the beginning of.
pub(crate) const BF16_OPS: &[&str] = &[
    "linear_gelu",
    "linear_input_grad_gelu_backward",
    "linear_quantize",
    "linear_input_grad_quantize",
    "linear_gelu_quantize",
    "linear_input_grad_gelu_backward_quantize",
];
/// Ops that MXFP8 products are the beginning of.
pub(crate) const MX_OPS: &[&str] = &[
    "mx_gemm_gelu",
    "mx_gemm_gelu_backward",
    "mx_gemm_quantize",
    "mx_gemm_gelu_quantize",
    "mx_gemm_gelu_backward_quantize",
];

/// A fused op taken apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'a> {
    /// The product.
    pub(crate) product: &'a Op,
    /// The product's own inputs; the one behind them, if any, is what a gradient reads.
    product_inputs: usize,
    activation: Option<&'a Op>,
    /// Which outputs of the call the product and the activation are, where they are kept.
    product_at: Option<usize>,
    activated_at: Option<usize>,
    /// The quantization of the last of both, and the first of its outputs.
    copies: Option<(&'a QuantizedOutput, usize)>,
}

impl<'a> Parts<'a> {
    /// Of an op with `inputs` operands; none of another op.
    pub(crate) fn of(op: &'a Op, inputs: usize) -> Option<Parts<'a>> {
        let plain = |product| Parts {
            product,
            product_inputs: inputs,
            activation: None,
            product_at: None,
            activated_at: None,
            copies: None,
        };
        let activated = |op: &'a WithActivation| Parts {
            product_inputs: op.product_input_count(inputs),
            activation: Some(&op.activation),
            product_at: op.keep.then_some(0),
            activated_at: Some(op.output_count() - 1),
            ..plain(&op.product)
        };
        match op {
            Op::WithActivation(op) => Some(activated(op)),
            Op::WithQuantize(op) => {
                let [entry] = op.quantized.as_slice() else { return None };
                let copies = Some((entry, op.positions_of_quantized(0).start));
                Some(match op.producer.as_ref() {
                    Op::WithActivation(inner) => {
                        let parts = activated(inner);
                        let of = |output: Option<usize>| op.position_of_output(output?);
                        let product_at = of(parts.product_at);
                        Parts { product_at, activated_at: of(parts.activated_at), copies, ..parts }
                    }
                    product => {
                        let product_at = op.position_of_output(0);
                        Parts { product_at, copies, ..plain(product) }
                    }
                })
            }
            _ => None,
        }
    }

    /// How the kernel names the function of the elements.
    fn activation_code(&self) -> Option<u32> {
        Some(match self.activation {
            None => 0,
            Some(Op::Gelu(op)) => 1 + u32::from(op.tanh),
            Some(Op::GeluBackward(op)) => 3 + u32::from(op.tanh),
            Some(_) => return None,
        })
    }

    /// What writing the results takes.
    pub(crate) fn cost(&self) -> ResultCost {
        let activation = match self.activation {
            Some(Op::Gelu(op)) => Some((false, op.tanh)),
            Some(Op::GeluBackward(op)) => Some((true, op.tanh)),
            _ => None,
        };
        let stored = [self.product_at, self.activated_at].into_iter().flatten().count();
        let copies = self.copies.map_or(0, |(entry, _)| match entry.quantize.axis {
            Axis::Both => 2,
            Axis::Row | Axis::Column => 1,
        });
        ResultCost::fused(activation, stored as u64, copies)
    }
}

/// The product of a fused request by itself, with a BF16 result.
fn with_product<R>(
    request: &KernelRequest<'_>,
    parts: &Parts<'_>,
    shape: Vec<usize>,
    use_it: impl FnOnce(&KernelRequest<'_>) -> R,
) -> R {
    let count = parts.product_inputs.min(request.input_count);
    let mut operands = request.operands[..count].to_vec();
    operands.push(OperandType { dtype: DType::Bf16, shape });
    use_it(&KernelRequest { op: parts.product, operands: &operands, input_count: count })
}

/// Why a request cannot be served, given what the product's kernel says of the product alone and
/// its sizes.
pub(crate) fn reject(
    request: &KernelRequest<'_>,
    reject_product: impl FnOnce(&KernelRequest<'_>) -> Option<String>,
    sizes: impl FnOnce(&KernelRequest<'_>) -> ProductSizes,
) -> Option<String> {
    if let Op::WithQuantize(op) = request.op
        && let Some(reason) = fused::reject(op)
    {
        return Some(reason);
    }
    let Some(parts) = Parts::of(request.op, request.input_count) else {
        return Some(format!("takes a product and what follows it, not `{}`", request.op.name()));
    };
    if parts.activation_code().is_none() {
        return Some(format!("has gelu and its backward, not `{}`", request.op.name()));
    }
    let sizes = with_product(request, &parts, Vec::new(), sizes);
    let shape = vec![sizes.rows, sizes.columns];
    if let Some(reason) = with_product(request, &parts, shape.clone(), reject_product) {
        return Some(reason);
    }
    let of_outputs = [parts.product_at, parts.activated_at].into_iter().flatten();
    let floats = (parts.product_inputs..request.input_count)
        .chain(of_outputs.map(|position| request.input_count + position));
    for index in floats {
        let dtype = request.operands[index].dtype;
        if dtype != DType::Bf16 {
            return Some(format!("takes and gives bf16, not {dtype}"));
        }
    }
    let columns = sizes.columns;
    let Some((entry, _)) = parts.copies else {
        let odd = !columns.is_multiple_of(PIECE);
        return odd.then(|| format!("gives rows of multiples of {PIECE}, not {columns}"));
    };
    if !columns.is_multiple_of(BLOCK) {
        return Some(format!("quantizes rows of multiples of {BLOCK}, not {columns}"));
    }
    let spec = entry.quantize.spec;
    if spec.block == BlockShape::Square {
        return Some("quantizes groups of a row or a column, not squares".to_string());
    }
    if spec.granularity != Granularity::G32 {
        let elements = spec.granularity.elements();
        return Some(format!("quantizes groups of {BLOCK}, not of {elements}"));
    }
    mx::reject(&entry.quantize, &shape)
}

/// What the kernels take behind their operands, as `FUSED_ARGUMENTS` has it.
pub(crate) fn arguments(
    call: &CallView<'_>,
    parts: &Parts<'_>,
    device: &mut Device<'_>,
    bias: DevicePtr,
    sizes: ProductSizes,
) -> Result<Vec<Argument>, KernelError> {
    let none = Argument::Pointer(DevicePtr(0));
    let Some(activation) = parts.activation_code() else {
        return Err(call.refuse("expected gelu or its backward behind the product"));
    };
    let output = |at: Option<usize>| at.map_or(none, |position| call.output(position).argument());
    let forward = match parts.product_inputs < call.call.input_count {
        true => call.input(parts.product_inputs).argument(),
        false => none,
    };
    let mut arguments = vec![
        Argument::Pointer(bias),
        output(parts.product_at),
        forward,
        output(parts.activated_at),
    ];
    let extents = [sizes.rows, sizes.columns, sizes.depth].map(|size| Argument::I32(size as i32));
    let (copies, flags, counts) = match parts.copies {
        Some((entry, first)) => {
            let mx::Copies { places, statistics } = mx::copies(call, entry.quantize.axis, first);
            let counts = [mx::totals(device, 1)?, statistics];
            (places, mx::flags(&entry.quantize.spec), counts)
        }
        None => ([none; 4], 0, [none; 2]),
    };
    arguments.extend(copies);
    arguments.extend(extents);
    arguments.extend([Argument::U32(activation), Argument::U32(flags)]);
    arguments.extend(counts);
    Ok(arguments)
}
