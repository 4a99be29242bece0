//! `grad_norm.cu`: the norm of all gradients in one launch.

use deepwell_ir::{DType, KernelRequest, Target};

use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::launch::tensor_list::{TensorList, f32_operand};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements of a chunk, as in the source.
const CHUNK_ELEMENTS: usize = 8192;
/// CTAs at most; the number is part of the order of the sum, and so the same for all devices.
const CTAS_MAX: usize = 1024;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_grad_norm",
    ops: &["grad_norm"],
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject,
    predict: roofline,
    workspace_bytes,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let gradients = &request.operands[..request.input_count];
    let wrong = gradients.iter().find(|gradient| gradient.dtype != DType::F32)?;
    Some(format!("takes f32 gradients, not {}", wrong.dtype))
}

/// A sum for each CTA.
fn workspace_bytes(_: &KernelRequest<'_>, _: &Target) -> usize {
    CTAS_MAX * size_of::<f64>()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let mut list = TensorList::new(CHUNK_ELEMENTS);
    for index in 0..call.call.input_count {
        let (address, elements) = f32_operand(call, index)?;
        list.push(&[address], elements, &[]);
    }
    let function = device.function("grad_norm", "grad_norm", 0)?;
    let arguments = vec![
        Argument::Pointer(device.constant(list.bytes())?),
        Argument::U32(list.tensors() as u32),
        Argument::U64(list.chunks() as u64),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.arrival_counters(1)?),
        call.output(0).argument(),
    ];
    let ctas = list.chunks().clamp(1, CTAS_MAX) as u32;
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
