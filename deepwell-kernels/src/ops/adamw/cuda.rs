//! `adamw.cu` and `adamw_fp8.cu`: one thread computes a step's coefficients, and one launch updates
//! a bucket. Another launch updates parameters that are quantized in the same pass. A bucket of one
//! parameter has a kernel of its own.

use deepwell_ir::ops::{AdamW, AdamWCoefficients, Cast, CopyKind, MomentFormat};
use deepwell_ir::{DType, KernelRequest, Op};

use super::single;
use super::squares::{self, Squares};
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::tensor_list::{TensorList, f32_operand};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, takes_all};

/// Threads of a CTA, as in the source.
pub(super) const THREADS: u32 = 256;
/// Threads of the CTA that computes the coefficients; only one thread works.
const COEFFICIENTS_THREADS: u32 = 32;
/// Elements of a chunk with moments in FP32, as in the source.
pub(super) const CHUNK_ELEMENTS: usize = 1024;
/// Elements of a chunk with moments in eight bits, as in `adamw_fp8_chunk.cuh`.
const FP8_CHUNK_ELEMENTS: usize = 4096;

const SPEC: CudaKernelSpec =
    CudaKernelSpec::new("cuda_adamw", &["adamw"], prepare).reject(reject).workspace_bytes(|_, _| 0);

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    SPEC.name("cuda_adamw_coefficients")
        .ops(&["adamw_coefficients"])
        .prepare(prepare_coefficients)
        .reject(takes_all),
    SPEC,
];

/// Refuses copies that the kernels do not write.
fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::AdamW(op) = request.op else { return None };
    let mut has_copy = vec![false; op.weight_decay.len()];
    op.copies.iter().find_map(|copy| {
        let master = request.operands.get(AdamW::master(copy.parameter))?;
        if std::mem::replace(has_copy.get_mut(copy.parameter)?, true) {
            return Some("writes one copy of a weight, not several".to_string());
        }
        match &copy.kind {
            CopyKind::Cast(_) if master.dtype == DType::Bf16 => {
                Some("writes BF16 weights, and no other copies than quantized ones".to_string())
            }
            CopyKind::Cast(Cast { to: DType::Bf16 }) => None,
            CopyKind::Cast(Cast { to }) => Some(format!("writes copies in bf16, not {to}")),
            CopyKind::Quantize(quantize) => squares::reject(quantize, master),
        }
    })
}

/// Returns the addresses of gradient, master, first and second moment of a parameter, and its
/// element count.
pub(super) fn parameter_operands(
    call: &CallView<'_>,
    parameter: usize,
    moments: MomentFormat,
) -> Result<(Vec<u64>, usize), KernelError> {
    let gradient = AdamW::LEADING_OPERANDS + parameter * AdamW::OPERANDS_PER_PARAMETER;
    let (address, elements) = f32_operand(call, gradient)?;
    let (master, other) = match call.operand(gradient + 1) {
        master if master.dtype == DType::Bf16 => (master.pointer.0, master.elements()),
        _ => f32_operand(call, gradient + 1)?,
    };
    if other != elements {
        return Err(call.refuse(format!(
            "parameter {parameter}: expected {elements} elements as in its gradient, got {other}"
        )));
    }
    let mut addresses = vec![address, master];
    let (dtype, shape) = moments.stored(&[elements]);
    let stored = shape.iter().product::<usize>();
    for index in [gradient + 2, gradient + 3] {
        let moment = call.operand(index);
        if (moment.dtype, moment.elements()) != (dtype, stored) {
            return Err(call.refuse(format!(
                "parameter {parameter}: expected moments of {stored} {dtype}, got {} {}",
                moment.elements(),
                moment.dtype
            )));
        }
        addresses.push(moment.pointer.0);
    }
    Ok((addresses, elements))
}

/// The parameters of an update, by the kernel that updates them.
struct Tables {
    /// Tables `{gradient, master, first moment, second moment, copy, elements, first chunk, decay
    /// and index}`, for masters in FP32 and in BF16.
    lists: [TensorList; 2],
    /// Parameters that are quantized with the update, with the same masters.
    squares: [Squares; 2],
}

impl Tables {
    fn of(call: &CallView<'_>, device: &mut Device<'_>, op: &AdamW) -> Result<Tables, KernelError> {
        let mut copies: Vec<Option<(&CopyKind, usize)>> = vec![None; op.weight_decay.len()];
        for (copy, outputs) in op.copies_with_outputs() {
            copies[copy.parameter] = Some((&copy.kind, op.input_count() + outputs.start));
        }
        let chunk_elements = match op.moments {
            MomentFormat::Fp32 => CHUNK_ELEMENTS,
            MomentFormat::Fp8 => FP8_CHUNK_ELEMENTS,
        };
        let lists = [chunk_elements; 2].map(TensorList::new);
        let mut tables = Tables { lists, squares: Default::default() };
        for (parameter, (&decay, copy)) in op.weight_decay.iter().zip(copies).enumerate() {
            let is_bf16 = call.operand(AdamW::master(parameter)).dtype == DType::Bf16;
            if let Some((CopyKind::Quantize(quantize), first)) = copy {
                let squares = &mut tables.squares[usize::from(is_bf16)];
                squares.push(call, device, op, parameter, (quantize, first))?;
                continue;
            }
            let (mut addresses, elements) = parameter_operands(call, parameter, op.moments)?;
            addresses.push(copy.map_or(0, |(_, output)| call.operand(output).pointer.0));
            let index = (op.parameters.start + parameter) as u64;
            let last = [index << 32 | u64::from(decay.to_bits())];
            tables.lists[usize::from(is_bf16)].push(&addresses, elements, &last);
        }
        Ok(tables)
    }
}

/// The launch that updates the parameters of a table; none without parameters.
fn list_step(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    list: &TensorList,
    (file, kernel): (&'static str, &'static str),
    coefficients: Argument,
) -> Result<Option<Step>, KernelError> {
    if list.chunks() == 0 {
        return Ok(None);
    }
    let ctas = u32::try_from(list.chunks()).ok().filter(|&ctas| ctas <= i32::MAX as u32);
    let Some(ctas) = ctas else {
        return Err(call.refuse(format!(
            "expected at most {} chunks of parameters, got {}",
            i32::MAX,
            list.chunks()
        )));
    };
    let function = device.function(file, kernel, 0)?;
    let arguments = vec![
        Argument::Pointer(device.constant(list.bytes())?),
        Argument::U32(list.tensors() as u32),
        coefficients,
    ];
    Ok(Some(Device::launch(function, ctas, THREADS, 0, arguments)))
}

/// An operand of exactly `count` elements.
fn small_operand(call: &CallView<'_>, index: usize, count: usize) -> Result<Argument, KernelError> {
    let tensor = call.operand(index);
    match tensor.elements() {
        elements if elements == count => Ok(tensor.argument()),
        other => {
            Err(call.refuse(format!("expected {count} elements in operand {index}, got {other}")))
        }
    }
}

fn prepare_coefficients(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let Op::AdamWCoefficients(op) = &call.call.op else {
        return Err(call.refuse("expected the coefficients of AdamW"));
    };
    let function = device.function("adamw", "adamw_coefficients", 0)?;
    let (sums, sum_count) = match op.of_bucket {
        true => (call.operand(3).argument(), call.operand(3).elements()),
        false => (Argument::Pointer(DevicePtr(0)), 0),
    };
    let arguments = vec![
        small_operand(call, 0, 1)?,
        small_operand(call, 1, 2)?,
        small_operand(call, 2, 2)?,
        Argument::F32(op.beta1),
        Argument::F32(op.beta2),
        Argument::F32(op.eps),
        small_operand(call, 3 + usize::from(op.of_bucket), AdamWCoefficients::COUNT)?,
        sums,
        Argument::U32(sum_count as u32),
    ];
    Ok(vec![Device::launch(function, 1, COEFFICIENTS_THREADS, 0, arguments)])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::AdamW(op) = &call.call.op else {
        return Err(call.refuse("expected an AdamW update"));
    };
    let coefficients = || small_operand(call, 0, AdamWCoefficients::COUNT);
    if single::serves(op) && call.operand(AdamW::master(0)).dtype == DType::F32 {
        return single::steps(call, device, op, coefficients()?);
    }
    let Tables { lists, squares } = Tables::of(call, device, op)?;
    let kernels = match op.moments {
        MomentFormat::Fp32 => [("adamw", "adamw"), ("adamw_bf16", "adamw_bf16")],
        MomentFormat::Fp8 => [("adamw_fp8", "adamw_fp8"), ("adamw_bf16", "adamw_bf16_fp8")],
    };
    let mut steps = Vec::with_capacity(4);
    for (list, kernel) in lists.iter().zip(kernels) {
        steps.extend(list_step(call, device, list, kernel, coefficients()?)?);
    }
    let kernels = match op.moments {
        MomentFormat::Fp32 => ["adamw_quantize", "adamw_bf16_quantize"],
        MomentFormat::Fp8 => ["adamw_quantize_fp8", "adamw_bf16_quantize_fp8"],
    };
    for (squares, kernel) in squares.iter().zip(kernels) {
        steps.extend(squares.step(call, device, kernel, coefficients()?)?);
    }
    Ok(steps)
}
