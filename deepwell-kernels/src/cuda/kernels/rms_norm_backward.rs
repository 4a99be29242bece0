//! `rms_norm_backward.cu`: gradients of the root-mean-square normalization.

use deepwell_ir::{KernelRequest, Op, Target};

use super::rows::{BlockColumns, threads_per_row, too_large};
use super::support::all_bf16;
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec};

/// Threads of a block, as in the source.
const THREADS: u32 = 512;
/// Threads of a block that takes rows element by element, as in the source.
const SCALAR_THREADS: u32 = 256;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_rms_norm_backward",
    ops: &["rms_norm_backward"],
    architectures: &Architecture::ALL,
    library: None,
    reject,
    workspace_bytes,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let residual = matches!(request.op, Op::RmsNormBackward(op) if op.residual);
    let operands: &[usize] = if residual { &[0, 1, 2, 4, 5] } else { &[0, 1, 2, 4] };
    all_bf16(request, operands).or_else(|| too_large(request, 0))
}

/// How rows are divided among blocks.
fn division(shape: &[usize], workers: usize) -> BlockColumns {
    let rows_per_block = threads_per_row(shape[1]).map_or(1, |threads| THREADS / threads);
    BlockColumns::new(shape[0], rows_per_block as usize, workers)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let shape = &request.operands[0].shape;
    division(shape, target.workers).scratch_bytes(shape[1])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::RmsNormBackward(op) = &call.call.op else {
        return Err(call.refuse("expected the backward of a normalization"));
    };
    let shape = call.input(0).shape;
    let &[rows, columns] = shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    // As the program was planned: its scratch has that many rows.
    let division = division(&shape, call.program.target.workers);
    let (suffix, threads, per_row, shared_bytes) = match threads_per_row(columns) {
        Some(per_row) => ("rows", THREADS, per_row, (columns * size_of::<f32>()) as u32),
        None => ("scalar", SCALAR_THREADS, SCALAR_THREADS, 0),
    };
    let entry = format!("rms_norm_backward_{suffix}");
    let function = device.function("rms_norm_backward", &entry, shared_bytes)?;
    let residual = match op.residual {
        true => call.input(4).argument(),
        false => Argument::Pointer(DevicePtr(0)),
    };
    let mut arguments: Vec<_> = (0..4).map(|index| call.input(index).argument()).collect();
    arguments.extend([
        residual,
        call.output(0).argument(),
        call.output(1).argument(),
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::U32(per_row),
        Argument::U32(u32::from(call.accumulate())),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.tickets(division.tickets())?),
        Argument::U32(division.members as u32),
    ]);
    let blocks = division.blocks as u32;
    Ok(vec![Device::launch(function, blocks, threads, shared_bytes, arguments)])
}
