//! `embedding.cu`: rows of a table by token.

use deepwell_ir::KernelRequest;

use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::launch::support::{all_bf16, grid_of};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Units that a thread copies at a time.
const UNITS_PER_THREAD: usize = 4;
/// BF16 of a 16-byte unit.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_embedding",
    ops: &["embedding"],
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[1, 2])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (tokens, table, out) = (call.input(0), call.input(1), call.output(0));
    let (vocab, columns) = (table.shape[0], table.shape[1]);
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
        Argument::U32(vocab as u32),
        Argument::U32(width as u32),
    ];
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
