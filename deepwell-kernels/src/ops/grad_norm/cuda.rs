//! `grad_norm.cu`: the norm of all gradients in one launch. With sharded gradients, one launch per
//! bucket with a slice on this rank, and one launch for the norm of all ranks' sums.

use std::ops::Range;

use deepwell_ir::{DType, KernelRequest, Target};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::tensor_list::{TensorList, f32_operand};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, no_workspace, takes_all};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements of a chunk, as in the source.
const CHUNK_ELEMENTS: usize = 8192;
/// Largest number of CTAs. The number determines the order of summation, and so is the same for all
/// devices.
const CTAS_MAX: usize = 1024;

const GRAD_NORM: CudaKernelSpec = CudaKernelSpec::new("cuda_grad_norm", &["grad_norm"], prepare)
    .reject(reject)
    .workspace_bytes(workspace_bytes);

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    GRAD_NORM,
    GRAD_NORM.name("cuda_sums_of_squares").ops(&["sums_of_squares"]).prepare(prepare_sums),
    GRAD_NORM
        .name("cuda_norm_of_sums")
        .ops(&["norm_of_sums"])
        .prepare(prepare_norm_of_sums)
        .reject(takes_all)
        .workspace_bytes(no_workspace),
];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let gradients = &request.operands[..request.input_count];
    let wrong = gradients.iter().find(|gradient| gradient.dtype != DType::F32)?;
    Some(format!("takes f32 gradients, not {}", wrong.dtype))
}

/// One sum per CTA.
fn workspace_bytes(_: &KernelRequest<'_>, _: &Target) -> usize {
    CTAS_MAX * size_of::<f64>()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let gradients = 0..call.call.input_count;
    Ok(vec![sum(call, device, "grad_norm", gradients, call.output(0).pointer)?])
}

/// Sums one tensor after the other, in the same workspace.
fn prepare_sums(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let sums = call.output(0).pointer;
    let of = |index: usize| sums.offset(index * size_of::<f64>());
    let tensors = 0..call.call.input_count;
    tensors.map(|at| sum(call, device, "sum_of_squares", at..at + 1, of(at))).collect()
}

/// Launches a kernel that sums the squares of some inputs and writes a result of the sum.
fn sum(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    kernel: &str,
    inputs: Range<usize>,
    result: DevicePtr,
) -> Result<Step, KernelError> {
    let mut list = TensorList::new(CHUNK_ELEMENTS);
    for index in inputs {
        let (address, elements) = f32_operand(call, index)?;
        list.push(&[address], elements, &[]);
    }
    let function = device.function("grad_norm", kernel, 0)?;
    let arguments = vec![
        Argument::Pointer(device.constant(list.bytes())?),
        Argument::U32(list.tensors() as u32),
        Argument::U64(list.chunks() as u64),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.arrival_counters(1)?),
        Argument::Pointer(result),
    ];
    let ctas = list.chunks().clamp(1, CTAS_MAX) as u32;
    Ok(Device::launch(function, ctas, THREADS, 0, arguments))
}

fn prepare_norm_of_sums(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let lists = call.call.input_count;
    let table: Vec<u64> = (0..lists)
        .flat_map(|index| {
            let sums = call.input(index);
            [sums.pointer.0, sums.elements() as u64]
        })
        .collect();
    let arguments = vec![
        Argument::Pointer(device.constant(bytemuck::cast_slice(&table))?),
        Argument::U32(lists as u32),
        call.output(0).argument(),
    ];
    let function = device.function("grad_norm", "norm_of_sums", 0)?;
    Ok(vec![Device::launch(function, 1, 32, 0, arguments)])
}
