//! `rms_norm.cu`: root-mean-square normalization, with or without a sum before it.

use deepwell_ir::{KernelRequest, Op};

use super::rows::{threads_per_row, too_large};
use super::support::all_bf16;
use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};

/// Threads of a block at least, where rows are short.
const THREADS_MIN: u32 = 128;
/// Threads of a block that takes a row element by element, as in the source.
const SCALAR_THREADS: u32 = 256;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_rms_norm",
    ops: &["rms_norm", "add_rms_norm"],
    architectures: &Architecture::ALL,
    library: None,
    reject,
    workspace_bytes: no_workspace,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let operands: &[usize] = match request.op {
        Op::AddRmsNorm(_) => &[0, 1, 2, 3, 4],
        _ => &[0, 1, 2],
    };
    all_bf16(request, operands).or_else(|| too_large(request, 0))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (prefix, eps) = match &call.call.op {
        Op::RmsNorm(op) => ("", op.eps),
        Op::AddRmsNorm(op) => ("add_", op.eps),
        _ => return Err(call.refuse("expected a normalization")),
    };
    let &[rows, columns] = call.input(0).shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let (suffix, threads, rows_per_block, per_row) = match threads_per_row(columns) {
        Some(per_row) => {
            let threads = per_row.max(THREADS_MIN);
            ("rows", threads, threads / per_row, per_row)
        }
        None => ("scalar", SCALAR_THREADS, 1, SCALAR_THREADS),
    };
    let function = device.function("rms_norm", &format!("{prefix}rms_norm_{suffix}"), 0)?;
    let blocks = (rows as u32).div_ceil(rows_per_block).max(1);
    let operands = 0..call.call.operands.len();
    let mut arguments: Vec<_> = operands.map(|index| call.operand(index).argument()).collect();
    arguments.extend([
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::U32(per_row),
        Argument::F32(eps as f32),
    ]);
    Ok(vec![Device::launch(function, blocks, threads, 0, arguments)])
}
