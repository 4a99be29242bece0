//! `quantize.cu`: block quantization to MXFP8.

use deepwell_ir::{DType, KernelRequest, Op, Target};

use super::mx;
use crate::KernelError;
use crate::cuda::driver::{Argument, TensorMap};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec};

/// Blocks that a multiprocessor holds at most: 2048 threads.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_quantize",
    ops: &["quantize"],
    architectures: &Architecture::ALL,
    library: None,
    reject,
    workspace_bytes,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Quantize(quantize) = request.op else { return None };
    let source = &request.operands[0];
    if !matches!(source.dtype, DType::Bf16 | DType::F32) {
        return Some(format!("takes bf16 or f32, not {}", source.dtype));
    }
    mx::reject(quantize, &source.shape)
}

fn workspace_bytes(_: &KernelRequest<'_>, target: &Target) -> usize {
    mx::counts_bytes(BLOCKS_PER_MULTIPROCESSOR * target.workers.max(1))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Quantize(quantize) = &call.call.op else {
        return Err(call.refuse("expected a quantization"));
    };
    let x = call.input(0);
    let &[rows, columns] = x.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let (element, threads, shared_bytes) = match x.dtype {
        // The tile that comes, and the stage of the one that is quantized.
        DType::Bf16 => ("bf16", mx::BF16_TILE_THREADS, mx::BF16_TILE_BYTES + mx::STAGE_BYTES),
        _ => ("f32", 2 * mx::BF16_TILE_THREADS, 2 * mx::BF16_TILE_BYTES),
    };
    let entry = format!("quantize_{element}_{}", quantize.axis.name());
    let function = device.function("quantize", &entry, shared_bytes)?;
    let (workspace, workspace_bytes) = call.workspace();
    let tiles = rows.div_ceil(mx::TILE) * columns.div_ceil(mx::TILE);
    let resident = device.resident_blocks(function, threads, shared_bytes)? as usize;
    let blocks = tiles.min(resident).min(mx::blocks_of_counts(workspace_bytes)).max(1) as u32;
    let mx::Copies { places, statistics } = mx::copies(call, quantize.axis, 0);
    let source = match x.dtype {
        DType::Bf16 => mx::boxes_of_tiles(&x, device)?,
        _ => Argument::TensorMap(TensorMap([0; 16])),
    };
    let mut arguments = vec![source, x.argument()];
    arguments.extend(places);
    arguments.extend([
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::U32(mx::flags(&quantize.spec)),
        Argument::Pointer(workspace),
        Argument::Pointer(device.tickets(1)?),
        statistics,
    ]);
    Ok(vec![Device::launch(function, blocks, threads, shared_bytes, arguments)])
}
