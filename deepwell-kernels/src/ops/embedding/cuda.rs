//! `embedding.cu`: rows of a table by token; under vocabulary parallelism a rank has a slice of the
//! table.

use deepwell_ir::ops::VocabSlice;
use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Units that a thread copies at a time.
const UNITS_PER_THREAD: usize = 4;
/// BF16 numbers in a 16-byte unit.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_embedding", &["embedding", "vocab_parallel_embedding"], prepare)
        .reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[1, 2])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (tokens, table, out) = (call.input(0), call.input(1), call.output(0));
    let (table_rows, columns) = (table.shape[0], table.shape[1]);
    let slice = slice_of(&call.call.op, table_rows);
    let (entry, width) = if columns.is_multiple_of(WIDTH) {
        ("embedding_16_bytes", columns / WIDTH)
    } else {
        ("embedding_2_bytes", columns)
    };
    let function = device.function("embedding", entry, 0)?;
    let rows = tokens.elements();
    let threads = (rows * width).div_ceil(UNITS_PER_THREAD);
    let ctas = grid_of(threads, THREADS, device.sm_count());
    let arguments = vec![
        tokens.argument(),
        table.argument(),
        out.argument(),
        Argument::U64(rows as u64),
        Argument::U32(slice.first as u32),
        Argument::U32(slice.rows as u32),
        Argument::U32(slice.vocab as u32),
        Argument::U32(width as u32),
    ];
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

/// Rows of the vocabulary in a table of `rows`: all rows, except for vocabulary-parallel ops.
pub(super) fn slice_of(op: &Op, rows: usize) -> VocabSlice {
    match op {
        Op::VocabParallelEmbedding(op) => op.slice,
        Op::VocabParallelEmbeddingBackward(op) => op.slice,
        _ => VocabSlice { first: 0, rows, vocab: rows },
    }
}

/// Writes the row of each token within the slice, or -1 for other tokens, as i32 to
/// `rows_of_slice`.
pub(super) fn slice_tokens(
    device: &mut Device<'_>,
    tokens: &DeviceTensor,
    slice: VocabSlice,
    rows_of_slice: DevicePtr,
) -> Result<Step, KernelError> {
    let function = device.function("embedding", "slice_tokens", 0)?;
    let count = tokens.elements();
    let arguments = vec![
        tokens.argument(),
        Argument::Pointer(rows_of_slice),
        Argument::U32(count as u32),
        Argument::U32(slice.first as u32),
        Argument::U32(slice.rows as u32),
    ];
    let ctas = count.div_ceil(THREADS as usize).max(1) as u32;
    Ok(Device::launch(function, ctas, THREADS, 0, arguments))
}
